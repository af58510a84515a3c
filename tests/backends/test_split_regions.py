"""Attention over a region that was split equals attention over the whole."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

import isentrope as ise
from isentrope.core.call import AttentionCall, RotatedBranch
from isentrope.core.layout import Layout
from isentrope.dispatch import BACKENDS
from tests.fixtures.recipes import CPU, EXACT, TRAINABLE, D, examples, few_on_flex, qkv, seeds
from tests.fixtures.regions import N, regions


def check_split(backend, seed, whole, cuts, biased):
    q, k, v = (x.requires_grad_(backend != "flex") for x in qkv(seed, keys=N))
    layout = Layout(2, N, N, CPU)
    slopes = ise.ALiBi().slopes(4) if biased else None
    pieces = [whole]
    for cut in cuts:
        pieces = [part for piece in pieces for part in (piece & cut, piece - cut)]
    results = []
    for parts in ([whole], pieces):
        call = AttentionCall(q, k, v, layout, [RotatedBranch(part, slopes=slopes) for part in parts], D**-0.5)
        out, lse = BACKENDS[backend].forward(call, need_lse=True)
        gradients = torch.autograd.grad(out.square().sum(), (q, k, v)) if backend != "flex" else ()
        results.append((out, lse, *gradients))
    for mine, expected in zip(*results, strict=True):
        assert_close(mine, expected, **EXACT)


@pytest.mark.parametrize("backend", TRAINABLE)
@examples(20)
@given(seeds, regions, st.lists(regions, min_size=1, max_size=2), st.booleans())
def test_attention_over_a_split_region_is_attention_over_the_whole(backend, seed, whole, cuts, biased):
    check_split(backend, seed, whole, cuts, biased)


@few_on_flex
@given(seeds, regions, st.lists(regions, min_size=1, max_size=1), st.booleans())
def test_attention_over_a_split_region_on_flex(seed, whole, cuts, biased):
    check_split("flex", seed, whole, cuts, biased)
