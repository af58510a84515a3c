"""Models under methods that differ by frequency: DPE, LongRoPE, CoPE, Resonance."""

from __future__ import annotations

import math

import pytest
import torch
from torch.testing import assert_close
from transformers import Phi3Config, Phi3ForCausalLM

import isentrope as ise
from tests.fixtures.dense_llama import dense_logits, dpe, theta
from tests.fixtures.families import FAMILIES, logits
from tests.fixtures.generation import SIZES, extended, greedy, in_chunks, padded, rows_of, whole
from tests.fixtures.models import TRAINED, llama, tokens
from tests.fixtures.refusals import refused

LENGTH = 90
PAIRS = 4
LISTS = {"long_factor": [1.0, 1.7, 3.1, 4.0], "short_factor": [1.0, 1.1, 1.2, 1.5]}
EXACT = {"rtol": 0, "atol": 1e-9}
ROUNDED = {"rtol": 0, "atol": 5e-5}  # models hold frequencies in fp32


def phi3(num_hidden_layers=2, **rope):
    """A Phi-3 with random weights, "trained" at 64 and extended to 512 with longrope."""
    torch.manual_seed(0)
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "factor": 8.0} | LISTS | rope
    sizes = SIZES | {
        "num_hidden_layers": num_hidden_layers,
        "max_position_embeddings": 8 * TRAINED,
        "original_max_position_embeddings": TRAINED,
    }
    sizes.pop("head_dim")
    return Phi3ForCausalLM(Phi3Config(**sizes, rope_parameters=rope)).eval()


# --- LongRoPE ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [TRAINED - 1, TRAINED, TRAINED + 1, LENGTH])
def test_longrope_of_a_config_is_that_of_transformers(length):
    """On both sides of the original length, with the attention factor that its config implies."""
    model, ids = phi3().double(), tokens(2, length)
    plain = logits(model, ids)
    with ise.extended(model, "longrope"):
        assert_close(logits(model, ids), plain, **ROUNDED)
    assert torch.equal(logits(model, ids), plain)


def test_the_attention_factor_of_a_config_is_a_temperature():
    """Of its square; LogN has that value at the length that the model was extended to."""
    model, other = phi3(attention_factor=1.0).double(), phi3().double()
    scaling = other.model.rotary_emb.attention_scaling
    assert scaling**2 == pytest.approx(1 + math.log(8) / math.log(TRAINED))
    ids, table = tokens(1, LENGTH), (scaling**2, scaling**2)
    with ise.extended(model, ise.Recipe(ise.scores.Dot(), ise.LongRoPE(), ise.Fitted((2, 3), table, clamp=False))):
        out = logits(model, ids)
    assert_close(out[:, 2:], logits(other, ids)[:, 2:], **ROUNDED)


def test_longrope_of_a_config_keeps_raw_keys():
    """Transformers leaves keys in its cache as they were rotated for a shorter row; here the row's length counts."""
    model, ids = extended("longrope", phi3(num_hidden_layers=1)), tokens(1, LENGTH)
    assert "raw keys" in str(ise.describe(model))
    expected = whole(model, ids)[:, -1]
    assert_close(in_chunks(model, ids, (50, 20, 19, 1))[:, -1], expected, **EXACT)
    rows = rows_of(LENGTH, TRAINED - 4)
    batch, mask, _ = padded(rows, "left")
    with torch.no_grad():
        together = model(batch, attention_mask=mask).logits[:, -1]
    for row, last in zip(rows, together, strict=True):  # each by its own length
        assert_close(whole(model, row[None])[0, -1], last, **EXACT)


def test_longrope_of_a_config_is_saved_without_its_lists(tmp_path):
    model, ids = phi3(), tokens(1, LENGTH)
    ise.extend(model, "longrope+infoscale:train_length=64")
    model.save_pretrained(tmp_path)
    loaded = ise.load(tmp_path)
    assert torch.equal(logits(loaded, ids), logits(model, ids))
    assert loaded.config.isentrope["recipe"]["position"] == {"name": "longrope"}


def test_longrope_of_lists_is_the_one_of_the_config():
    model = phi3(attention_factor=1.0).double()
    ids = tokens(1, LENGTH)
    expected = logits(model, ids)
    model.config.rope_parameters = {"rope_type": "default", "rope_theta": 10000.0}
    plain = Phi3ForCausalLM(model.config).double().eval()
    plain.load_state_dict(model.state_dict())
    long, short = (tuple(LISTS[key]) for key in ("long_factor", "short_factor"))
    with ise.extended(plain, f"longrope:factors={long},short={short},original_length={TRAINED}"):
        assert_close(logits(plain, ids), expected, **ROUNDED)
    with ise.extended(plain, f"longrope:factors={long}"):
        assert "rotated keys" in str(ise.describe(plain))
        assert_close(logits(plain, ids), expected, **ROUNDED)


@pytest.mark.parametrize("recipe", ["rerope:window=24", "dpe:window=24,scales=(1,2)", "pi:factor=2", "cope:clip=3"])
def test_other_methods_keep_the_frequencies_of_a_config(recipe):
    """Those of a row's own length, against a model that has them at every length."""
    model = phi3(attention_factor=1.0, num_hidden_layers=1).double()
    for length, key in ((TRAINED, "short_factor"), (LENGTH, "long_factor")):
        ids, other = tokens(1, length), phi3(num_hidden_layers=1, rope_type="default").double()
        other.model.rotary_emb.inv_freq /= torch.tensor(LISTS[key])
        assert_close(logits(other, ids), logits(model, ids), **ROUNDED)
        with ise.extended(model, recipe), ise.extended(other, recipe):
            expected = logits(other, ids)
            assert_close(logits(model, ids), expected, **ROUNDED)
            assert_close(in_chunks(model, ids, (50, length - 51, 1))[:, -1], expected[:, -1], **ROUNDED)


