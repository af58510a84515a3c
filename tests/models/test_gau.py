"""GAU-α against the same computation written out, and as a model of transformers."""

from __future__ import annotations

from math import log, sqrt

import pytest
import torch
from torch.testing import assert_close
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

import isentrope as ise
import isentrope.models as models
from tests.fixtures.gau import SIZES, model, tokens


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
    actual = []
    for name in ("auto", backend):
        gau = model(recipe="rerope:window=8,layout=interleaved+logn:train_length=8")
        loss = gau(tokens(), labels=tokens(seed=1), backend=name).loss
        loss.backward()
        actual.append((loss, *(x.grad for x in gau.parameters())))
    for a, b in zip(*actual, strict=True):
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
