"""PoSE positions: as drawn, in a model, in a Trainer."""

from __future__ import annotations

import pickle

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch.utils.data import DataLoader
from transformers import DataCollatorForLanguageModeling, PreTrainedTokenizerFast, Trainer

import isentrope as ise
from tests.fixtures.dense_llama import dense_logits, dpe, infoscale, leaky, rerope, selfextend, theta
from tests.fixtures.finetuning import arguments, examples, stacked
from tests.fixtures.models import TRAINED, VOCABULARY, llama, tokens


def tokenizer(side):
    words = {f"w{i}": i for i in range(VOCABULARY)}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="w1")), pad_token="w0", unk_token="w1", padding_side=side
    )


def ragged(lengths=(24, 9, 1, 17)):
    return [{"input_ids": tokens(1, n, seed=n)[0].tolist()} for n in lengths]


def language_modeling(side):
    return DataCollatorForLanguageModeling(tokenizer(side), mlm=False)


def rows(batch):
    """Positions of the real tokens of each row."""
    pairs = zip(batch["position_ids"], batch["attention_mask"], strict=True)
    return [positions[kept.bool()] for positions, kept in pairs]


@pytest.mark.parametrize("side", ["left", "right"])
def test_pose_positions(side):
    collator = ise.PoSECollator(language_modeling(side), target_length=256)
    plain = language_modeling(side)(ragged())
    furthest, jumps = 0, 0
    for _ in range(50):
        batch = collator(ragged())
        for key, x in plain.items():  # nothing else of the batch changes
            assert torch.equal(batch[key], x), key
        assert batch["position_ids"].shape == plain["input_ids"].shape
        assert batch["position_ids"].dtype == torch.int64
        for positions in rows(batch):
            steps = positions.diff()
            assert positions[0] == 0 and (steps >= 1).all() and (steps > 1).sum() <= 1 and positions[-1] < 256
            furthest, jumps = max(furthest, int(positions[-1])), jumps + int((steps > 1).sum())
    assert furthest > 240  # the whole target is reached
    assert jumps > 100  # of 150 rows that are long enough to have one


@pytest.mark.parametrize("collate", [stacked, language_modeling("right")])
def test_pose_draws_anew_and_repeats_by_seed(collate):
    def epochs(seed):
        collator = ise.PoSECollator(collate, target_length=4096, seed=seed)
        loader = DataLoader([{"input_ids": row} for row in tokens(6, 20).tolist()], batch_size=2, collate_fn=collator)
        return [torch.cat([batch["position_ids"] for batch in loader]) for _ in range(3)]

    first, again, other = epochs(0), epochs(0), epochs(1)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    for a, b in [(first[0], first[1]), (first[1], first[2]), (first[0], other[0])]:
        assert (a != b).any(1).all()  # every row of them
    assert len({tuple(row) for row in first[0].tolist()}) == 6


def test_pose_does_not_touch_the_random_numbers_of_others():
    collator = ise.PoSECollator(stacked, target_length=4096)
    torch.manual_seed(4)
    expected = torch.rand(3)
    torch.manual_seed(4)
    collator(examples())
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.filterwarnings(
    "ignore:This process.*multi-threaded.*fork:DeprecationWarning"
)  # Python 3.12 and the runner
@pytest.mark.parametrize("persistent", [False, True])
def test_pose_in_data_loader_workers(persistent):
    def epochs(seed):
        torch.manual_seed(seed)
        collator = ise.PoSECollator(stacked, target_length=1 << 20)
        loader = DataLoader(
            examples(4, 12), batch_size=1, collate_fn=collator, num_workers=2, persistent_workers=persistent
        )
        return [torch.cat([batch["position_ids"] for batch in loader]).tolist() for _ in range(2)]

    first, again = epochs(0), epochs(0)
    assert first == again  # a worker's stream follows torch's seed
    drawn = [tuple(row) for epoch in first for row in epoch]
    assert len(set(drawn)) == 8  # batches go to workers in turn: no two workers, and no two epochs, draw the same


def test_pose_collator_is_pickled():
    """As for workers that are spawned."""
    collator = ise.PoSECollator(stacked, target_length=4096)
    again = pickle.loads(pickle.dumps(collator))
    assert torch.equal(again(examples())["position_ids"], collator(examples())["position_ids"])
    again = pickle.loads(pickle.dumps(collator))  # in the middle of its stream, too
    assert torch.equal(again(examples())["position_ids"], collator(examples())["position_ids"])