LONGROPE = "longrope:factors=(1,2,3,4)"


@pytest.mark.parametrize(
    ("recipe", "match"),
    [
        (LONGROPE, "phi3: its config has factors of its own; leave factors out"),
        ("ntk:factor=4", "already scaled .*ntk would replace them"),
        ("sink:sinks=4,size=24", "its rope_type 'longrope' changes angles"),
    ],
)
def test_refusals_of_a_model_with_longrope(recipe, match):
    refused(phi3(), recipe, match)


YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": TRAINED}


@pytest.mark.parametrize(
    ("rope", "recipe", "match"),
    [
        (None, "longrope", "llama: its config has no factors for longrope .*longrope:factors="),
        (None, "longrope:factors=(1,2)", r"LongRoPE\(factors=…\): expected 4 numbers, .* got 2"),
        (None, "dpe:window=8,scales=(1,2,3,4,5)", r"DPE\(scales=…\): expected at most 4, .* got 5"),
        (None, "dpe:window=8,scales=(1,2),base=500", "dpe starts from the model's frequencies; leave base out"),
        (None, "cope:base=500", "cope starts from the model's frequencies; leave base out"),
        (None, "resonance:base=500", "resonance starts from the model's frequencies; leave base out"),
        (YARN, LONGROPE, "already scaled .*longrope would replace them"),
        (YARN, "resonance:factor=4", "already scaled .*resonance would replace them"),
    ],
)
def test_refusals(rope, recipe, match):
    refused(llama(**({} if rope is None else {"rope_parameters": rope})), recipe, match)


@pytest.mark.parametrize("recipe", ["dpe:window=8,scales=(1,2)", LONGROPE, "cope", "resonance"])
def test_models_without_rotation(recipe):
    refused(FAMILIES["bert"].model(), recipe, "bert: has no rotary embedding")


def test_longrope_that_scales_a_part_of_each_head():
    rope = {key: value[:3] for key, value in LISTS.items()} | {"partial_rotary_factor": 0.75}
    refused(phi3(**rope), "longrope", "phi3: rotates part of a head and scales it")
    model, ids = phi3(**rope, attention_factor=1.0).double(), tokens(1, LENGTH)
    plain = logits(model, ids)
    with ise.extended(model, "longrope"):
        assert_close(logits(model, ids), plain, **ROUNDED)


# --- frequencies that a model has -------------------------------------------------------------------------------------


@pytest.mark.parametrize("rope", [None, YARN])
@pytest.mark.parametrize(
    ("recipe", "change"),
    [
        ("cope:clip=3", lambda theta: theta * torch.tensor([1, 1, 0.5, 0])),
        ("resonance", lambda theta: 2 * torch.pi / (2 * torch.pi / theta).round()),
    ],
)
def test_frequencies_of_a_model_are_changed(recipe, change, rope):
    model = llama(**({} if rope is None else {"rope_parameters": rope}))
    plain = model.model.rotary_emb.inv_freq.clone()
    with ise.extended(model, recipe):
        assert_close(model.model.rotary_emb.inv_freq, change(plain), rtol=1e-6, atol=1e-12)
    assert torch.equal(model.model.rotary_emb.inv_freq, plain)


# --- DPE --------------------------------------------------------------------------------------------------------------

DPE = "dpe:window=24,scales=(1,2,8)"  # two of four pairs in the first group


def test_dpe_against_a_model_written_out():
    model, ids = llama().double(), tokens(2, LENGTH)
    with torch.no_grad():
        expected = dense_logits(model, ids, theta=theta(), distance=dpe)
    plain = logits(model, ids)
    assert (expected - plain).abs().max() > 1e-2
    with ise.extended(model, DPE):
        assert_close(logits(model, ids), expected, **ROUNDED)
        assert_close(in_chunks(model, ids, (40, 30, 19, 1)), expected, **ROUNDED)
        assert torch.equal(greedy(model, ids[:, :60]), greedy(model, ids[:, :60], use_cache=False))


def test_dpe_in_a_padded_batch():
    model, rows = extended(DPE + "+logn:train_length=32,keys=far+share"), rows_of(LENGTH, 50, 70)
    for side in ("left", "right"):
        ids, mask, _ = padded(rows, side)
        with torch.no_grad():
            together = model(ids, attention_mask=mask).logits
        for row, out, real in zip(rows, together, mask.bool(), strict=True):
            assert_close(out[real], whole(model, row[None])[0], **EXACT)


def test_dpe_is_described_by_its_range():
    model = ise.extend(llama(), DPE)
    layer = ise.describe(model).layers[0]
    assert layer.distances[0] == 1
    assert layer.distances[1] == (64, 64 // 2 + 12, 64 // 8 + 21)
    assert "64→29–64" in str(layer)


def test_dpe_in_part_of_a_head():
    family = FAMILIES["gpt_neox"]  # half of each head rotates, four pairs
    model, ids = family.model().double(), tokens(1, LENGTH)
    with ise.extended(model, "dpe:window=24,scales=(4,4)"):
        grouped = logits(model, ids)
    with ise.extended(model, "selfextend:window=24,group=4"):
        assert_close(grouped, logits(model, ids), **EXACT)
    refused(family.model(), "dpe:window=24,scales=(1,2,3,4,5)", "expected at most 4")
