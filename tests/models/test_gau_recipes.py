"""Recipes of GAU-α: as text, saved, learned, and without waiting for the host."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForMaskedLM

import isentrope as ise
import isentrope.models as models
from tests.fixtures.gau import model, tokens
from tests.fixtures.turns import in_turns


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


FAR_LAWS = "rerope:window=8+power:keys=near+power:gamma=((0.1,),(-0.2,),(0.3,)),keys=far+share:beta=((1,),(0.5,),(0,))"


@pytest.mark.parametrize("text", ["rerope:window=8+infoscale", FAR_LAWS])
def test_a_saved_model_under_another_recipe(text, tmp_path):
    gau, ids = model(max_position_embeddings=16), tokens()
    gau.save_pretrained(tmp_path)
    loaded = AutoModelForMaskedLM.from_pretrained(tmp_path, recipe=text, dtype=torch.float64).eval()
    expected = model(max_position_embeddings=16, recipe=text)
    assert loaded.config.recipe == expected.config.recipe
    assert ise.Recipe.from_dict(expected.config.recipe).temperatures[0].train_length == 16
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


@pytest.mark.parametrize("backend", ["dense", "chunked", "reference"])
def test_laws_for_near_and_far_keys_of_each_layer(backend):
    """Each layer has its row of a table; far keys are those of a row without its padding, on both sides."""
    gau, ids = model(max_position_embeddings=16, recipe=FAR_LAWS), tokens()
    laws = [layer.gau.recipe for layer in gau.gau_alpha.encoder.layer]
    assert [law.share.beta for law in laws] == [(1.0,), (0.5,), (0.0,)]
    assert [law.resolve().share.reference for law in laws] == [8, 8, 8]
    assert [law.temperatures[1].gamma for law in laws] == [(0.1,), (-0.2,), (0.3,)]
    mask = torch.ones_like(ids)
    mask[1, 21:] = 0
    with torch.no_grad():
        whole = gau(ids, attention_mask=mask, backend=backend).logits
        row = gau(ids[1:, :21], backend="reference").logits
        torch.testing.assert_close(whole[1:, :21], row, rtol=0, atol=1e-11)
        short = model(max_position_embeddings=16, recipe="rerope:window=8")
        assert torch.equal(gau(ids[:, :16], backend=backend).logits, short(ids[:, :16], backend=backend).logits)
        assert not torch.allclose(gau(ids, backend=backend).logits, short(ids, backend=backend).logits)


class HostCopies(TorchDispatchMode):
    """Notes what is copied from the host to another device."""

    def __init__(self):
        super().__init__()
        self.copied = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        sources, made = ([x for x in tree_leaves(part) if isinstance(x, torch.Tensor)] for part in (args, out))
        if any(x.device.type == "cpu" for x in sources) and any(x.is_meta for x in made):
            self.copied.append(str(function))
        return out


STEPS = (
    "rope",
    "cosine:alpha=16",
    "pi:factor=4",
    "ntk:factor=4",
    "yarn:factor=16",
    "alibi",
    "clex:max_factor=3",
    "rerope:window=8",
    "rerope:window=8+power:keys=far+share",
)


@pytest.mark.parametrize(("recipe", "pose"), in_turns(STEPS, (False, True)))
def test_a_training_step_waits_for_nothing_of_the_host(recipe, pose):
    """A step is captured as a graph after a few like it: from then on nothing may come from the host but its batch."""
    gau = model(recipe=recipe, max_position_embeddings=16).float().to("meta").train()
    ids = torch.ones(4, 16, dtype=torch.int64, device="meta")
    batch = {"input_ids": ids, "at": ids[:, :3], "noise": ids[:, 0].int()}
    batch |= {"position_ids": ids} if pose else {}
    gau(**batch, backend="dense")
    with HostCopies() as copies:
        gau(**batch, backend="dense").logits.sum().backward()
    assert not copies.copied
