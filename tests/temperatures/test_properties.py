"""Temperatures leave short inputs untouched, never fall, and stay finite."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import isentrope as ise
from isentrope import Recipe, attention
from tests.contract.matrix import CPU_BACKENDS
from tests.fixtures.recipes import SMALL_POSITIONS, examples, named, qkv, seeds
from tests.fixtures.turns import in_turns

CLAMPED = {
    "softmaxplus": lambda n: ise.SoftmaxPlus(float(n)),
    "logn": ise.LogN,
    "power": lambda n: ise.Power(n, -4.0),
    "power-heads": lambda n: ise.Power(n, (0.1, 4.0, -1.0, 0.0)),
    "yarn": ise.YaRNTemperature,
    "infoscale": ise.InfoScale,
    "infoscale-epsilon": lambda n: ise.InfoScale(n, 0.5),
    "infoscaleexact": ise.InfoScaleExact,
    "llama4": lambda n: ise.Llama4(floor=n + 1),
    "fitted": lambda n: ise.Fitted((n, 2 * n), (1.2, 1.5)),
    "fitted-heads": lambda n: ise.Fitted((n, 2 * n), ((1.2, 1.5),) * 4),
    "constant": lambda n: ise.Constant(),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", CLAMPED)
@examples(8)
@given(st.integers(2, 100_000), st.integers(2, 512))
def test_clamped_laws_are_exactly_one_up_to_the_training_length(name, dtype, train_length, d):
    n = torch.cat((torch.arange(1, 65), torch.tensor([train_length - 1, train_length]))).clamp(1, train_length)
    tau = CLAMPED[name](train_length).scale(n.to(dtype), d)
    assert tau.dtype == dtype
    assert bool((tau == 1).all())


def test_log_length_is_one_up_to_e():
    assert ise.LogLength().scale(torch.tensor([1, 2]), 64).tolist() == [1, 1]


# of neighbouring laws, one has each dtype with the order that the other has not
MODES = [(torch.float32, False), (torch.float32, True), (torch.bfloat16, True), (torch.bfloat16, False)]


@pytest.mark.parametrize("backend", CPU_BACKENDS)
@pytest.mark.parametrize(("name", "dtype", "causal"), in_turns(CLAMPED, MODES, every=2))
@examples(6)
@given(seeds, st.integers(2, 20), named(sorted(SMALL_POSITIONS)), named(["visible", "sequence", "position"]))
def test_short_inputs_are_bit_identical(name, dtype, causal, backend, seed, keys, position, count):
    law = CLAMPED[name](20)
    law = type(law)(**{key: getattr(law, key) for key in law.options()} | {"count": count})
    q, k, v = qkv(seed, keys=keys, dtype=dtype)
    tempered = attention(q, k, v, Recipe(None, SMALL_POSITIONS[position], law), causal=causal, backend=backend)
    assert torch.equal(
        tempered, attention(q, k, v, Recipe(None, SMALL_POSITIONS[position]), causal=causal, backend=backend)
    )


# --- laws over n ------------------------------------------------------------------------------------------------------

RISING = {
    "constant": ise.Constant(),
    "loglength": ise.LogLength(),
    "softmaxplus": ise.SoftmaxPlus(),
    "logn": ise.LogN(64),
    "power": ise.Power(64),
    "yarn": ise.YaRNTemperature(64),
    "yarn-static": ise.YaRNTemperature(factor=16.0),
    "infoscale": ise.InfoScale(64),
    "infoscale-epsilon": ise.InfoScale(64, 1.0),
    "infoscaleexact": ise.InfoScaleExact(64),
    "llama4": ise.Llama4(),
    "llama4-odd": ise.Llama4(floor=1000),
    "fitted": ise.Fitted((64, 512, 4096), (1.0, 1.2, 1.3)),
    "loglength-unclamped": ise.LogLength(clamp=False),
    "softmaxplus-unclamped": ise.SoftmaxPlus(clamp=False),
    "logn-unclamped": ise.LogN(64, clamp=False),
    "power-unclamped": ise.Power(64, 4.0, clamp=False),
    "yarn-unclamped": ise.YaRNTemperature(64, clamp=False),
    "infoscale-unclamped": ise.InfoScale(64, clamp=False),
    "infoscaleexact-unclamped": ise.InfoScaleExact(64, clamp=False),
    "llama4-unclamped": ise.Llama4(clamp=False),
    "fitted-unclamped": ise.Fitted((64, 512, 4096), (1.0, 1.2, 1.3), clamp=False),
}


@pytest.mark.parametrize("name", RISING)
@examples(8)
@given(st.lists(st.integers(3, 10_000_000), min_size=2, max_size=40), st.integers(2, 512))
def test_laws_never_fall_and_stay_finite_in_fp32(name, lengths, d):
    lengths = torch.tensor(sorted({2, *lengths, 10_000_000}), dtype=torch.float32)
    tau = RISING[name].scale(lengths, d)
    assert bool(tau.isfinite().all())
    # no fall was seen over every n up to 3 million; another machine's logarithm may round its last bit otherwise
    assert bool((tau[1:] >= tau[:-1] * (1 - 2**-22)).all())
    wide = RISING[name].scale(lengths.double(), d)
    assert bool((wide[1:] >= wide[:-1]).all())
