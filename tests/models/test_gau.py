"""GAU-α against the same computation written out, and as a model of transformers."""

from __future__ import annotations

from math import log, sqrt

import pytest
import torch
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

import isentrope as ise
import isentrope.models as models

SIZES = {
    "vocab_size": 61,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "attention_key_size": 8,
    "initializer_range": 0.3,
}


def model(kind=models.GAUAlphaForMaskedLM, seed=0, **options):
    torch.manual_seed(seed)
    return kind(models.GAUAlphaConfig(**(SIZES | options))).eval().double()


def tokens(batch=2, length=30, seed=0):
    return torch.randint(1, 61, (batch, length), generator=torch.Generator().manual_seed(seed))


def by_hand(weights, ids, layers=3, tau=1.0, alpha=None):
    """GAU-α as its specification reads, one row at a time, pair by pair."""

    def norm(x):
        return x / (x.pow(2).mean(-1, keepdim=True) + 1e-12).sqrt()

    def rope(x):
        """Interleaved pairs turned, written back concatenated."""
        half = x.shape[-1] // 2
        theta = 10000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
        angle = torch.arange(len(x), dtype=torch.float64)[:, None] * theta
        a, b = x[:, 0::2], x[:, 1::2]
        return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), -1)

    def gau(x, name):
        y = torch.nn.functional.silu(x @ weights[f"{name}.i_dense.weight"].T)
        u, v, z = y[:, :40], y[:, 40:80], y[:, 80:]
        q, k = z * weights[f"{name}.q_scaleoffset.weight"], z * weights[f"{name}.k_scaleoffset.weight"]
        scale = 1 / sqrt(8)
        if alpha is not None:
            q, k, scale = q / q.norm(dim=-1, keepdim=True), k / k.norm(dim=-1, keepdim=True), alpha
        scores = tau * scale * rope(q) @ rope(k).T
        return (u * (scores.softmax(-1) @ v)) @ weights[f"{name}.o_dense.weight"].T

    words = weights["gau_alpha.embeddings.word_embeddings.weight"]
    rows = []
    for row in ids:
        x = norm(words[row] + weights["gau_alpha.embeddings.token_type_embeddings.weight"][0])
        for i in range(layers):
            x = norm(x + gau(x, f"gau_alpha.encoder.layer.{i}.gau"))
        rows.append(x @ words.T)
    return torch.stack(rows)


