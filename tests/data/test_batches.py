"""Batches of masked tokens: functions of the seed and the step, and nothing else."""

from __future__ import annotations

from math import sqrt

import numpy as np
import pytest
import torch

from isentrope.data.batches import MaskedBatches
from tests.fixtures.documents import FIRST, MASK, ORDINARY, TEN, documents


def batches(texts=TEN, **options):
    common = {"length": 40, "size": 4, "seed": 7, "mask_token": MASK, "replacement_tokens": ORDINARY}
    return MaskedBatches(texts, **(common | options))


def whole(batch):
    """The crops before anything was masked."""
    return batch["input_ids"].scatter(1, batch["at"], batch["labels"])


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_a_step_is_the_same_whenever_it_is_asked_for():
    one, other = batches(pose=512), batches(pose=512)
    backwards = {step: other[step] for step in reversed(range(12))}
    assert all(same(one[step], backwards[step]) for step in range(12))


def test_steps_and_seeds_differ():
    one = batches(pose=512)
    for other in (batches(pose=512)[3], batches(pose=512, seed=8)[2]):
        for name, x in one[2].items():
            assert not torch.equal(x, other[name]), name


def test_shapes():
    batch = batches(pose=512)[0]
    shapes = {name: (tuple(x.shape), x.dtype) for name, x in batch.items()}
    assert shapes == {
        "input_ids": ((4, 40), torch.int64),
        "at": ((4, 6), torch.int64),
        "labels": ((4, 6), torch.int64),
        "noise": ((4,), torch.int32),
        "position_ids": ((4, 40), torch.int64),
    }
    assert "position_ids" not in batches()[0]


@pytest.mark.parametrize("size", [1, 3, 4, 10, 25])
def test_an_epoch_takes_every_document_once(size):
    sampler = batches(size=size)
    taken = np.concatenate([sampler.document_indices(step) for step in range(-(-100 // size))])[:100]
    assert (np.sort(taken.reshape(10, 10)) == np.arange(10)).all()
    assert sampler.steps_per_epoch == 10 / size


def test_every_epoch_takes_them_in_another_order():
    sampler = batches(size=10)
    orders = {tuple(sampler.document_indices(epoch).tolist()) for epoch in range(50)}
    assert len(orders) == 50
    assert not orders & {tuple(batches(size=10, seed=8).document_indices(epoch).tolist()) for epoch in range(50)}


def test_crops_lie_in_the_documents_that_the_step_takes():
    sampler = batches()
    for step in range(100):
        crops, members = whole(sampler[step]), sampler.document_indices(step)
        begins = crops[:, 0].numpy() - FIRST * (members + 1)
        assert (crops.diff(dim=1) == 1).all()
        assert (begins >= 0).all() and (begins + 40 <= TEN.lengths[members]).all()


def test_random_crops_are_spread_over_their_document_and_first_ones_begin_it():
    begins = {crop: [] for crop in ("random", "first")}
    for crop, firsts in begins.items():
        drawn = batches(documents(139), size=50, crop=crop)
        firsts += [whole(drawn[step])[:, 0] - FIRST for step in range(100)]
    counts = torch.bincount(torch.cat(begins["random"]))
    assert len(counts) == 100 and not torch.cat(begins["first"]).any()
    # χ² of 99 degrees of freedom: its mean is 99, its standard deviation √198
    assert ((counts - 50) ** 2 / 50).sum() < 99 + 4 * sqrt(198)


@pytest.mark.parametrize(("share", "length", "count"), [(0.15, 40, 6), (0.15, 16, 2), (0.5, 7, 4), (0.01, 8, 1)])
def test_a_row_has_its_share_of_predictions_each_once_and_in_order(share, length, count):
    sampler = batches(length=length, share=share)
    for step in range(30):
        at = sampler[step]["at"]
        assert at.shape == (4, count) and (at.diff(dim=1) > 0).all()
        assert (at >= 0).all() and (at < length).all()


def test_labels_are_what_was_there_and_only_predictions_are_touched():
    sampler = batches(documents(40, 40, 40, 40), crop="first")
    for step in range(30):
        batch = sampler[step]
        original = torch.from_numpy(
            np.stack([sampler.documents[i] for i in sampler.document_indices(step)]).astype(np.int64)
        )
        assert torch.equal(batch["labels"], original.gather(1, batch["at"]))
        assert torch.equal(whole(batch), original)


def test_of_the_predictions_eight_tenths_are_masked_one_replaced_and_one_kept():
    sampler, steps = batches(size=64), 100
    drawn = [sampler[step] for step in range(steps)]
    shown = torch.cat([batch["input_ids"].gather(1, batch["at"]) for batch in drawn])
    labels = torch.cat([batch["labels"] for batch in drawn])
    masked, kept = shown == MASK, shown == labels
    replaced = ~masked & ~kept
    for chosen, share in ((masked, 0.8), (replaced, 0.1), (kept, 0.1)):
        assert abs(chosen.double().mean() - share) < 4 * sqrt(share * (1 - share) / shown.numel())
    assert sorted(set(shown[replaced].tolist())) == ORDINARY.tolist()


def test_every_place_of_a_crop_is_predicted_as_often():
    sampler, steps = batches(size=64), 100
    counts = torch.bincount(torch.cat([sampler[step]["at"].flatten() for step in range(steps)]), minlength=40)
    assert (counts / (64 * steps) - 0.15).abs().max() < 4 * sqrt(0.15 * 0.85 / (64 * steps))


def test_masks_and_noise_are_drawn_anew_each_epoch():
    sampler = batches(documents(*[40] * 10), size=10, crop="first")
    rows = {}
    for epoch in range(8):
        batch = sampler[epoch]
        for row, document in enumerate(sampler.document_indices(epoch).tolist()):
            rows.setdefault(document, []).append((tuple(batch["at"][row].tolist()), int(batch["noise"][row])))
    for of_one in rows.values():
        places, noise = zip(*of_one, strict=True)
        assert len(set(places)) == len(set(noise)) == 8
    assert len({noise for of_one in rows.values() for _, noise in of_one}) == 80


def test_pose_positions_increase_stay_below_their_target_and_differ():
    sampler = batches(pose=128)
    drawn = torch.stack([sampler[step]["position_ids"] for step in range(100)])
    assert (drawn.diff(dim=-1) >= 1).all() and not drawn[..., 0].any()
    assert 120 < drawn.max() < 128
    assert len({tuple(row.tolist()) for row in drawn.flatten(0, 1)}) > 350


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"length": 41}, "length: expected at most the shortest document's 40 tokens, got 41"),
        ({"length": 0}, "length"),
        ({"size": 0}, "size"),
        ({"crop": "last"}, "crop: expected one of random, first, got 'last'"),
        ({"share": 0.0}, "share"),
        ({"share": 1.0}, "share"),
        ({"share": float("nan")}, "share"),
        ({"pose": 39}, "pose: expected at least the length 40, got 39"),
        ({"replacement_tokens": np.arange(0)}, "replacement_tokens"),
    ],
    ids=str,
)
def test_bad_arguments(options, message):
    with pytest.raises(ValueError, match=message):
        batches(**options)


def test_no_documents():
    with pytest.raises(ValueError, match="documents: expected some, got none"):
        batches(documents())
