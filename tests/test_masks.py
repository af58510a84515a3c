"""Masks joined with `|`, against each mask alone."""

import pytest
import torch

import isentrope as ise
from isentrope import Recipe, attention
from tests.fixtures.recipes import SMALL_MASKS


def seen(mask, causal=False):
    """Visible pairs among ten tokens."""
    x = torch.zeros(1, 1, 10, 4)
    return attention(x, x, torch.eye(10)[None, None], Recipe(mask=mask), causal=causal)[0, 0] > 0


@pytest.mark.parametrize("causal", [False, True])
def test_either_mask_allows_what_each_alone_allows(causal):
    masks = [*filter(None, SMALL_MASKS.values()), ise.Causal() & ise.Window(3), ise.Full()]
    for a in masks:
        for b in masks:
            assert torch.equal(seen(a | b, causal), seen(a, causal) | seen(b, causal)), f"{a} | {b}"