CASES = {
    "plain": ({}, {}),
    "softmax plus": ({"normalization": "softmax_plus"}, {"tau": log(30) / log(512)}),
    "CosScale": ({"norm_method": "CosScale"}, {"alpha": 128.0}),
    "CosScale by value": ({"my_info_dict": {"CosScale": 16}}, {"alpha": 16.0}),
    "a recipe": (
        {"recipe": "rope:layout=interleaved+infoscale:train_length=8,clamp=False"},
        {"tau": sqrt((1 - 30 ** (-2 / 8)) / (1 - 8 ** (-2 / 8)))},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_specification(case):
    options, expected = CASES[case]
    gau, ids = model(**options), tokens()
    with torch.no_grad():
        assert_close(gau(ids).logits, by_hand(gau.state_dict(), ids, **expected), atol=1e-8, rtol=1e-6)


def test_sizes_of_the_published_model():
    with torch.device("meta"):
        gau = models.GAUAlphaForMaskedLM(models.GAUAlphaConfig())
    shapes = {name: tuple(x.shape) for name, x in gau.state_dict().items()}
    assert shapes["gau_alpha.embeddings.word_embeddings.weight"] == (12000, 768)
    assert shapes["gau_alpha.encoder.layer.23.gau.i_dense.weight"] == (2 * 1536 + 128, 768)
    assert shapes["gau_alpha.encoder.layer.23.gau.o_dense.weight"] == (768, 1536)
    assert shapes["gau_alpha.encoder.layer.23.gau.q_scaleoffset.weight"] == (128,)
    assert shapes["cls.predictions.decoder.weight"] == (12000, 768)
    assert len(shapes) == 3 + 24 * 4
    assert sum(x.numel() for x in gau.parameters()) == 12000 * 768 + 2 * 768 + 24 * (3200 * 768 + 768 * 1536 + 256)


@pytest.mark.parametrize("form", ["safetensors", "bin"])
def test_published_checkpoints_load_and_fewer_layers_take_the_first(form, tmp_path):
    gau = model()
    models.GAUAlphaConfig(**SIZES).save_pretrained(tmp_path)
    weights = {name: x.contiguous().clone() for name, x in gau.state_dict().items()}
    if form == "bin":
        torch.save(weights, tmp_path / "pytorch_model.bin")
    else:
        from safetensors.torch import save_file

        save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    loaded = AutoModelForMaskedLM.from_pretrained(tmp_path, dtype=torch.float64).eval()
    short = AutoModelForMaskedLM.from_pretrained(tmp_path, num_hidden_layers=2, dtype=torch.float64).eval()
    ids = tokens()
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, gau(ids).logits)
        assert_close(short(ids).logits, by_hand(gau.state_dict(), ids, layers=2), atol=1e-8, rtol=1e-6)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize(
    "recipe", ["rope:layout=interleaved", "rerope:window=8,layout=interleaved+infoscale:train_length=8"]
)
def test_padded_rows_are_rows_alone(side, recipe):
    gau, ids = model(recipe=recipe), tokens(1, 30)
    real = slice(10, 30) if side == "left" else slice(0, 20)
    mask = torch.zeros(2, 30, dtype=torch.int64)
    mask[0], mask[1, real] = 1, 1
    batch = torch.cat((ids, torch.zeros_like(ids)))
    batch[1, real] = ids[0, :20]
    with torch.no_grad():
        logits = gau(batch, attention_mask=mask).logits
        assert_close(logits[:1], gau(ids).logits)
        assert_close(logits[1:, real], gau(ids[:, :20]).logits)


def test_logits_of_some_positions_alone():
    gau, ids = model(), tokens()
    at = torch.tensor([[3, 7], [0, 29]])
    with torch.no_grad():
        whole, some = gau(ids, labels=ids), gau(ids, at=at, labels=ids)
    expected = torch.stack([whole.logits[i, at[i]] for i in range(2)])
    assert_close(some.logits, expected)
    assert_close(
        some.loss, torch.nn.functional.cross_entropy(expected.flatten(0, 1).float(), ids.gather(1, at).flatten())
    )


@pytest.mark.parametrize("backend", ["reference", "chunked"])
def test_backends_agree_forward_and_backward(backend):
    found = []
    for name in ("auto", backend):
        gau = model(recipe="rerope:window=8,layout=interleaved+logn:train_length=8")
        loss = gau(tokens(), labels=tokens(seed=1), backend=name).loss
        loss.backward()
        found.append((loss, *(x.grad for x in gau.parameters())))
    for a, b in zip(*found, strict=True):
        assert_close(a, b, atol=1e-6, rtol=1e-5)


def test_gradient_checkpointing():
    gradients = []
    for checkpointing in (False, True):
        gau = model(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0).train()
        if checkpointing:
            gau.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        gau(tokens(), labels=tokens(seed=1)).loss.backward()
        gradients.append([x.grad for x in gau.parameters()])
    for a, b in zip(*gradients, strict=True):
        assert torch.equal(a, b)


def test_dropout_is_for_training_alone():
    gau, ids = model(hidden_dropout_prob=0.0), tokens()
    with torch.no_grad():
        assert torch.equal(gau(ids).logits, gau(ids).logits)
        gau.train()
        assert not torch.equal(gau(ids).logits, gau(ids).logits)
        with pytest.raises(ValueError, match="no attention weights to drop"):
            gau(ids, backend="chunked")


@pytest.mark.parametrize("recipe", ["ssmax:heads=1", "clex:dim=8,train_length=8,layout=interleaved"])
def test_learned_parts_are_saved(recipe, tmp_path):
    gau, ids = model(recipe=recipe), tokens()
    with torch.no_grad():
        for name, x in gau.named_parameters():
            if "learned" in name:
                x.add_(0.1)
        expected = gau(ids).logits
    assert sum("learned" in name for name, _ in gau.named_parameters()) == 3 * (1 if "ssmax" in recipe else 2)
    gau.save_pretrained(tmp_path)
    loaded = AutoModelForMaskedLM.from_pretrained(tmp_path, dtype=torch.float64).eval()
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, expected)


