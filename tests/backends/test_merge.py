"""Softmaxes over parts of the keys, put together."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from isentrope.backends.merge import join, merge_into

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])


@DTYPES
def test_two_parts_in_place_or_not_are_the_whole(dtype):
    generator = torch.Generator().manual_seed(0)
    scores = 4 * torch.randn(2, 3, 5, 12, generator=generator, dtype=dtype)
    scores[0, 0, 0, 7:] = scores[0, 0, 1, :7] = scores[0, 0, 2] = -torch.inf  # no keys in one part, or in either
    values = torch.randn(2, 3, 12, 4, generator=generator, dtype=dtype)

    def attend(start, stop):
        weights = scores[..., start:stop].softmax(-1).nan_to_num(0.0)
        return weights @ values[:, :, start:stop], scores[..., start:stop].logsumexp(-1)

    first, second, (out, lse) = attend(0, 7), attend(7, 12), attend(0, 12)
    joined, joined_lse = join(*first, *second)
    assert_close((joined, joined_lse), (out, lse))
    merge_into(*first, *second)
    assert torch.equal(first[0], joined) and torch.equal(first[1], joined_lse)
