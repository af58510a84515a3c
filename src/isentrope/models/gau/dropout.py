"""Dropout whose choices are a function of what is known: the same run, however it is cut into processes or resumed."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def dropout(x: Tensor, share: float, noise: Tensor | None, place: int) -> Tensor:
    """x (batch, …) with a share of its entries set to 0 and the others scaled up to match.

    noise (batch,): an integer for each row. An entry's fate is a hash of its row's number, the `place` in the model and
    its index, so that equal numbers give equal choices whatever else is in the batch, and nothing need be kept for the
    backward. Without them, torch's own generator decides.
    """
    if not share:
        return x
    if noise is None:
        return F.dropout(x, share)
    row = _mix(_mix(noise.to(torch.int32)) + 0x3C6EF372 * (place + 1) % (1 << 31))
    index = torch.arange(x[0].numel(), dtype=torch.int32, device=x.device).view(x.shape[1:])
    bits = _mix(index ^ row.view(-1, *[1] * (x.dim() - 1)))
    least = round(share * (1 << 32)) - (1 << 31)
    return torch.where(bits >= least, x * (1 / (1 - share)), 0.0)


def _mix(x: Tensor) -> Tensor:
    """A bijection of 32-bit integers that scatters them (Wellons' lowbias32, 2018)."""
    x = x ^ (x >> 16 & 0xFFFF)
    x = x * 0x7FEB352D
    x = x ^ (x >> 15 & 0x1FFFF)
    x = x * (0x846CA68B - (1 << 32))
    return x ^ (x >> 16 & 0xFFFF)
