"""Adaptive temperature: values worked out by hand, what is measured, gradients, low precision."""

from __future__ import annotations

import math

import pytest
import torch
from torch.testing import assert_close

import isentrope as ise
from isentrope import Recipe, attention
from tests.fixtures.recipes import TRAINABLE, normal, qkv


def tau(entropy, law=None):
    return (law or ise.Adaptive()).by_entropy(torch.tensor(entropy, dtype=torch.float64)).item()


@pytest.mark.parametrize(
    ("entropy", "expected"),
    [
        (0.0, 1),
        (0.5, 1),
        (0.84, 1),  # where the polynomial is below 1
        (1.0, -0.037 + 0.481 - 2.3 + 4.917 - 1.791),
        (2.0, -0.592 + 3.848 - 9.2 + 9.834 - 1.791),
        (4.0, -9.472 + 30.784 - 36.8 + 19.668 - 1.791),
        (6.0, 1),  # below 1 again
        (12.0, 1),
    ],
)
def test_points_by_hand(entropy, expected):
    assert tau(entropy) == pytest.approx(expected, rel=1e-12)


def test_the_range_that_the_docstring_names():
    heated = [h / 100 for h in range(1200) if tau(h / 100) > 1]
    assert (heated[0], heated[-1]) == (0.85, 5.94) and math.exp(heated[-1]) == pytest.approx(380, abs=1)
    assert len(heated) == 510  # and everything between


def test_options():
    law = ise.Adaptive((2, 1), 1.5)
    assert [tau(h, law) for h in (1.5, 2.0)] == [1, 5]
    assert tau(1.0, ise.Adaptive((1e6, 0), 0.0)) == 1000  # what half precision holds
    assert str(law) == "adaptive:coefficients=(2,1,),threshold=1.5"
    assert Recipe.parse(str(law)).temperature == law == Recipe.from_dict({"temperature": law.to_dict()}).temperature
    assert ise.Adaptive([2, 1]) == ise.Adaptive((2.0, 1.0))
    assert ise.Adaptive().idle(1) and not ise.Adaptive().idle(2)


def test_two_keys_by_hand():
    """Weights e^s and 1 of two keys: H in nats, and the second softmax of τ s."""
    q, k = torch.tensor([[[[1.0]]]], dtype=torch.float64), torch.tensor([[[[0.4], [0.0]]]], dtype=torch.float64)
    p = math.exp(0.4) / (math.exp(0.4) + 1)
    entropy = -p * math.log(p) - (1 - p) * math.log(1 - p)
    law = ise.Adaptive((2.0, 1.0))
    expected = 1 / (1 + math.exp(-0.4 * (2 * entropy + 1)))
    out, aux = attention(q, k, k / 0.4, Recipe(temperature=law), return_lse=True, return_entropy=True)
    assert out.item() == pytest.approx(expected, rel=1e-14)
    assert aux.entropy.item() == pytest.approx(
        -expected * math.log(expected) - (1 - expected) * math.log(1 - expected), rel=1e-13
    )
    assert aux.lse.item() == pytest.approx(math.log(math.exp(0.4 * (2 * entropy + 1)) + 1), rel=1e-14)


def test_entropy_never_rises():
    q, k, v = qkv(0, keys=40)
    before, after = (
        attention(q, k, v, text, causal=True, return_entropy=True)[1].entropy for text in ("rope", "rope+adaptive")
    )
    assert bool((after <= before + 1e-12).all()) and bool((after < before - 0.1).any())


# --- gradients: τ is a constant ---------------------------------------------------------------------------------------


def attend(q, k, v, taus=None):
    """Causal attention of ReRoPE's scores, without its rotation; returns τ where none is given."""
    k, v = (x.repeat_interleave(2, 1) for x in (k, v))
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    scores = scores.masked_fill(torch.ones(20, 20, dtype=torch.bool).triu(1), -torch.inf)
    if taus is None:
        p = scores.softmax(-1)
        entropy = -(p * p.clamp_min(1e-300).log()).sum(-1)
        powers = entropy[..., None] ** torch.arange(4, -1, -1)
        return torch.where(entropy > 0.5, (powers * torch.tensor(ise.Adaptive().coefficients)).sum(-1), 1).clamp_min(1)
    return (taus[..., None] * scores).softmax(-1) @ v


@pytest.mark.parametrize("backend", TRAINABLE)
def test_gradients_take_tau_for_a_constant(backend):
    """By finite differences of attention at the τ of the point where they are taken."""
    tensors = [x.requires_grad_() for x in qkv(3)]
    out = attention(*tensors, "adaptive", causal=True, backend=backend)
    with torch.no_grad():
        taus = attend(*tensors)
        assert bool((taus > 1.5).any())
        assert_close(out, attend(*tensors, taus), rtol=0, atol=1e-6)  # the coefficients above are rounded to fp32
    weight = normal(9, *out.shape)
    grads = torch.autograd.grad((out * weight).sum(), tensors)
    for index, grad in enumerate(grads):
        direction = normal(index, *grad.shape)
        ends = []
        for sign in (1, -1):
            moved = [x.detach() + (sign * 1e-5 * direction if n == index else 0) for n, x in enumerate(tensors)]
            ends.append((attend(*moved, taus) * weight).sum())
        assert ((ends[0] - ends[1]) / 2e-5).item() == pytest.approx((grad * direction).sum().item(), rel=1e-4)


@pytest.mark.parametrize("backend", TRAINABLE)
def test_half_precision_is_off_by_what_the_entropy_is(backend):
    q, k, v = qkv(5, keys=60, dtype=torch.bfloat16)
    exact = attention(*(x.double() for x in (q, k, v)), "rope+adaptive", causal=True, backend="reference")
    out = attention(q, k, v, "rope+adaptive", causal=True, backend=backend)
    assert_close(out.double(), exact, rtol=0, atol=0.06)


@pytest.mark.parametrize("bad", [(), "x", None, 3, [1, "a"], (True,), (float("nan"),), (1e7,), (10**400,), [0.0] * 17])
def test_bad_coefficients(bad):
    with pytest.raises(ValueError, match=r"Adaptive\(coefficients=…\): expected 1 to 16 numbers"):
        ise.Adaptive(bad)


@pytest.mark.parametrize("score", ["representative", "votes"])
def test_over_chosen_far_keys(score):
    """Blocks are chosen without τ; H is that of the attention over what was chosen."""
    q, k, v = qkv(2, keys=60)
    plain = f"rerope:window=8+retrieve:blocks=2,size=4,sinks=4,queries=4,score={score}"
    law = ise.Adaptive((0.5, 0.7))
    options = {"causal": True, "return_entropy": True}
    _, before = attention(q, k, v, plain, backend="reference", **options)
    out, aux = attention(q, k, v, f"{plain}+{law}", backend="reference", **options)
    weights = attention(q, k, torch.eye(60, dtype=torch.float64).expand(2, 2, -1, -1), plain, causal=True)
    scores = torch.where(weights > 0, weights.log(), -torch.inf) * law.by_entropy(before.entropy)[..., None]
    assert_close(out, scores.softmax(-1) @ v.repeat_interleave(2, 1), rtol=0, atol=1e-12)
    for backend in ("dense", "blocks"):
        ours, entropy = attention(q, k, v, f"{plain}+{law}", backend=backend, **options)
        assert_close(ours, out, rtol=0, atol=1e-12)
        assert_close(entropy.entropy, aux.entropy, rtol=0, atol=1e-12)
