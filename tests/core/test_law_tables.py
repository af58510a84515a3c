"""Laws of one query a row are read from tables: the same values as computed directly."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses import FakeTensorMode

import isentrope as ise
from isentrope import builder
from isentrope.core import law_tables
from isentrope.masks import Padding

LAWS = (
    "rerope:window=8+logn:train_length=16,keys=far+share:beta=0.75,reference=4",
    "rerope:window=8+infoscale:train_length=16,count=position+share:beta=(0.5,1.5),reference=4,count=visible",
    "rerope:window=8+logn:train_length=16+share:reference=4+retrieve:blocks=2,size=4,sinks=4",
    "rope+power:train_length=16,gamma=0.3",
)


def build(text, keys, mask=None):
    q, k = torch.randn(2, 2, 1, 8), torch.randn(2, 2, keys, 8)
    return builder.build_call(builder.Inputs(q, k, k, mask=mask, causal=True), ise.Recipe.parse(text).resolve())


@pytest.mark.parametrize("text", LAWS)
def test_values_are_those_of_the_law(text, monkeypatch):
    padding = None if "retrieve" in text else Padding(torch.tensor([37, 20]), side="left")
    for keys, mask in ((37, None), (9, None), (5000, None), (37, padding)):
        ise.clear_caches()
        branches = build(text, keys, mask).branches
        ise.clear_caches()
        with monkeypatch.context() as patched:
            patched.setattr(builder, "_takes_table", lambda *_: False)
            expected = build(text, keys, mask).branches
        for ours, theirs in zip(branches, expected, strict=True):
            for a, b in ((ours.tau, theirs.tau), (ours.offset, theirs.offset)):
                assert (a is None) == (b is None)
                if a is not None:
                    torch.testing.assert_close(a.expand_as(b), b, rtol=1e-6, atol=1e-7)


def test_a_table_is_made_once_and_not_while_a_graph_is_captured(monkeypatch):
    made = []

    def law(n):
        made.append(n.shape[-1])
        return n * 2

    like = torch.empty(0)
    ise.clear_caches()
    with monkeypatch.context() as patched:
        patched.setattr(law_tables, "values_are_readable", lambda _: False)
        assert law_tables.look_up_law(law, "law", 3, 3, like) is None and not made
    assert law_tables.look_up_law(law, "law", 3, 3, like).item() == 6
    assert law_tables.look_up_law(law, "law", torch.tensor([1, 9]), 9, like).flatten().tolist() == [2, 18]
    assert made == [law_tables.MIN_TABLE_ENTRIES]
    assert law_tables.look_up_law(law, "law", torch.tensor([1]), law_tables.MAX_TABLE_ELEMENTS, like) is None
    assert law_tables.look_up_law(law, "law", law_tables.MAX_EXACT_COUNT, 0, like) is None


def test_a_long_context_and_laws_of_their_own_in_every_layer_take_short_tables():
    made = []

    def law(n):
        made.append(n.shape[-1])
        return n * torch.ones(1, 64, 1)

    ise.clear_caches()
    for n in (200_000, 200_001):
        for layer in range(200):
            entry = law_tables.look_up_law(law, ("law", layer), n, n, torch.empty(0))
            assert entry.shape == (1, 64, 1) and entry[0, 0, 0] == n
    assert made == [law_tables.MIN_TABLE_ENTRIES] * 200


def test_a_call_without_values_leaves_no_table_behind():
    ise.clear_caches()
    with FakeTensorMode():
        build(LAWS[0], 37)
    assert type(build(LAWS[0], 37).branches[-1].tau) is torch.Tensor
