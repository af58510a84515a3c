"""Masks of few queries, which the layers of a pass share."""

from __future__ import annotations

from contextlib import suppress

import pytest
import torch
from torch.func import vmap

import isentrope as ise
from isentrope.backends import sdpa
from isentrope.core.layout import Layout


def attend(q, layout=None, backend="sdpa", recipe="rope"):
    generator = torch.Generator().manual_seed(0)
    k, v = (torch.randn(1, 2, 64, 16, generator=generator) for _ in range(2))
    return ise.attention(q, k, v, recipe, causal=True, mask=ise.Window(16), backend=backend, layout=layout)


@pytest.fixture
def masked(monkeypatch):
    """Regions need masks, as on a GPU."""
    monkeypatch.setattr(sdpa, "tiles_on_cpu", lambda branch, sharing=1: None)


def test_a_mask_keeps_no_wrapper_of_its_first_query(masked):
    q = torch.randn(3, 1, 2, 8, 16)
    with suppress(RuntimeError):  # PyTorch's kernels may refuse
        vmap(attend)(q)
    torch.testing.assert_close(attend(q[0]), attend(q[0], backend="reference"))


def test_a_mask_of_inference_serves_training(masked):
    q, layout = torch.randn(1, 2, 8, 16), Layout(1, 8, 64, torch.device("cpu"))
    with torch.inference_mode():
        attend(q, layout)
    x = q.clone().requires_grad_()
    attend(x, layout).sum().backward()
    y = q.clone().requires_grad_()
    attend(y, backend="reference").sum().backward()
    torch.testing.assert_close(x.grad, y.grad)


def test_masks_are_one_of_a_layouts_values(masked):
    q, layout = torch.randn(1, 2, 8, 16), Layout(1, 8, 64, torch.device("cpu"))
    for window in range(2, 12):
        attend(q, layout, recipe=f"rerope:window={window}")
    assert len(layout.cached("additive masks", dict)) >= 10