def test_pose_refuses():
    with pytest.raises(ValueError, match="target_length=16"):
        ise.PoSECollator(stacked, target_length=16)(examples(length=17))
    square = ise.PoSECollator(lambda batch: {**stacked(batch), "attention_mask": torch.ones(4, 1, 8, 8)}, 64)
    with pytest.raises(ValueError, match="attention mask"):
        square(examples(length=8))
    with pytest.raises(ValueError, match="target_length"):
        ise.PoSECollator(stacked, target_length=0)


POSED = {
    "pi:factor=2": {"theta": theta() / 2},
    "rerope:window=32": {"theta": theta(), "distance": rerope(32)},
    "rerope:window=32+infoscale:train_length=64": {"theta": theta(), "distance": rerope(32), "tau": infoscale},
    "leakyrerope:window=32": {"theta": theta(), "distance": leaky},
    "selfextend:window=32,group=4": {"theta": theta(), "distance": selfextend},
    "dpe:window=24,scales=(1,2,8)": {"theta": theta(), "distance": dpe},
}


@pytest.mark.parametrize("recipe", POSED)
@pytest.mark.parametrize("length", [20, 72])  # shorter than the window, too: its distances are not
def test_pose_is_not_read_as_packing(recipe, length):
    """A plain collator has no mask, and transformers takes positions that jump without one for several texts."""
    collator = ise.PoSECollator(stacked, target_length=512, seed=1)
    batch = collator(examples(2, length))
    assert batch["attention_mask"].all() and batch["attention_mask"].shape == batch["input_ids"].shape
    assert (batch["position_ids"].diff() > 1).any(1).all()
    model = ise.extend(llama(), recipe)
    logits = model(**batch, use_cache=False).logits  # a cache switches the reading off
    expected = dense_logits(llama(), batch["input_ids"], at=batch["position_ids"], **POSED[recipe])
    torch.testing.assert_close(logits, expected, atol=2e-3, rtol=2e-3)
    del batch["attention_mask"]
    packed = model(**batch, use_cache=False).logits
    assert (packed - expected).abs().max() > 0.1  # what the mask averts


def test_pose_as_in_transformers():
    batch = ise.PoSECollator(stacked, target_length=512)(examples(2, 72))
    linear = llama(rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0})
    model = ise.extend(llama(), "pi:factor=2")
    torch.testing.assert_close(model(**batch).logits, linear(**batch).logits, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("recipe", POSED)
def test_pose_with_padding_is_each_row_alone(recipe, side):
    batch = ise.PoSECollator(language_modeling(side), target_length=512)(ragged((72, 30, 50)))
    logits = ise.extend(llama(), recipe)(**batch).logits
    for row, positions in enumerate(rows(batch)):
        kept = batch["attention_mask"][row].bool()
        alone = dense_logits(llama(), batch["input_ids"][row][kept][None], at=positions[None], **POSED[recipe])
        torch.testing.assert_close(logits[row][kept][None], alone, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("recipe", ["pi:factor=2", "rerope:window=32"])
def test_positions_changed_in_place_are_seen(recipe):
    """A training loop may write each step's positions into the same tensor."""
    ids = tokens(1, 40)
    options = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    model = ise.extend(llama(), recipe)
    positions = torch.arange(40)[None] + 100 * (torch.arange(40) >= 20)
    before = model(position_ids=positions, **options).logits
    positions[:, 30:] += 50
    after = model(position_ids=positions, **options).logits
    assert (after - before).abs().max() > 0.1
    torch.testing.assert_close(after, model(position_ids=positions.clone(), **options).logits)


def test_trainer_draws_positions_each_epoch(tmp_path):
    model = ise.extend(llama(initializer_range=0.05), "rerope:window=16+infoscale:train_length=32")
    seen = []

    def watch(module, args, kwargs):
        seen.append(kwargs["position_ids"].clone())

    model.register_forward_pre_hook(watch, with_kwargs=True)
    collator = ise.PoSECollator(stacked, target_length=4 * TRAINED)
    run = Trainer(model, arguments(tmp_path, num_train_epochs=6), data_collator=collator, train_dataset=examples())
    run.train()
    assert len(seen) == 12 and len({tuple(row) for batch in seen for row in batch.tolist()}) == 24
    losses = [entry["loss"] for entry in run.state.log_history if "loss" in entry]
    assert sum(losses[-2:]) < 0.8 * sum(losses[:2])