@pytest.mark.parametrize(
    ("auto", "options", "shape"),
    [
        (AutoModel, {}, (2, 30, 24)),
        (AutoModelForSequenceClassification, {"num_labels": 3}, (2, 3)),
        (AutoModelForTokenClassification, {"num_labels": 5}, (2, 30, 5)),
    ],
)
def test_auto_classes(auto, options, shape, tmp_path):
    model().save_pretrained(tmp_path)
    assert isinstance(AutoConfig.from_pretrained(tmp_path), models.GAUAlphaConfig)
    made = auto.from_pretrained(tmp_path, **options).eval()
    assert made(tokens())[0].shape == shape


def test_classification_reads_the_first_token():
    kind = models.GAUAlphaForSequenceClassification
    classes, ids = model(kind, num_labels=3), tokens(1, 20)
    padded = torch.cat((torch.zeros(1, 5, dtype=torch.int64), ids), 1)
    with torch.no_grad():
        alone = classes(ids).logits
        assert_close(classes(padded, attention_mask=(padded > 0).long()).logits, alone)
    assert classes(ids, labels=torch.tensor([2])).loss > 0
    assert model(kind, num_labels=1)(ids, labels=torch.tensor([0.5])).loss >= 0
    named = model(models.GAUAlphaForTokenClassification, num_labels=3)
    assert named(ids, labels=ids % 3).loss > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"normalization": "l2"}, "normalization"),
        ({"norm_method": "l2"}, "norm_method"),
        ({"my_info_dict": {"scale": 3}}, "my_info_dict"),
        ({"recipe": "rerop:window=3"}, "did you mean"),
        ({"recipe": {"position": {"name": "rope", "bas": 3}}}, "unknown option"),
    ],
)
def test_bad_configs(options, message):
    with pytest.raises(ValueError, match=message):
        models.GAUAlphaConfig(**SIZES, **options)


def test_bad_input():
    gau, ids = model(), tokens()
    with pytest.raises(ValueError, match="either input_ids or inputs_embeds"):
        gau()
    with pytest.raises(ValueError, match="attention_mask"):
        gau(ids, attention_mask=torch.ones(2, 29))
    holes = torch.ones_like(ids)
    holes[0, 4] = 0
    with pytest.raises(ValueError, match="between tokens"):
        gau(ids, attention_mask=holes)


def test_attention_drops_weights():
    q, k, v = (torch.randn(1, 2, 40, 8, dtype=torch.float64) for _ in range(3))
    torch.manual_seed(0)
    mean = torch.stack([ise.attention(q, k, v, dropout=0.3) for _ in range(3000)]).mean(0)
    assert_close(mean, ise.attention(q, k, v), atol=0.08, rtol=0)
    for share in (-0.1, 1.0, True, "half"):
        with pytest.raises(ValueError, match="dropout"):
            ise.attention(q, k, v, dropout=share)
    with pytest.raises(ValueError, match="'sdpa'"):
        ise.attention(q, k, v, dropout=0.1, backend="sdpa")


# the last layer at some positions alone; the training length is 8, so that every method is at work
SOMEWHERE = {
    "plain": "rope",
    "CosScale": "rope+cosine:alpha=16",
    "ReRoPE": "rerope:window=8+infoscale",
    "Leaky ReRoPE": "leakyrerope:window=8,leak=4",
    "SelfExtend": "selfextend:window=8,group=4",
    "ALiBi": "alibi",
    "window": "window:size=5+infoscale:count=sequence",
    "visible keys": "window:size=5+infoscale:count=visible",
    "position": "llama4:floor=4",
    "LM-Infinite": "rerope:window=6+lambda:sinks=2,window=6",
    "sinks": "sink:sinks=3,size=4+logn",
    "causal": "causal+infoscale",
    "dynamic NTK": "ntk:factor=4,dynamic=True",
    "YaRN": "yarn:factor=4+yarntemperature:factor=4",
    "CLEX": "clex",
    "SSMax": "ssmax",
}
ROWS = {"whole": None, "left": (slice(9, 30), slice(0, 30)), "right": (slice(0, 21), slice(0, 30))}


def somewhere(rows):
    """Positions in each row, real ones, and the mask that says which are."""
    mask = torch.zeros(2, 30, dtype=torch.int64)
    for row, real in enumerate(ROWS[rows] or (slice(0, 30), slice(0, 30))):
        mask[row, real] = 1
    at = torch.stack([row.nonzero()[:, 0][torch.tensor([0, 3, 4, 11, 20])] for row in mask])
    return at, None if ROWS[rows] is None else mask


