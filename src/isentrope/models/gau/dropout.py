"""Dropout as a function of known numbers: the same run, however it is split over processes or resumed."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def dropout(x: Tensor, rate: float, noise: Tensor | None, site: int) -> Tensor:
    """Set a share of the entries of x (batch, …) to 0 and scale the others up to match.

    Whether an entry is kept is a hash of its row's number, the site and its index: equal numbers give equal masks
    whatever else is in the batch, and the backward needs no stored mask.

    Args:
        x: of any shape.
        rate: the share of entries to drop.
        noise: an integer for each row, (batch,); without it torch's generator decides.
        site: the number of this dropout within the model.
    """
    if not rate:
        return x
    if noise is None:
        return F.dropout(x, rate)
    row = _mix(_mix(noise.to(torch.int32)) + 0x3C6EF372 * (site + 1) % (1 << 31))
    index = torch.arange(x[0].numel(), dtype=torch.int32, device=x.device).view(x.shape[1:])
    bits = _mix(index ^ row.view(-1, *[1] * (x.dim() - 1)))
    threshold = round(rate * (1 << 32)) - (1 << 31)
    return torch.where(bits >= threshold, x * (1 / (1 - rate)), 0.0)


def _mix(x: Tensor) -> Tensor:
    """Scatter 32-bit integers by a bijection (Wellons' lowbias32, 2018)."""
    x = x ^ (x >> 16 & 0xFFFF)
    x = x * 0x7FEB352D
    x = x ^ (x >> 15 & 0x1FFFF)
    x = x * (0x846CA68B - (1 << 32))
    return x ^ (x >> 16 & 0xFFFF)
