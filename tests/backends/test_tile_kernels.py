"""Triangles on PyTorch's kernels: an upper one is a lower one read backwards."""

from __future__ import annotations

from math import inf

import pytest
import torch

from isentrope.backends.tile_kernels import Tile, forward_tile
from isentrope.core.region import Band, Span


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_an_upper_triangle_is_a_lower_one_read_backwards(device):
    n, window = 300, 90
    band = Span(low=window).to_band(n, n)
    assert band == Band(0, n - window, window, n, 0, inf)
    assert band.anticausal and not band.causal
    dtype, bound = (torch.float32, 1e-5) if device == "cpu" else (torch.bfloat16, 2e-2)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 3, n - window, 64, generator=generator).to(device, dtype) for _ in range(3))
    out, lse = forward_tile(Tile(q, k, v, None, band, 0.125))
    scores = 0.125 * q.double() @ k.double().mT
    scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).tril(-1), -inf)
    torch.testing.assert_close(lse.double(), scores.logsumexp(-1), rtol=0, atol=bound)
    torch.testing.assert_close(out.double(), scores.softmax(-1) @ v.double(), rtol=0, atol=bound)


def test_a_rectangle_is_no_triangle():
    assert not Band(0, 4, 0, 6, 0, inf).anticausal
    assert not Band(0, 4, 0, 4, 0, 1).anticausal
