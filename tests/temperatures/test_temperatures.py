"""Each law at points worked out by hand, and what the laws share: dtypes, clamping, shapes."""

import math

import pytest
import torch
from torch.testing import assert_close

import isentrope as ise
from isentrope import Recipe, attention
from tests.fixtures.recipes import TRAINABLE


def tau(law, n, d=128):
    return law.scale(torch.tensor(n, dtype=torch.float64), d)


def test_the_papers_check():
    assert round(tau(ise.InfoScale(64), 4096).item(), 3) == 1.392
    assert round(tau(ise.InfoScaleExact(64), 4096).item(), 3) == 1.485


# with d = 2, f(m) = 1 - e^ε / m
@pytest.mark.parametrize(
    ("law", "n", "d", "expected"),
    [
        (ise.Constant(), 10**6, 128, 1),
        (ise.LogLength(), 1000, 128, 6.907755278982137),
        (ise.LogLength(), 3, 128, 1.0986122886681098),
        (ise.SoftmaxPlus(), 4096, 128, 12 / 9),
        (ise.SoftmaxPlus(64.0), 4096, 128, 2),
        (ise.LogN(64), 4096, 128, 2),
        (ise.LogN(512), 4096, 64, 12 / 9),
        (ise.Power(64, 0.5), 4096, 128, 8),
        (ise.Power(64, -0.5), 4096, 128, 1 / 8),
        (ise.Power(64), 4096, 128, math.e**0.63),
        (ise.Power(64, 4), 4096, 128, 1000),  # in place of 64^4, which no half precision holds
        (ise.YaRNTemperature(64), 4096, 128, 1.415888308335967**2),
        (ise.YaRNTemperature(64), 128, 128, 1.0693147180559946**2),
        (ise.YaRNTemperature(factor=16.0), 5, 128, 1.2772588722239782**2),
        (ise.YaRNTemperature(factor=1.0), 5, 128, 1),
        (ise.InfoScale(4), 64, 2, math.sqrt((63 / 64) / (3 / 4))),
        (ise.InfoScale(4, math.log(2)), 64, 2, math.sqrt((62 / 64) / (2 / 4))),
        (ise.InfoScale(16), 256, 4, math.sqrt((15 / 16) / (3 / 4))),
        (ise.InfoScaleExact(4), 64, 2, 64 * math.sqrt(63 / 64) / (4 * math.sqrt(3 / 4))),
        (ise.InfoScaleExact(4, math.log(2)), 64, 2, 32 * math.sqrt(62 / 64) / (2 * math.sqrt(2 / 4))),
        (ise.Llama4(), 8191, 128, 1),
        (ise.Llama4(), 8192, 128, 1.0693147180559946),
        (ise.Llama4(), 81919, 128, 1 + 0.1 * math.log(10)),
        (ise.Llama4(), 81920, 128, 1 + 0.1 * math.log(11)),
        (ise.Llama4(100, 0.5), 250, 128, 1 + 0.5 * math.log(3)),
    ],
    ids=str,
)
def test_points_by_hand(law, n, d, expected):
    assert tau(law, n, d).item() == pytest.approx(expected, rel=1e-14)


UNCLAMPED = [
    (ise.LogLength(clamp=False), 2, math.log(2)),
    (ise.SoftmaxPlus(clamp=False), 8, 1 / 3),
    (ise.LogN(64, clamp=False), 8, 1 / 2),
    (ise.Power(64, 0.5, clamp=False), 16, 1 / 2),
    (ise.LogN(64, clamp=False), 1, 0),
    (ise.YaRNTemperature(64, clamp=False), 16, (1 - 0.1 * math.log(4)) ** 2),
    (ise.InfoScale(64, clamp=False), 8, math.sqrt((1 - 8 ** (-1 / 64)) / (1 - 64 ** (-1 / 64)))),
    (ise.Llama4(4, clamp=False), 3, 1),
    (ise.Fitted((64, 256), (1.0, 1.2), clamp=False), 16, 0.8),
]


@pytest.mark.parametrize(("law", "n", "expected"), UNCLAMPED, ids=str)
def test_unclamped_is_the_formula_below_the_training_length(law, n, expected):
    assert tau(law, n).item() == pytest.approx(expected, rel=1e-13)
    clamped = type(law)(**{key: getattr(law, key) for key in law.options()} | {"clamp": True})
    assert tau(clamped, n).item() == 1


@pytest.mark.parametrize("epsilon", [0.0, 1.5])
@pytest.mark.parametrize("law", [ise.InfoScale, ise.InfoScaleExact])
def test_large_head_sizes_approach_a_ratio_of_logarithms(law, epsilon):
    for n in (64, 100, 4096, 10**6):
        limit = math.sqrt((math.log(n) - epsilon) / (math.log(64) - epsilon))
        # the next term is of order ln n / d
        assert tau(law(64, epsilon), n, 10**9).item() == pytest.approx(limit, rel=1e-7)


