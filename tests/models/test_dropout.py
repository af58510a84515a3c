"""Dropout by hash: a row's own numbers decide its choices, wherever and with whatever it is computed."""

from __future__ import annotations

from itertools import combinations
from math import sqrt

import pytest
import torch
from torch.nn import functional as F
from torch.testing import assert_close

from isentrope.data.batches import MaskedBatches
from isentrope.models.gau.dropout import dropout
from tests.fixtures.documents import MASK, ORDINARY, TEN
from tests.fixtures.gau import model, tokens

RATE = 0.1
SHAPES = [(8, 33), (8, 17, 24), (8, 2, 15, 15)]


def noise(count=8, seed=0):
    return torch.randint(0, 1 << 31, (count,), dtype=torch.int32, generator=torch.Generator().manual_seed(seed))


def kept(numbers, site=0, rate=RATE, shape=(100, 100)):
    return dropout(torch.ones(len(numbers), *shape), rate, numbers, site) > 0


@pytest.mark.parametrize("rate", [0.01, 0.1, 0.3, 0.5, 0.9])
def test_a_share_is_dropped_and_the_rest_scaled_up(rate):
    x = torch.randn(64, 40, 40, dtype=torch.float64)
    out = dropout(x, rate, noise(64), 3)
    dropped = out == 0
    assert abs(dropped.double().mean() - rate) < 4 * sqrt(rate * (1 - rate) / x.numel())
    # in every row, column and position alike
    for dims in ((0, 1), (0, 2), (1, 2)):
        means = dropped.double().mean(dims)
        assert (means - rate).abs().max() < 5 * sqrt(rate * (1 - rate) * len(means) / x.numel())
    assert_close(out[~dropped], x[~dropped] / (1 - rate))


@pytest.mark.parametrize("shape", SHAPES)
def test_choices_do_not_depend_on_the_rest_of_the_batch(shape):
    x, numbers = torch.randn(shape), noise()
    out = dropout(x, RATE, numbers, 2)
    assert torch.equal(dropout(x, RATE, numbers, 2), out)
    assert torch.equal(dropout(x[2:5], RATE, numbers[2:5], 2), out[2:5])
    order = torch.randperm(len(x))
    assert torch.equal(dropout(x[order], RATE, numbers[order], 2), out[order])
    assert torch.equal(dropout(x, RATE, numbers.long(), 2), out)


def test_other_layouts_of_memory_give_the_same():
    x, numbers = torch.randn(8, 24, 17), noise()
    assert torch.equal(dropout(x.mT, RATE, numbers, 2), dropout(x.mT.contiguous(), RATE, numbers, 2))


def uncorrelated(masks):
    flat = torch.stack([mask.flatten().double() for mask in masks])
    actual = torch.corrcoef(flat)[*torch.triu_indices(len(flat), len(flat), 1)]
    return actual.abs().max() < 4 / sqrt(flat.shape[1]) and not torch.equal(flat[0], flat[1])


def test_rows_sites_and_steps_are_uncorrelated():
    numbers = noise()
    assert uncorrelated(kept(numbers))
    assert uncorrelated([kept(numbers, site) for site in range(13)])  # as many as six layers have
    batches = MaskedBatches(TEN, length=40, size=8, seed=0, mask_token=MASK, replacement_tokens=ORDINARY)
    assert uncorrelated([kept(batches[step]["noise"]) for step in range(8)])


def test_numbers_next_to_each_other_and_sites_do_too():
    assert uncorrelated(kept(torch.arange(12)))
    assert uncorrelated([kept(torch.arange(4), site) for site in range(4)])


def test_neighbours_within_a_row_are_uncorrelated():
    mask = kept(noise(1), shape=(100_000,))[0]
    for shift in (1, 2, 3, 16, 64, 100, 128, 1024):
        assert uncorrelated([mask[:-shift], mask[shift:]]), shift


def test_no_two_sites_of_a_row_share_a_mask():
    masks = [kept(noise(2), site, 0.5, (4096,)) for site in range(49)]  # 24 layers
    assert not any(torch.equal(a, b) for a, b in combinations(masks, 2))


def test_backward_drops_what_the_forward_dropped():
    x = torch.randn(8, 30, 30, dtype=torch.float64, requires_grad=True)
    out = dropout(x, 0.3, noise(), 1)
    out.sum().backward()
    assert torch.equal(x.grad == 0, out == 0)
    assert_close(x.grad[out != 0], torch.full_like(out[out != 0], 1 / 0.7))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_dtypes_stay_and_choices_are_the_same_in_all(dtype):
    x = torch.ones(8, 50, dtype=dtype, requires_grad=True)
    out = dropout(x, RATE, noise(), 1)
    out.sum().backward()
    assert out.dtype == x.grad.dtype == dtype
    assert torch.equal(out > 0, kept(noise(), 1, shape=(50,)))


