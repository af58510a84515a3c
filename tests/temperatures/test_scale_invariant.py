"""Scale-invariant attention: values worked out by hand, what it promises, and who computes it."""

from __future__ import annotations

import math

import pytest
import torch
from torch.testing import assert_close

import isentrope as ise
from isentrope import attention
from tests.fixtures.recipes import TRAINABLE, normal, qkv


def terms(distance, law=None):
    return [x.tolist() for x in (law or ise.ScaleInvariant()).by_distance(torch.tensor(distance, dtype=torch.float64))]


def test_points_by_hand():
    factors, biases = terms([0.0, 10.0, 90.0, 9990.0])
    squares = [1, 1 + 2 * math.log(2), 1 + 2 * math.log(10), 1 + 2 * math.log(1000)]
    assert factors == pytest.approx([math.sqrt(x) for x in squares], rel=1e-14)
    assert biases == pytest.approx([1 - x for x in squares], rel=1e-14)
    assert terms([6.0], ise.ScaleInvariant(2.0))[1] == pytest.approx([-2 * math.log(4)], rel=1e-14)


def test_octaves_keep_their_weight():
    """E e^{a s + m} of normal scores, summed over distances T … 2T - 1: 10 √e ln 2 for large T, as for any other T."""
    for octave in (1 << 10, 1 << 14, 1 << 18):
        factors, biases = ise.ScaleInvariant().by_distance(torch.arange(octave, 2 * octave, dtype=torch.float64))
        total = (biases + factors.square() / 2).exp().sum().item()
        assert total == pytest.approx(10 * math.sqrt(math.e) * math.log(2), rel=10 / octave)


@pytest.mark.parametrize("backend", [*(name for name in TRAINABLE if name != "sdpa"), "flex"])
def test_distances_are_those_between_tokens(backend):
    """Positions that jump, both directions, and a method that rotates by other distances."""
    q, k, v = qkv(1)
    ids = torch.tensor([[*range(12), *range(50, 58)], [*range(3, 23)]])
    options = {"position_ids": ids, "backend": backend, "return_lse": True}
    out, aux = attention(q, k, v, "nope+scaleinvariant:distance=4", **options)
    apart = (ids[:, :, None] - ids[:, None]).abs().double()[:, None]
    square = 1 + 2 * torch.log(1 + apart / 4)
    scores = square.sqrt() * (q @ k.repeat_interleave(2, 1).mT) / math.sqrt(8) + 1 - square
    assert_close(aux.lse, scores.logsumexp(-1), rtol=0, atol=1e-12)
    assert_close(out, scores.softmax(-1) @ v.repeat_interleave(2, 1), rtol=0, atol=1e-12)


@pytest.mark.parametrize("backend", [name for name in TRAINABLE if name != "sdpa"])
def test_gradients_by_finite_differences(backend):
    tensors = [x.requires_grad_() for x in qkv(3)]
    text = "rerope:window=5+scaleinvariant:distance=2+share:beta=0.5,reference=2"

    def value(*moved):
        out = attention(*moved, text, lengths=[20, 13], backend=backend)
        return (out * normal(9, *out.shape)).sum()

    grads = torch.autograd.grad(value(*tensors), tensors)
    for index, grad in enumerate(grads):
        direction = normal(index, *grad.shape)
        with torch.no_grad():
            ends = [
                value(*(x + (step * direction if n == index else 0) for n, x in enumerate(tensors)))
                for step in (1e-5, -1e-5)
            ]
        assert ((ends[0] - ends[1]) / 2e-5).item() == pytest.approx((grad * direction).sum().item(), rel=1e-6)


def test_backends_without_a_factor_by_distance_refuse():
    q, k, v = qkv(0)
    with pytest.raises(ValueError, match=r"backend 'sdpa' cannot compute this: it has no factor by distance; use"):
        attention(q, k, v, "scaleinvariant", backend="sdpa")
    for name in ("decode", "band"):
        with pytest.raises(ValueError, match=f"backend '{name}' cannot compute this"):
            attention(q, k, v, "scaleinvariant", backend=name)
    assert attention(q, k, v, "scaleinvariant", return_lse=True)[1].backend == "dense"


def test_options():
    law = ise.ScaleInvariant(32)
    assert str(law) == "scaleinvariant:distance=32" and law.needs_training
    for bad in (0, -1, None, "10", float("nan"), 10**400):
        with pytest.raises(ValueError, match=r"ScaleInvariant\(distance=…\): expected a number ≥ 0.001"):
            ise.ScaleInvariant(bad)


def test_chosen_far_keys_have_no_scores_by_distance():
    with pytest.raises(ValueError, match="scaleinvariant cannot be joined with a choice of far keys; leave out"):
        ise.Recipe.parse("rerope:window=8+retrieve+scaleinvariant")
