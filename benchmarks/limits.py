"""The least time a card allows: operations or bytes divided by its peak, by its data sheet."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch


class Peak(NamedTuple):
    """Dense bf16 operations a second, and bytes a second of the card's memory."""

    flops: float
    bandwidth: float


# by NVIDIA's data sheets, the SXM cards; PCIe cards have less
CARDS = {"H200": Peak(989e12, 4.8e12), "H100": Peak(989e12, 3.35e12), "A100": Peak(312e12, 2.0e12)}


def find_peak(hardware: str) -> Peak | None:
    """Return the peak of a card by its name, None if it is not known."""
    return next((peak for card, peak in CARDS.items() if card in hardware), None)


@cache
def find_own_peak() -> Peak | None:
    """Return the peak of this machine's card."""
    return find_peak(torch.cuda.get_device_name()) if torch.cuda.is_available() else None


def find_limit(flops: float | None, moved_bytes: float | None) -> float | None:
    """Return the milliseconds below which no call with so many operations and bytes can be, None for unknown cards."""
    peak = find_own_peak()
    if peak is None or (flops is None and moved_bytes is None):
        return None
    return 1000 * max((flops or 0) / peak.flops, (moved_bytes or 0) / peak.bandwidth)