def test_nothing_is_dropped_at_rate_0():
    x = torch.randn(8, 30)
    assert dropout(x, 0.0, noise(), 0) is x and dropout(x, 0.0, None, 0) is x


def test_without_numbers_torch_decides():
    x = torch.randn(8, 30)
    torch.manual_seed(3)
    out = dropout(x, 0.3, None, 0)
    assert not torch.equal(dropout(x, 0.3, None, 0), out)
    torch.manual_seed(3)
    assert torch.equal(F.dropout(x, 0.3), out)


# in GAU-α


def trained(**options):
    return model(hidden_dropout_prob=0.2, attention_probs_dropout_prob=0.3, **options).train()


def test_a_model_with_equal_numbers_gives_equal_logits():
    gau, ids = trained(), tokens()
    with torch.no_grad():
        first = gau(ids, noise=noise(2)).logits
        torch.manual_seed(1)
        assert torch.equal(gau(ids, noise=noise(2)).logits, first)
        assert not torch.equal(gau(ids, noise=noise(2, seed=1)).logits, first)
        assert not torch.equal(gau(ids).logits, gau(ids).logits)


@pytest.mark.parametrize("recipe", ["rope", "rerope:window=8+infoscale", "cosine:alpha=16", "window:size=6"])
def test_rows_alone_are_rows_of_a_batch(recipe):
    gau, ids, numbers = trained(recipe=recipe, max_position_embeddings=8), tokens(5), noise(5)
    at = torch.tensor([[1, 4, 28]]).expand(5, -1)
    with torch.no_grad():
        for options in ({}, {"at": at}):
            together = gau(ids, noise=numbers, **options).logits
            alone = [gau(ids[i : i + 1], noise=numbers[i : i + 1], **{k: v[:1] for k, v in options.items()}).logits
                     for i in range(5)]  # fmt: skip
            assert_close(torch.cat(alone), together, atol=1e-10, rtol=0)
            order = torch.tensor([3, 1, 4, 0, 2])
            assert_close(gau(ids[order], noise=numbers[order], **options).logits, together[order], atol=1e-10, rtol=0)


def test_twins_in_a_batch_differ_by_their_numbers():
    gau, ids = trained(), tokens(1).expand(2, -1)
    with torch.no_grad():
        one, other = gau(ids, noise=noise(2)).logits
        assert not torch.equal(one, other)
        one, other = gau(ids, noise=noise(1).expand(2)).logits
        assert_close(one, other, atol=1e-10, rtol=0)


def test_the_mean_over_numbers_is_near_the_model_without_dropout():
    gau, ids = model(hidden_dropout_prob=0.05, attention_probs_dropout_prob=0.05), tokens(1)
    with torch.no_grad():
        expected = gau(ids).logits[0]
        many = gau.train()(ids.expand(400, -1), noise=noise(400)).logits
    assert (many.mean(0) - expected).norm() < 0.2 * expected.norm()
    assert (many - expected).norm(dim=(1, 2)).min() > 0.2 * expected.norm()


def test_evaluation_ignores_numbers():
    gau, ids = trained().eval(), tokens()
    with torch.no_grad():
        assert torch.equal(gau(ids, noise=noise(2)).logits, gau(ids).logits)


def test_every_site_of_the_model_drops_for_itself(monkeypatch):
    sites = []

    def noted(x, rate, noise, site):
        sites.append(site)
        return dropout(x, rate, noise, site)

    monkeypatch.setattr("isentrope.models.gau.modeling.dropout", noted)
    trained()(tokens(), noise=noise(2))
    assert sorted(sites) == list(range(7))  # embeddings, and attention and output of three layers


@pytest.mark.parametrize("with_at", [False, True])
def test_gradient_checkpointing_repeats_the_choices(with_at):
    at = torch.tensor([[1, 4, 28], [0, 2, 9]]) if with_at else None
    gradients = []
    for checkpointing in (False, True):
        gau = trained()
        if checkpointing:
            gau.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        gau(tokens(), labels=tokens(seed=1), noise=noise(2), at=at).loss.backward()
        gradients.append([x.grad for x in gau.parameters()])
    for a, b in zip(*gradients, strict=True):
        assert torch.equal(a, b)
