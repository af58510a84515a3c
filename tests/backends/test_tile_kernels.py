"""Triangles on PyTorch's kernels: an upper one is a lower one read backwards."""

from __future__ import annotations

from math import inf

import pytest
import torch

from isentrope.backends.tile_kernels import Tile, _match_strides, backward_tile, forward_tile
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


def test_outputs_get_the_strides_that_pytorch_gives_those_of_the_same_queries():
    x = torch.randn(2, 50, 6, 8).transpose(1, 2)
    for q in (torch.empty(2, 6, 50, 8), torch.empty_like(x), torch.empty(2, 6, 70, 8)[:, :, 20:]):
        y = _match_strides(x, q)
        assert y.stride() == torch.empty_like(q).stride() and torch.equal(y, x)
        assert _match_strides(y, q) is y
    assert _match_strides(x, torch.empty_like(x)) is x


@pytest.mark.gpu
def test_a_backward_does_not_depend_on_the_order_of_an_earlier_one():
    """PyTorch keeps graphs of cuDNN by the strides of q, k and v; those of outputs differ here."""
    torch.manual_seed(0)
    q, k, v, grad = (torch.randn(2, 4, 200, 64, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    tile = Tile(q, k, v, None, Span(high=1).to_band(200, 200), 0.125)
    out, lse = forward_tile(tile)
    expected = backward_tile(tile, grad, out, lse)

    def store_by_query(x):
        return x.transpose(1, 2).contiguous().transpose(1, 2)

    for order in (store_by_query, lambda x: store_by_query(torch.cat((x, x), 2))[:, :, 200:]):
        for ours, truth in zip(backward_tile(tile, order(grad), order(out), lse), expected, strict=True):
            torch.testing.assert_close(ours, truth, rtol=0.02, atol=0.02)