@pytest.mark.parametrize("d", [2, 64, 128, 512])
@pytest.mark.parametrize("law", [ise.InfoScale(64), ise.InfoScaleExact(64), ise.LogN(64), ise.YaRNTemperature(64)])
def test_fp32_keeps_its_digits(law, d):
    n = torch.cat((torch.arange(65, 3000), torch.logspace(3.5, 7, 500).round()))
    narrow, wide = law.scale(n.float(), d), law.scale(n.double(), d)
    # measured: 2.4e-7, but 1.2e-6 for InfoScaleExact at d = 2, where τ grows as n itself
    assert ((narrow.double() - wide).abs() / wide).max() < (3e-6 if d == 2 else 5e-7)


LAWS = [
    ise.Constant(),
    ise.LogLength(),
    ise.SoftmaxPlus(),
    ise.LogN(64),
    ise.YaRNTemperature(64),
    ise.YaRNTemperature(factor=4.0),
    ise.InfoScale(64),
    ise.InfoScaleExact(64),
    ise.Llama4(floor=64),
    ise.Fitted((64, 128), (1.0, 1.5)),
    ise.Fitted((64, 128), ((1.0, 1.5), (1.0, 1.2))),
    ise.SSMax(2),
]


@pytest.mark.parametrize("law", LAWS, ids=str)
def test_at_least_fp32_comes_out(law):
    n = torch.tensor([[[2, 64, 100, 200]]])
    expected = law.scale(n.double(), 16)
    assert expected.dtype == torch.float64
    for dtype in (torch.float32, torch.int64, torch.int32, torch.bfloat16, torch.float16):
        out = law.scale(n.to(dtype), 16)
        assert out.dtype == torch.float32
        assert_close(out, expected.float(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("law", LAWS, ids=str)
def test_shapes(law):
    heads = 2 if law in LAWS[-2:] else 1  # those two have a τ for each head
    n = torch.arange(1, 31).view(3, 1, 10) * 10
    assert law.scale(n, 16).shape == (3, heads, 10)
    assert law.scale(n[:1], 16).shape == (1, heads, 10)


# --- Fitted -----------------------------------------------------------------------------------------------------------


def test_fitted_is_linear_in_the_logarithm():
    law = ise.Fitted((64, 256, 1024), (1.0, 1.2, 1.6))
    points = {1: 1, 63: 1, 64: 1, 128: 1.1, 256: 1.2, 512: 1.4, 1024: 1.6, 4096: 2.0, 16384: 2.4}
    assert_close(tau(law, list(points)), torch.tensor(list(points.values()), dtype=torch.float64), rtol=1e-14, atol=0)
    for n, value in ((256, 1.2), (1024, 1.6)):  # what was fitted comes back to the bit
        assert tau(law, n).item() == value


def test_fitted_clamps_at_its_first_length():
    law = ise.Fitted((64, 256), (1.5, 2.0))
    assert tau(law, 64).item() == 1
    assert tau(law, 65).item() == pytest.approx(1.5 + 0.5 * math.log(65 / 64) / math.log(4), rel=1e-14)
    assert tau(ise.Fitted((64, 256), (1.5, 2.0), clamp=False), 64).item() == 1.5


def test_fitted_at_one_length_is_constant_above_it():
    law = ise.Fitted((64,), (1.3,))
    assert tau(law, [10, 64, 65, 10**6]).tolist() == [1, 1, 1.3, 1.3]
    per_head = ise.Fitted((64,), ((1.3,), (0.7,)))
    n = torch.tensor([[[10, 65]]], dtype=torch.float64)
    assert per_head.scale(n, 16).tolist() == [[[1, 1.3], [1, 0.7]]]


def test_fitted_per_head():
    law = ise.Fitted((64, 256), ((1.0, 1.2), (1.0, 0.6), (2.0, 2.0)))
    n = torch.tensor([[[64, 128]], [[256, 1024]]], dtype=torch.float64)
    expected = [[[1, 1.1], [1, 0.8], [1, 2.0]], [[1.2, 1.4], [0.6, 0.2], [2.0, 2.0]]]
    assert_close(law.scale(n, 16), torch.tensor(expected, dtype=torch.float64))
    assert_close(law.scale(n[0, 0], 16), torch.tensor(expected[0], dtype=torch.float64))
    assert_close(law.scale(n[0, 0, 1], 16), torch.tensor([1.1, 0.8, 2.0], dtype=torch.float64))


def test_fitted_per_layer():
    law = ise.Fitted((64, 256), (((1.0, 1.2),), ((1.0, 1.8),)), count="position", clamp=False)
    for layer, top in enumerate((1.2, 1.8)):
        one = law.for_layer(layer)
        assert (one.count, one.clamp) == ("position", False)
        assert one.scale(torch.tensor([[[256.0]]]), 16).item() == pytest.approx(top)
        assert Recipe(temperature=law).for_layer(layer).temperature == one
        assert one.for_layer(7) is one
    plain = ise.Fitted((64,), (1.0,))
    assert plain.for_layer(5) is plain


def test_fitted_takes_lists_and_tensors():
    law = ise.Fitted((64, 256), ((1.0, 1.25), (1.0, 1.5)))
    assert ise.Fitted([64, 256], [[1.0, 1.25], [1.0, 1.5]]) == law
    assert ise.Fitted(torch.tensor([64, 256]), torch.tensor([[1.0, 1.25], [1.0, 1.5]])) == law
    hash(law)


def test_fitted_heads_in_attention():
    """A head of the table is the head of the queries, also when key heads are shared."""
    q, k, v = torch.randn(2, 4, 9, 8), torch.randn(2, 2, 9, 8), torch.randn(2, 2, 9, 8)
    factors = (0.5, 1.0, 1.5, 2.0)
    law = ise.Fitted((2, 4), tuple((f, f) for f in factors), clamp=False)
    out = attention(q, k, v, Recipe(temperature=law))
    plain = attention(q * torch.tensor(factors)[:, None, None], k, v)
    assert_close(out, plain)


# --- SSMax ------------------------------------------------------------------------------------------------------------


def test_ssmax_starts_near_one():
    law = ise.SSMax(3, 1024)
    assert_close(law.slope.detach(), torch.full((3,), 1 / (math.log(1024) - 1)))
    # ∫ ln n dn from 0 to N is N (ln N - 1): the mean of τ over a training row
    assert law.scale(torch.arange(1, 1025), 16).mean().item() == pytest.approx(1, abs=1e-3)
    assert law.offset is None
    assert ise.SSMax(3, bias=True).offset.tolist() == [0, 0, 0]


def test_ssmax_shapes_and_values():
    law = ise.SSMax(2, bias=True)
    with torch.no_grad():
        law.slope.copy_(torch.tensor([1.0, 0.5]))
        law.offset.copy_(torch.tensor([0.0, 2.0]))
    n = torch.tensor([[[1.0, math.e]], [[math.e**2, math.e**4]]], dtype=torch.float64)
    assert_close(law.scale(n, 16), torch.tensor([[[0, 1], [2, 2.5]], [[2, 4], [3, 4]]], dtype=torch.float64))
    assert law.scale(torch.arange(1, 6), 16).shape == (2, 5)
    assert law.for_layer(3) is law


@pytest.mark.parametrize("backend", TRAINABLE)
def test_ssmax_learns_through_every_backend(backend):
    generator = torch.Generator().manual_seed(0)
    q, k, v, target = (torch.randn(2, 2, 12, 8, generator=generator, dtype=torch.float64) for _ in range(4))
    law = ise.SSMax(2, 12, bias=True).double()

    def loss():
        out = attention(q, k, v, Recipe(temperature=law), causal=True, backend=backend)
        return (out - target).square().mean()

    loss().backward()
    step = 1e-6
    for parameter in law.parameters():
        for head in range(2):
            values = []
            for sign in (1, -1):
                with torch.no_grad():
                    parameter[head] += sign * step
                    values.append(loss().item())
                    parameter[head] -= sign * step
            numeric = (values[0] - values[1]) / (2 * step)
            assert parameter.grad[head].item() == pytest.approx(numeric, rel=1e-6, abs=1e-9)
            assert parameter.grad[head] != 0


def test_ssmax_state_survives():
    law, other = ise.SSMax(4, bias=True), ise.SSMax(4, bias=True)
    torch.nn.init.normal_(law.slope)
    other.load_state_dict(law.state_dict())
    n = torch.arange(1, 9)
    assert torch.equal(other.scale(n, 8), law.scale(n, 8))


# --- in attention -----------------------------------------------------------------------------------------------------


def test_temperature_multiplies_the_score_and_not_the_bias():
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 9, 8, generator=generator, dtype=torch.float64) for _ in range(3))
    factor = 1.5  # (0.1 ln s + 1)² for s below
    law = ise.YaRNTemperature(factor=math.exp(10 * (math.sqrt(factor) - 1)))
    distance = (torch.arange(9)[:, None] - torch.arange(9)).abs()
    scores = factor * q @ k.mT / math.sqrt(8) - ise.ALiBi().slopes(2)[:, None, None] * distance
    assert_close(attention(q, k, v, Recipe(position=ise.ALiBi(), temperature=law)), torch.softmax(scores, -1) @ v)


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        ("visible", [1, 2, 3, 3, 3, 3]),
        ("sequence", [6, 6, 6, 6, 6, 6]),
        ("position", [1, 2, 3, 4, 5, 6]),
    ],
)
def test_what_n_is(count, expected):
    seen = []

    class Spy:
        def scale(self, n, head_dim):
            seen.append(n)
            return torch.ones_like(n)

    spy = Spy()
    spy.count = count
    x = torch.randn(1, 1, 6, 4)
    attention(x, x, x, Recipe(temperature=spy, mask=ise.Window(3)), causal=True)
    # one key gives the same softmax at any temperature: laws are asked about two
    assert seen[0].flatten().tolist() == [max(n, 2) for n in expected]


def test_llama4_counts_positions():
    assert ise.Llama4().count == "position"
    assert "count" not in ise.Llama4().to_dict()
    assert ise.Llama4(count="visible").to_dict()["count"] == "visible"
