"""Model types beyond `fixtures/families.py`: idle recipes to the bit, position methods where they belong."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import CONFIG_MAPPING

import isentrope as ise
from tests.fixtures import model_types
from tests.fixtures.dense import Dense, dense, rerope
from tests.fixtures.families import Family, close
from tests.fixtures.model_types import build, output

DEFAULT = {"rope_type": "default", "rope_theta": 10000.0}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
ALTERNATING = {"layer_types": ["sliding_attention", "full_attention"] * 2}


def by_type(full):
    return {"rope_parameters": {"full_attention": full, "sliding_attention": DEFAULT}} | ALTERNATING


# types with two sets of frequencies of equal values, and those with "pi:factor=4" written into their configuration
SETS = {
    "olmo3": (by_type(DEFAULT), by_type(LINEAR)),
    "modernbert": (by_type(DEFAULT), by_type(LINEAR)),
    "gemma3_text": (by_type(DEFAULT), by_type(LINEAR)),
    "granite_swa": ({"rope_parameters": DEFAULT}, {"rope_parameters": LINEAR}),
    "granitemoe_swa": ({"rope_parameters": DEFAULT}, {"rope_parameters": LINEAR}),
}


def model_of(name, **options):
    if name not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {name}")
    model = build(name, **options)
    assert not isinstance(model, str), model
    return model


def ids_of(length):
    return torch.randint(3, model_types.VOCABULARY, (1, length), generator=torch.Generator().manual_seed(0))


@pytest.mark.filterwarnings("ignore:.*leaves distances up to:UserWarning")  # so that nothing changes
@pytest.mark.parametrize("name", SETS)
def test_sets_of_equal_frequencies_are_told_apart(name):
    model, interpolated = (model_of(name, **options) for options in SETS[name])
    ids = ids_of(60)
    plain, expected = output(model, ids), output(interpolated, ids)
    with ise.extended(model, "rerope:window=100000"):
        assert torch.equal(output(model, ids), plain)
    with ise.extended(model, "pi:factor=4"):
        # GraniteSWA has no SDPA, so that fp32 is rounded otherwise; there is no fp64 for its experts
        torch.testing.assert_close(output(model, ids), expected, rtol=0, atol=1e-4 * expected.abs().max().item())
    assert (expected - plain).abs().max() > 1e-2 * plain.abs().max()


# over 125 the last bit of a sine depends on those that a CPU works out beside it; attention of a model's own ("eager");
# positions on three axes
EXACT = [
    "cohere",
    "gpt_neox",
    "stablelm",
    "qwen3_next",
    "qwen3_5_text",
    "qwen2_vl_text",
    "gpt_oss",
    "flint",
    "splinter",
]


@pytest.mark.filterwarnings("ignore:.*(leaves distances up to|learned positions end):UserWarning")  # on purpose
@pytest.mark.parametrize("name", EXACT)
def test_idle_over_many_tokens_is_bit_identical(name):
    model = model_of(name)
    ids = ids_of(160)
    plain = output(model, ids)
    recipe = "infoscale:train_length=1000" if name == "splinter" else "rerope:window=1000"
    with ise.extended(model, recipe):
        assert torch.equal(output(model, ids), plain)


def test_a_module_that_works_out_its_frequencies_anew():
    """PhiMoE's does not look at those it holds, so that others cannot be written into it."""
    model, linear = model_of("phimoe", rope_parameters=DEFAULT), model_of("llama")
    ids = ids_of(40)
    plain = output(model, ids)
    with ise.extended(model, "pi:factor=4"):
        assert (output(model, ids) - plain).abs().max() > 1e-2 * plain.abs().max()
        assert {layer.cache for layer in ise.describe(model).layers} == {"raw keys"}
    with ise.extended(linear, "pi:factor=4"):
        assert {layer.cache for layer in ise.describe(linear).layers} == {"rotated keys"}


def test_positions_on_several_axes():
    """In text they are equal; of an image they are not."""
    model = model_of("qwen2_vl_text")
    ids = ids_of(20)
    ise.extend(model, "rerope:window=8")
    positions = torch.arange(20).expand(3, 1, 20).clone()
    assert torch.equal(output(model, ids, position_ids=positions), output(model, ids))
    positions[1, :, 10:] += 1
    with pytest.raises(ValueError, match="differ by axis"):
        output(model, ids, position_ids=positions)


@pytest.mark.parametrize("name", ["hunyuan_v1_dense", "hunyuan_v1_moe"])
def test_a_norm_after_the_rotation_is_seen_before_it_is_trained(name):
    """With equal weights it would pass for one before the rotation, until training makes them unequal."""
    model = model_of(name)
    for norm in (part for part in model.modules() if type(part).__name__.endswith("RMSNorm")):
        torch.nn.init.ones_(norm.weight)
    with pytest.raises(ValueError, match="has a rotation in none of the known layouts"):
        ise.extend(model, "rerope:window=100000")


@pytest.mark.parametrize(
    "name", ["deepseek_v2", "deepseek_v3", "minicpm3", "mistral4", "glm4_moe_lite", "longcat_flash", "youtu"]
)
def test_rotation_of_the_last_entries_of_a_head(name):
    result = model_types.examine(name)
    assert result.rotated and not result.wrong


def test_rotation_backwards():
    """nanochat turns pairs the other way round, and scales queries and keys to one length after that."""
    result = model_types.examine("nanochat")
    assert result.rotated and not result.wrong
    model, ids = model_of("nanochat").double(), ids_of(60)
    with dense(Family("nanochat", backwards=True), copy.deepcopy(model), Dense(rerope(16))) as oracle:
        expected = output(oracle, ids)
    with ise.extended(model, "rerope:window=16"):
        close(output(model, ids), expected, 1e-6)


@pytest.mark.parametrize("name", ["minimax", "olmo_hybrid", "bailing_hybrid", "kimi_linear"])
def test_layers_of_linear_attention_stay_as_they_are(name):
    result = model_types.examine(name)
    assert result.outcome == "extended" and not result.wrong
    types = model_of(name).config.layer_types
    layers = ise.describe(ise.extend(model_of(name), "infoscale:train_length=16")).layers
    assert [layer.index for layer in layers] == [i for i, kind in enumerate(types) if kind == "full_attention"]


def test_positions_that_reach_more_than_attention():
    model = model_of("llama")

    def add_sines(module, args, kwargs, output):
        return output + kwargs["position_embeddings"][1].mean(-1, keepdim=True)

    model.model.layers[-1].register_forward_hook(add_sines, with_kwargs=True)
    with pytest.raises(ValueError, match="llama: rotates elsewhere than in attention"):
        ise.extend(model, "rerope:window=32")


def test_attention_that_chooses_keys_itself():
    with pytest.raises(ValueError, match="deepseek_v32: its attention does not go through transformers"):
        ise.extend(model_of("deepseek_v32"), "infoscale:train_length=64")


def test_attention_in_chunks_of_the_models_own():
    with pytest.raises(ValueError, match=r"llama4_text: .* a mask that is not a window over distances"):
        ise.extend(model_of("llama4_text"), "infoscale:train_length=64")


def pytest_generate_tests(metafunc):
    """Every type where slow tests are wanted: their names take the configurations of all models to be imported."""
    if metafunc.function is test_every_type:
        wanted = "slow" in metafunc.config.option.markexpr
        metafunc.parametrize("name", model_types.names() if wanted else ["llama"])


@pytest.mark.slow
def test_every_type(name):
    assert not model_types.examine(name).wrong
