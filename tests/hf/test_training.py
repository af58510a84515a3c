"""Training an extended model: gradients, checkpointing, Trainer, LoRA, PoSE positions, parts that learn."""

from __future__ import annotations

import math
import pickle

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch.utils.data import DataLoader
from transformers import DataCollatorForLanguageModeling, PreTrainedTokenizerFast, Trainer, TrainingArguments
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import isentrope as ise
from tests.fixtures.models import TRAINED, VOCABULARY, llama, tokens

HEADS, HEAD_DIM = 4, 8
LONG = 80  # past the length of the tiny model


# A model of our own making: every pair of tokens rotated by its distance, scored and summed one by one.


def theta(base=10000.0):
    return base ** (-torch.arange(0, HEAD_DIM, 2).double() / HEAD_DIM)


def yarn_theta():
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": TRAINED, "rope_theta": 10000.0}
    config = llama(rope_parameters=scaling, max_position_embeddings=4 * TRAINED).config
    return ROPE_INIT_FUNCTIONS["yarn"](config, "cpu")[0].double()


def infoscale(n):
    return torch.sqrt((1 - n ** (-2 / HEAD_DIM)) / (1 - TRAINED ** (-2 / HEAD_DIM))).clamp_min(1)


def logn(n):
    return (n.log() / math.log(TRAINED)).clamp_min(1)


def rerope(window):
    return lambda i, j: (i - j).clamp(max=window)


def leaky(i, j, window=32, leak=16):
    return torch.where(i - j < window, i - j, window + (i - j - window) / leak)