def assert_the_same_somewhere(gau, ids, at, **options):
    """Logits and every gradient, with `at` and picked from the whole."""
    found = []
    for alone in (True, False):
        gau.zero_grad()
        logits = gau(ids, at=at, **options).logits if alone else models.gau.pick(gau(ids, **options).logits, at)
        (logits.log_softmax(-1)[..., :7].sum() / logits.numel()).backward()
        gradients = {name: x.grad for name, x in gau.named_parameters() if x.requires_grad}
        assert all(x is not None for x in gradients.values())
        found.append((logits, gradients))
    assert_close(*found, atol=1e-9, rtol=0)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("recipe", SOMEWHERE)
def test_the_last_layer_at_some_positions(recipe, rows):
    gau = model(recipe=SOMEWHERE[recipe], max_position_embeddings=8)
    with torch.no_grad():
        for name, x in gau.named_parameters():
            if "learned" in name:
                x.add_(0.1)
    at, mask = somewhere(rows)
    assert_the_same_somewhere(gau, tokens(), at, attention_mask=mask)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("recipe", ["plain", "ReRoPE", "ALiBi", "LM-Infinite", "visible keys"])
def test_some_positions_under_position_ids(recipe, rows):
    gau = model(recipe=SOMEWHERE[recipe], max_position_embeddings=8)
    at, mask = somewhere(rows)
    drawn = ise.PoSE(200).sample(2, 30, torch.Generator().manual_seed(0))
    for positions in (drawn, drawn[:1], drawn[0]):
        assert_the_same_somewhere(gau, tokens(), at, attention_mask=mask, position_ids=positions)
    with torch.no_grad():
        given = {"at": at, "attention_mask": mask}
        assert not torch.equal(gau(tokens(), position_ids=drawn, **given).logits, gau(tokens(), **given).logits)


@pytest.mark.parametrize("backend", ["reference", "chunked", "dense"])
def test_some_positions_on_every_backend(backend):
    gau = model(recipe=SOMEWHERE["ReRoPE"], max_position_embeddings=8)
    at, mask = somewhere("left")
    assert_the_same_somewhere(gau, tokens(), at, attention_mask=mask, backend=backend)


@pytest.mark.parametrize("count", [1, 30, 45])
def test_some_positions_may_be_any_number_in_any_order(count):
    gau = model(recipe=SOMEWHERE["ReRoPE"], max_position_embeddings=8)
    at = torch.randint(0, 30, (2, count), generator=torch.Generator().manual_seed(0))
    assert_the_same_somewhere(gau, tokens(), at)


def test_some_positions_of_a_model_with_one_layer():
    assert_the_same_somewhere(model(num_hidden_layers=1), tokens(), somewhere("whole")[0])


def test_some_positions_through_an_adapter():
    from peft import LoraConfig, get_peft_model

    gau, ids = model(recipe=SOMEWHERE["ReRoPE"], max_position_embeddings=8), tokens()
    at, mask = somewhere("left")
    with torch.no_grad():
        without = gau(ids, at=at, attention_mask=mask).logits
    # B is not zero
    adapted = get_peft_model(gau, LoraConfig(r=2, target_modules=["i_dense"], init_lora_weights=False)).double().eval()
    assert_the_same_somewhere(adapted, ids, at, attention_mask=mask)
    assert sum(x.requires_grad for x in adapted.parameters()) == 6
    with torch.no_grad(), adapted.disable_adapter():
        assert_close(adapted(ids, at=at, attention_mask=mask).logits, without)
    with torch.no_grad():
        assert (adapted(ids, at=at, attention_mask=mask).logits - without).abs().max() > 0.01


# recipes as text


def test_a_recipe_as_text_takes_the_rest_from_the_model():
    config = models.GAUAlphaConfig(recipe="infoscale", max_position_embeddings=128)
    recipe = ise.Recipe.from_dict(config.recipe)
    assert recipe.position == ise.RoPE(layout="interleaved") and recipe.temperature == ise.InfoScale(128)
    assert models.GAUAlphaConfig(recipe="plain").recipe == models.GAUAlphaConfig().recipe


