"""Few compilations whatever the shapes, and never the quiet step back to uncompiled code."""

from __future__ import annotations

from functools import partial
from itertools import product

import pytest
import torch
from torch._dynamo.utils import counters

from isentrope import fold
from isentrope.backends import merge
from isentrope.compiled import _compile, variant_of


@pytest.fixture(autouse=True)
def _traced_only(monkeypatch):
    """Everything but code generation, which is the slow part and does not count."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    _compile.cache_clear()
    torch._dynamo.reset()
    counters.clear()
    yield
    _compile.cache_clear()
    torch._dynamo.reset()


def operand(batch, heads, n, transposed, grad):
    x = torch.randn(batch, n, heads, 8).transpose(1, 2) if transposed else torch.randn(batch, heads, n, 8)
    return x.requires_grad_(grad)


def test_any_mixture_of_shapes_folds():
    """Batches, heads, lengths, one-token steps, memory orders and gradients in one process, in a bad order."""
    booleans = (False, True)
    for n, batch, heads, transposed, grad in product((7, 1, 12, 33), (1, 2, 3), (4, 1, 6), booleans, booleans):
        x = operand(batch, heads, n, transposed, grad)
        turn = torch.rand(1, 1, n, 4), torch.rand(1, 1, n, 4)
        tau = torch.rand(1, 1, n)
        run = variant_of(fold._fold, (x, turn[0], tau), 8, 4, False, False)
        assert torch.equal(run(x, *turn, tau, False, False), fold._fold(x, *turn, tau, False, False))


def test_a_sweep_of_lengths_takes_two_compilations():
    for n in range(10, 60):
        outs, lses = [torch.randn(1, 2, n, 8) for _ in range(2)], [torch.randn(1, 2, n) for _ in range(2)]
        run = variant_of(merge._merge, outs, 8)
        for ours, expected in zip(run(outs, lses), merge._merge(outs, lses), strict=True):
            assert torch.equal(ours, expected)
    assert counters["stats"]["unique_graphs"] <= 2, dict(counters["stats"])