def selfextend(i, j, window=32, group=4):
    return torch.where(i - j < window, i - j, i // group + window - window // group - j // group)


def streaming(i, j, sinks=4, size=24):
    """Distances inside a cache that keeps the sinks and the window."""
    return torch.where(i - j < size, i - j, i.clamp(max=sinks + size - 1) - j)


def first_and_near(sinks, size):
    return lambda i, j: (j < sinks) | (i - j < size)


def dense_logits(
    model, ids, *, theta=None, distance=lambda i, j: i - j, tau=None, seen=None, alpha=None, slopes=None, at=None
):
    """Logits of a plain Llama whose attention is computed pair by pair."""
    at = torch.arange(ids.shape[1]).expand_as(ids) if at is None else at
    i, j = at[:, :, None], at[:, None, :]
    visible = (torch.ones_like(i) * j <= i) if seen is None else (j <= i) & seen(i, j)
    met = distance(i, j).double()[..., None] * (torch.zeros(HEAD_DIM // 2) if theta is None else theta)
    cos, sin = met.cos()[:, None], met.sin()[:, None]
    x = model.model.embed_tokens(ids)
    for block in model.model.layers:
        h, attend = block.input_layernorm(x), block.self_attn
        q, k, v = (
            project(h).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2)
            for project in (attend.q_proj, attend.k_proj, attend.v_proj)
        )
        k, v = (y.repeat_interleave(q.shape[1] // y.shape[1], 1) for y in (k, v))
        if alpha is not None:
            q, k = (y / y.norm(dim=-1, keepdim=True) for y in (q, k))
        (q1, q2), (k1, k2) = (y.unflatten(-1, (2, -1)).unbind(-2) for y in (q, k))
        q1, q2, k1, k2 = q1[:, :, :, None], q2[:, :, :, None], k1[:, :, None], k2[:, :, None]
        score = ((q1 * k1 + q2 * k2) * cos - (q2 * k1 - q1 * k2) * sin).sum(-1)
        score = score * (HEAD_DIM**-0.5 if alpha is None else alpha)
        if tau is not None:
            score = score * tau(visible.sum(-1).double())[:, None, :, None]
        if slopes is not None:
            score = score - slopes[:, None, None] * (i - j).double()[:, None]
        weights = score.masked_fill(~visible[:, None], -math.inf).softmax(-1).to(v.dtype)
        x = x + attend.o_proj((weights @ v).transpose(1, 2).flatten(2))
        x = x + block.mlp(block.post_attention_layernorm(x))
    return model.lm_head(model.model.norm(x))


ORACLES = {
    "pi:factor=2": {"theta": theta() / 2},
    "ntk:factor=4": {"theta": theta(10000 * 4 ** (8 / 6))},
    "ntk:factor=4,dynamic=true": {"theta": theta(10000 * (4 * LONG / TRAINED - 3) ** (8 / 6))},
    "yarn:factor=4": {"theta": yarn_theta()},
    "infoscale": {"theta": theta(), "tau": infoscale},
    "rerope:window=32+infoscale": {"theta": theta(), "distance": rerope(32), "tau": infoscale},
    "leakyrerope:window=32": {"theta": theta(), "distance": leaky},
    "selfextend:window=32,group=4": {"theta": theta(), "distance": selfextend},
    "window:size=24": {"theta": theta(), "seen": first_and_near(0, 24)},
    "window:size=70+logn": {"theta": theta(), "seen": first_and_near(0, 70), "tau": logn},
    "sink:sinks=4,size=24": {"theta": theta(), "distance": streaming, "seen": first_and_near(4, 24)},
    "rerope:window=24+lambda:sinks=5,window=24": {
        "theta": theta(),
        "distance": rerope(24),
        "seen": first_and_near(5, 24),
    },
    "cosine:alpha=16": {"theta": theta(), "alpha": 16},
    "cosine:alpha=16+infoscale": {"theta": theta(), "alpha": 16, "tau": infoscale},
    "alibi": {"slopes": 2.0 ** -torch.arange(2, 10, 2).double()},
}
UNTRAINED = ("cosine", "alibi", "nope", "ssmax")


def extend(model, recipe, **options):
    """`ise.extend`, with the warning that belongs to parts a model must be trained with."""
    if not any(name in recipe for name in UNTRAINED):
        return ise.extend(model, recipe, **options)
    with pytest.warns(UserWarning, match="not trained with"):
        return ise.extend(model, recipe, allow_untrained=True, **options)


def next_token_loss(logits, ids):
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def gradients(model):
    return {name: x.grad.clone() for name, x in model.named_parameters() if x.grad is not None}


def assert_same_gradients(found, expected, tolerance):
    assert found.keys() == expected.keys()
    for name, x in expected.items():
        assert (found[name] - x).abs().max() <= tolerance * x.abs().max(), name


@pytest.mark.parametrize("recipe", ORACLES)
def test_logits_and_gradients_are_those_of_a_dense_computation(recipe):
    ids = tokens(2, LONG)
    plain, model = llama().double(), extend(llama().double(), recipe)
    expected = dense_logits(plain, ids, **ORACLES[recipe])
    logits = model(input_ids=ids).logits
    # RMSNorm works in fp32 whatever the dtype, and so do the angles of the model's own rotary module
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
    next_token_loss(expected, ids).backward()
    next_token_loss(logits, ids).backward()
    assert_same_gradients(gradients(model), gradients(plain), 1e-4)


@pytest.mark.parametrize("recipe", [*ORACLES, "clex:max_factor=4", "ssmax"])
def test_gradients_do_not_depend_on_the_backend(recipe):
    ids = tokens(2, LONG)
    found = []
    for backend in ("auto", "reference", "chunked"):
        model = extend(llama().double(), recipe, backend=backend)
        for part in model.modules():
            if isinstance(part, ise.CLEX):
                torch.nn.init.normal_(part.down.weight, std=0.1, generator=torch.Generator().manual_seed(1))
                torch.nn.init.normal_(part.up.weight, std=0.5, generator=torch.Generator().manual_seed(2))
        next_token_loss(model(input_ids=ids).logits, ids).backward()
        found.append(gradients(model))
    assert_same_gradients(found[0], found[1], 1e-5)
    assert_same_gradients(found[2], found[1], 1e-5)


RECIPES = [
    "rerope:window=16+infoscale:train_length=32",
    "ntk:factor=4,dynamic=true",
    "sink:sinks=4,size=24",
    "yarn:factor=4",
    "clex:max_factor=4",
    "ssmax",
]


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
def test_gradient_checkpointing(recipe, reentrant):
    ids = tokens(2, LONG)
    mask = torch.ones_like(ids)
    mask[0, :9] = 0
    labels = ids.masked_fill(mask == 0, -100)
    found, calls = [], []
    for checkpointing in (False, True):
        model = extend(llama(), recipe).train()
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
            model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
        sample_beyond_one(model)
        model(input_ids=ids, attention_mask=mask, labels=labels).loss.backward()
        found.append(gradients(model))
    assert len(calls) == 2  # forward, and again for the backward
    assert_same_gradients(found[1], found[0], 1e-5)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("quiet", [torch.inference_mode, torch.no_grad])
def test_evaluation_does_not_spoil_training(recipe, quiet):
    """What is worked out once for a shape, or for a batch, must serve training after evaluation too."""
    ids = tokens(2, 48)
    mask = torch.ones_like(ids)
    jumping = torch.arange(48).expand(2, -1) + 50 * (torch.arange(48) >= 20)
    for extra in ({}, {"attention_mask": mask, "position_ids": jumping}):
        model, fresh = (extend(llama(), recipe).train() for _ in range(2))
        sample_beyond_one(model)
        sample_beyond_one(fresh)
        with quiet():
            model(input_ids=ids, **extra)
        model(input_ids=ids, labels=ids, **extra).loss.backward()
        fresh(input_ids=ids, labels=ids, **{key: x.clone() for key, x in extra.items()}).loss.backward()
        assert_same_gradients(gradients(model), gradients(fresh), 1e-6)


def test_autocast():
    ids = tokens(2, LONG)
    model = ise.extend(llama(initializer_range=0.1), "rerope:window=16+infoscale").train()
    exact = model(input_ids=ids, labels=ids).loss
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    assert abs(loss - exact) < 0.02 * exact
    assert all(x.grad.isfinite().all() and x.grad.any() for x in model.parameters())


# Trainer


def memorise(model, ids, steps, rate=1e-2, **extra):
    """A few steps on one batch; the losses."""
    optimiser = torch.optim.AdamW([x for x in model.parameters() if x.requires_grad], rate)
    losses = []
    for _ in range(steps):
        loss = model(input_ids=ids, labels=ids, **extra).loss
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    return losses


def arguments(folder, **options):
    fixed = {
        "use_cpu": True,
        "report_to": "none",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_strategy": "no",
        "seed": 3,
    }
    return TrainingArguments(output_dir=str(folder), **(fixed | options))


def examples(count=4, length=40):
    return [{"input_ids": row, "labels": row} for row in tokens(count, length).tolist()]


def stacked(batch):
    return {key: torch.tensor([row[key] for row in batch]) for key in batch[0]}


@pytest.mark.parametrize("recipe", ["rerope:window=16+infoscale:train_length=32", "yarn:factor=4", "clex", "ssmax"])
def test_trainer_trains_saves_and_resumes(recipe, tmp_path):
    def trainer(model, folder, **options):
        options = {"max_steps": 12, **options}
        return Trainer(model, arguments(folder, **options), data_collator=stacked, train_dataset=examples())

    whole = extend(llama(initializer_range=0.05), recipe)
    first = trainer(whole, tmp_path / "whole", save_strategy="steps", save_steps=6)
    first.train()
    losses = [entry["loss"] for entry in first.state.log_history if "loss" in entry]
    assert losses[-1] < 0.8 * losses[0]

    resumed = extend(llama(seed=1, initializer_range=0.05), recipe)
    trainer(resumed, tmp_path / "resumed").train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-6"))
    expected = whole.state_dict()
    for name, x in resumed.state_dict().items():
        torch.testing.assert_close(x, expected[name], atol=1e-5, rtol=1e-5, msg=name)

    loaded = ise.load(tmp_path / "whole" / "checkpoint-12")
    ids = tokens(1, LONG)
    assert torch.equal(loaded(ids).logits, whole.eval()(ids).logits)


def test_trainer_with_gradient_checkpointing(tmp_path):
    final = []
    for checkpointing in (False, True):
        model = ise.extend(llama(initializer_range=0.05), "rerope:window=16+infoscale:train_length=32")
        options = arguments(tmp_path, max_steps=3, gradient_checkpointing=checkpointing)
        Trainer(model, options, data_collator=stacked, train_dataset=examples()).train()
        final.append(model.state_dict())
    for name, x in final[0].items():
        torch.testing.assert_close(final[1][name], x, atol=1e-5, rtol=1e-5, msg=name)


# LoRA


def adapted(recipe, extended_first, **overrides):
    """A model with LoRA and a recipe, put on in either order."""
    # the seed decides the adapter's weights: the same in either order
    lora = LoraConfig(r=4, target_modules=["q_proj", "k_proj", "v_proj", "up_proj"], task_type="CAUSAL_LM")
    model = llama(initializer_range=0.1, **overrides)
    if extended_first:
        ise.extend(model, recipe)
    torch.manual_seed(5)
    model = get_peft_model(model, lora)
    return model if extended_first or recipe == "plain" else ise.extend(model, recipe)


ORDERS = pytest.mark.parametrize("extended_first", [True, False])


@ORDERS
@pytest.mark.parametrize("recipe", ["rerope:window=16+infoscale:train_length=32", "pi:factor=2"])
def test_lora_trains_adapters_alone_and_merges(recipe, extended_first, tmp_path):
    model = adapted(recipe, extended_first).train()
    before = {name: x.detach().clone() for name, x in model.named_parameters()}
    losses = memorise(model, tokens(2, 40), 12)
    assert losses[-1] < losses[0] - 0.1
    for name, x in model.named_parameters():
        assert torch.equal(x, before[name]) != ("lora_" in name), name

    ids = tokens(2, LONG, seed=1)
    expected = model.eval()(input_ids=ids).logits
    model.save_pretrained(tmp_path / "adapter")
    assert {path.suffix for path in (tmp_path / "adapter").iterdir()} <= {".json", ".safetensors", ".md"}
    base = ise.extend(llama(initializer_range=0.1), recipe)
    with pytest.warns(UserWarning, match="isentrope"):  # PEFT says which key it does not know
        again = PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    torch.testing.assert_close(again(input_ids=ids).logits, expected, atol=1e-6, rtol=1e-6)

    merged = model.merge_and_unload()
    assert not any("lora" in name for name, _ in merged.named_parameters())
    torch.testing.assert_close(merged(input_ids=ids).logits, expected, atol=1e-4, rtol=1e-4)
    assert str(ise.describe(merged).recipe) == str(ise.describe(base).recipe)

    merged.save_pretrained(tmp_path / "merged")
    assert torch.equal(ise.load(tmp_path / "merged")(ids).logits, merged(ids).logits)

    weights = merged.state_dict()
    plain = llama(initializer_range=0.1)
    plain.load_state_dict(weights)
    assert torch.equal(ise.restore(merged)(ids).logits, plain(ids).logits)


@ORDERS
def test_a_wrapped_model_is_described_and_restored(extended_first):
    model, plain = adapted("rerope:window=16", extended_first).eval(), adapted("plain", False).eval()
    ids = tokens(2, LONG)
    with pytest.raises(ValueError, match="already extended"):
        ise.extend(model, "rerope:window=16")
    assert ise.describe(model).recipe == "rerope:window=16"
    assert ise.restore(model) is model
    assert torch.equal(model(input_ids=ids).logits, plain(input_ids=ids).logits)
    with pytest.raises(ValueError, match="not extended"):
        ise.restore(model)


def test_learned_parameters_survive_merging(tmp_path):
    """They belong to the model inside the wrapper, which is what is left when adapters are merged."""
    model = adapted("clex", extended_first=False)
    with torch.no_grad():
        part(model, ise.CLEX).down.weight.normal_(std=0.1, generator=torch.Generator().manual_seed(1))
    merged = model.merge_and_unload()
    assert any(isinstance(module, ise.CLEX) for module in merged.modules())
    merged.save_pretrained(tmp_path)
    ids = tokens(1, LONG)
    assert torch.equal(ise.load(tmp_path)(ids).logits, merged.eval()(ids).logits)


def test_trainer_trains_lora_with_pose(tmp_path):
    model = adapted("rerope:window=16", extended_first=True)
    collator = ise.PoSECollator(stacked, target_length=4 * TRAINED)
    run = Trainer(model, arguments(tmp_path, max_steps=10), data_collator=collator, train_dataset=examples())
    run.train()
    losses = [entry["loss"] for entry in run.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0]


# PoSE


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


# Parts that a model is trained with


@pytest.mark.parametrize("recipe", ["cosine:alpha=16", "cosine:alpha=16+infoscale", "alibi", "ssmax", "nope"])
def test_training_from_scratch(recipe):
    model = llama(initializer_range=0.02, max_position_embeddings=16)  # so that InfoScale has something to do
    with pytest.raises(ValueError, match="allow_untrained"):
        ise.extend(model, recipe)
    with pytest.warns(UserWarning, match="not trained with"):
        ise.extend(model, recipe, allow_untrained=True)
    before = {name: x.detach().clone() for name, x in model.named_parameters()}
    losses = memorise(model.train(), tokens(2, 24), 40)
    assert losses[-1] < 0.3 * losses[0]
    assert not any(torch.equal(x, before[name]) for name, x in model.named_parameters())


def part(model, kind):
    return next(module for module in model.modules() if isinstance(module, kind))


def sample_beyond_one(model):
    """Draw CLEX's t, as a training loop does before each step, until frequencies differ from the model's own."""
    for module in model.modules():
        if isinstance(module, ise.CLEX):
            generator = torch.Generator().manual_seed(0)
            while module.sample(generator) == 1:
                pass


def test_clex_is_part_of_the_model():
    plain, model = llama(), ise.extend(llama(), "clex")
    clex = part(model, ise.CLEX)
    added = {name: x for name, x in model.named_parameters() if name not in dict(plain.named_parameters())}
    assert len(added) == 2 and {id(x) for x in added.values()} == {id(clex.up.weight), id(clex.down.weight)}
    assert added.keys() == model.state_dict().keys() - plain.state_dict().keys()
    assert sum(isinstance(module, ise.CLEX) for module in model.modules()) == 1  # one for all layers
    assert not clex.training and model.train() is model and clex.training
    assert not model.eval().training and not clex.training
    assert part(ise.extend(llama().train(), "clex"), ise.CLEX).training
    model.to(torch.float64)
    assert clex.up.weight.dtype == clex.down.weight.dtype == torch.float64
    assert dict(ise.restore(model).named_parameters()).keys() == dict(plain.named_parameters()).keys()


def test_clex_starts_as_ntk():
    ids = tokens(2, 2 * TRAINED)
    model = ise.extend(llama(), "clex")
    # t = 2 for rows of twice the training length: base · (2t - 1)^{d/(d-2)}
    expected = dense_logits(llama(), ids, theta=theta(10000 * 3 ** (8 / 6)))
    torch.testing.assert_close(model(ids).logits, expected, atol=2e-3, rtol=2e-3)


def test_clex_trains():
    """Several steps on one shape: angles follow the parameters and the t that was drawn."""
    ids = tokens(2, 40)
    model = ise.extend(llama(initializer_range=0.1), "clex:max_factor=4").train()
    clex = part(model, ise.CLEX)
    sample_beyond_one(model)
    model(input_ids=ids, labels=ids).loss.backward()
    assert clex.down.weight.grad.any()
    optimiser = torch.optim.SGD(clex.parameters(), 1.0)
    optimiser.step()
    optimiser.zero_grad()
    model(input_ids=ids, labels=ids).loss.backward()
    assert clex.down.weight.grad.any() and clex.up.weight.grad.any()  # up was behind a zero before

    drawn, generator = set(), torch.Generator().manual_seed(0)
    with torch.no_grad():
        while len(drawn) < 4:
            drawn.add(t := clex.sample(generator))
            frequencies = clex.path(4, torch.float64, torch.device("cpu"))[t - 1]
            expected = dense_logits(llama(initializer_range=0.1), ids, theta=frequencies)
            torch.testing.assert_close(model(input_ids=ids).logits, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("recipe", ["clex:max_factor=3", "ssmax", "ssmax:bias=true", "rerope:window=16+ssmax"])
def test_learned_parts_by_finite_differences(recipe):
    ids = tokens(2, 2 * TRAINED + 5)
    model = extend(llama(initializer_range=0.2).double(), recipe)
    model.to(torch.float64)
    own = {name for name, _ in llama().named_parameters()}
    learned = {name: x for name, x in model.named_parameters() if name not in own}
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for x in learned.values():
            x.add_(0.1 * torch.randn(x.shape, generator=generator))

    def loss():
        return next_token_loss(model(input_ids=ids).logits, ids)

    loss().backward()
    for name, x in learned.items():
        way = torch.randn(x.shape, generator=generator, dtype=x.dtype)
        step = 1e-3 / way.norm()
        values = []
        with torch.no_grad():
            for sign in (1, -2):
                x.add_(sign * step * way)
                values.append(loss().item())
            x.add_(step * way)
        slope = (x.grad * way).sum().item()
        assert x.grad.any()
        # RMSNorm's fp32 is the noise here
        assert slope == pytest.approx((values[0] - values[1]) / (2 * step.item()), rel=1e-2, abs=1e-3), name


def test_ssmax_learns_in_every_layer():
    model = extend(llama(initializer_range=0.1), "ssmax:bias=true").train()
    plain = {name for name, _ in llama().named_parameters()}
    added = {name: x for name, x in model.named_parameters() if name not in plain}
    laws = [module for module in model.modules() if isinstance(module, ise.SSMax)]
    assert len(laws) == 2 and len(added) == 4
    assert {id(x) for law in laws for x in law.parameters()} == {id(x) for x in added.values()}
    memorise(model, tokens(2, 40), 3)
    assert all(x.shape == (HEADS,) and x.grad.abs().min() > 0 for x in added.values())
    assert (laws[0].slope != laws[1].slope).any()
    before = laws[0].slope.detach().clone()
    model.to(torch.bfloat16)
    assert torch.equal(laws[0].slope, before.to(torch.bfloat16))


def test_a_recipe_given_twice_is_not_shared():
    """What one model learns stays with it."""
    recipe = ise.Recipe.parse("clex", dim=HEAD_DIM, train_length=TRAINED)
    one, other = ise.extend(llama(), recipe), ise.extend(llama(), recipe)
    with torch.no_grad():
        part(one, ise.CLEX).down.weight.fill_(1)
    assert not part(other, ise.CLEX).down.weight.any() and not recipe.position.down.weight.any()


# Dropout


def test_attention_dropout_where_nothing_changes():
    ids = tokens(2, 32)
    losses, found = [], []
    for recipe in (None, "rerope:window=32+infoscale"):
        model = llama(attention_dropout=0.4).train()
        if recipe:
            ise.extend(model, recipe)
        torch.manual_seed(7)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        losses.append(loss)
        found.append(gradients(model))
    assert torch.equal(*losses)
    assert_same_gradients(found[1], found[0], 1e-6)
    undisturbed = model.eval()(input_ids=ids, labels=ids).loss
    assert not torch.equal(undisturbed, losses[0])  # there was dropout


def test_attention_dropout_with_rotated_keys():
    """Other frequencies leave attention itself to transformers, and dropout with it."""
    ids = tokens(2, LONG)
    linear = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
    losses = []
    for model in (
        ise.extend(llama(attention_dropout=0.4), "pi:factor=2"),
        llama(attention_dropout=0.4, rope_parameters=linear),
    ):
        torch.manual_seed(7)
        losses.append(model.train()(input_ids=ids, labels=ids).loss)
    torch.testing.assert_close(*losses)


@pytest.mark.parametrize(
    "recipe", ["rerope:window=32", "infoscale:train_length=32", "window:size=24", "cosine:alpha=16"]
)
def test_attention_dropout_where_a_recipe_changes_attention(recipe):
    ids = tokens(2, 33)
    model = extend(llama(attention_dropout=0.4), recipe).train()
    with pytest.raises(ValueError, match="dropout"):
        model(input_ids=ids, labels=ids)
    assert model.eval()(input_ids=ids, labels=ids).loss.isfinite()