def position(text, **options):
    return ise.Recipe.from_dict(models.GAUAlphaConfig(recipe=text, **options).recipe).position


def test_pairs_are_interleaved_unless_said_otherwise():
    for text in ("rope", "pi:factor=4", "rerope:window=8", "ntk:factor=2", "clex", "cosine:alpha=16", "window:size=4"):
        assert position(text).layout == "interleaved", text
    for text in ("rope:layout=half", "yarn:factor=4,layout=half+infoscale", "clex:layout=half"):
        assert position(text).layout == "half", text
    assert position("alibi") == ise.ALiBi()


def test_methods_get_the_length_the_model_was_trained_at():
    assert position("yarn:factor=16", max_position_embeddings=64).original_length == 64
    assert position("yarn:factor=16,original_length=99", max_position_embeddings=64).original_length == 99
    assert position("ntk:factor=4,dynamic=True", max_position_embeddings=64).original_length == 64
    clex = position("clex", max_position_embeddings=64, attention_key_size=32)
    assert (clex.train_length, clex.dim) == (64, 32)


def test_a_saved_model_under_another_recipe(tmp_path):
    gau, ids = model(max_position_embeddings=16), tokens()
    gau.save_pretrained(tmp_path)
    text = "rerope:window=8+infoscale"
    loaded = AutoModelForMaskedLM.from_pretrained(tmp_path, recipe=text, dtype=torch.float64).eval()
    expected = model(max_position_embeddings=16, recipe=text)
    assert loaded.config.recipe == expected.config.recipe
    assert expected.config.recipe["temperature"]["train_length"] == 16
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, expected(ids).logits)
        assert not torch.equal(loaded(ids).logits, gau(ids).logits)
    loaded.save_pretrained(tmp_path / "again")
    again = AutoModelForMaskedLM.from_pretrained(tmp_path / "again", dtype=torch.float64).eval()
    with torch.no_grad():
        assert torch.equal(again(ids).logits, expected(ids).logits)


def with_learned_parts(recipe, start, folder):
    if start == "new":
        return model(recipe=recipe)
    model().save_pretrained(folder)
    return AutoModelForMaskedLM.from_pretrained(folder, recipe=recipe)


@pytest.mark.parametrize("start", ["new", "a model without it"])
def test_clex_begins_as_ntk_scaling(start, tmp_path):
    gau = with_learned_parts("clex", start, tmp_path)
    for layer in gau.gau_alpha.encoder.layer:
        clex = layer.gau.recipe.position
        assert clex.up.weight.any() and not clex.down.weight.any()
        assert clex.factor == 1  # until one is sampled


@pytest.mark.parametrize("start", ["new", "a model without it"])
def test_ssmax_begins_near_one(start, tmp_path):
    expected = ise.SSMax(1).slope.item()
    for layer in with_learned_parts("ssmax", start, tmp_path).gau_alpha.encoder.layer:
        assert layer.gau.recipe.temperature.slope.item() == pytest.approx(expected)


class HostCopies(TorchDispatchMode):
    """Notes what is copied from the host to another device."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        sources, made = ([x for x in tree_leaves(part) if isinstance(x, torch.Tensor)] for part in (args, out))
        if any(x.device.type == "cpu" for x in sources) and any(x.is_meta for x in made):
            self.found.append(str(function))
        return out


@pytest.mark.parametrize("pose", [False, True])
@pytest.mark.parametrize(
    "recipe",
    [
        "rope",
        "cosine:alpha=16",
        "pi:factor=4",
        "ntk:factor=4",
        "yarn:factor=16",
        "alibi",
        "clex:max_factor=3",
        "rerope:window=8",
    ],
)
def test_a_training_step_waits_for_nothing_of_the_host(recipe, pose):
    """A step is captured as a graph after a few like it: from then on nothing may come from the host but its batch."""
    gau = model(recipe=recipe, max_position_embeddings=16).float().to("meta").train()
    ids = torch.ones(4, 16, dtype=torch.int64, device="meta")
    batch = {"input_ids": ids, "at": ids[:, :3], "noise": ids[:, 0].int()}
    batch |= {"position_ids": ids} if pose else {}
    gau(**batch, backend="dense")
    with HostCopies() as copies:
        gau(**batch, backend="dense").logits.sum().backward()
    assert not copies.found
