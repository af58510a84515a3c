"""Padded rows one after another on a CPU, and large calls a few heads at a time."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch.testing import assert_close

from isentrope import dispatch
from isentrope.builder import Inputs, build_call
from isentrope.core import frame_calls
from isentrope.core.layout import Layout, Rows
from isentrope.functional import attention
from isentrope.recipe import as_recipe
from tests.contract.matrix import Setting
from tests.contract.test_fast_rows import TEXTS
from tests.contract.test_unpadding import KINDS, make_layout
from tests.fixtures.turns import in_turns

OPTIONS = {"return_lse": True, "return_entropy": True}
N = 67


@pytest.fixture
def counts(monkeypatch):
    """How often calls were split, by rows and by heads."""
    counts = Counter()
    for name in ("_run_frames", "_run_by_heads"):
        run = getattr(dispatch, name)
        monkeypatch.setattr(dispatch, name, lambda *args, name=name, run=run: counts.update([name]) or run(*args))
    return counts


def compare(recipe, layout, setting, causal=True, backend="auto"):
    """Compare output, log-sum-exp and entropy of tokens with the reference in fp64, NaN being in what nobody sees."""
    queries, slots = (x.expand(setting.batch, -1)[:, None, :, None] for x in layout.padding())
    q, k, v = setting.tensors(torch.float64)
    q = q.masked_fill(queries, torch.nan)
    k, v = (x.masked_fill(slots, torch.nan) for x in (k, v))
    options = {**OPTIONS, "layout": layout, "causal": causal}
    with torch.no_grad():
        exact, truth = attention(q, k, v, recipe, backend="reference", **options)
        out, aux = attention(*(x.float() for x in (q, k, v)), recipe, backend=backend, **options)
    hidden = queries[..., 0]
    for ours, theirs, padding in (
        (out, exact, queries), (aux.lse, truth.lse, hidden), (aux.entropy, truth.entropy, hidden),
    ):  # fmt: skip
        assert_close(ours.double().masked_fill(padding, 0), theirs.masked_fill(padding, 0), rtol=1e-4, atol=1e-4)
    return aux.backend


@pytest.mark.parametrize(("recipe", "kind"), in_turns([*TEXTS, "alibi"], KINDS))
@pytest.mark.parametrize("causal", [True, False])
def test_rows_of_their_own_are_the_reference(recipe, kind, causal, counts, monkeypatch):
    monkeypatch.setattr(frame_calls, "MIN_FRAME_SLOTS", 16)
    backend = compare(recipe, make_layout(kind, n=N), Setting(N, N, kind, dv=8), causal)
    assert (backend, counts["_run_frames"]) == ("sdpa", int(kind != "documents"))


def test_rows_with_earlier_keys_are_the_reference(counts, monkeypatch):
    """A part of a prompt after the first, in rows that are padded on the left."""
    monkeypatch.setattr(frame_calls, "MIN_FRAME_SLOTS", 16)
    monkeypatch.setattr(frame_calls, "MIN_FULL_FRAME_SLOTS", 16)
    layout = Layout(2, 24, N, torch.device("cpu"), Rows(lengths=torch.tensor([N, 30]), left_padded=True))
    layout.padded_queries_matter = False
    compare(TEXTS[1], layout, Setting(24, N, "left"))
    assert counts["_run_frames"] == 1


def test_rows_are_not_split_where_it_would_change_or_slow_something(counts, monkeypatch):
    q = torch.randn(2, 1, 64, 16)

    def run(matter=False, grad=False, least=16, backend="auto"):
        monkeypatch.setattr(frame_calls, "MIN_FRAME_SLOTS", least)
        layout = Layout(2, 64, 64, torch.device("cpu"), Rows(lengths=torch.tensor([64, 20])))
        layout.padded_queries_matter = matter
        attention(q.requires_grad_(grad), q, q, TEXTS[1], causal=True, layout=layout, backend=backend)
        return counts["_run_frames"]

    assert run(matter=True) == run(grad=True) == run(least=65) == run(backend="dense") == 0
    assert run() == 1


def test_rows_that_are_padded_alike_are_one_call(monkeypatch):
    layout = Layout(4, 64, 64, torch.device("cpu"), Rows(lengths=torch.tensor([64, 20, 20, 0])))
    layout.padded_queries_matter = False
    q = torch.randn(4, 1, 64, 16)
    parts, run = [], dispatch._run
    monkeypatch.setattr(dispatch, "_run", lambda call, *args: parts.append(call.q.shape) or run(call, *args))
    monkeypatch.setattr(frame_calls, "MIN_FRAME_SLOTS", 16)
    with torch.no_grad():
        out = attention(q, q, q, TEXTS[1], causal=True, layout=layout)
    assert parts == [(1, 1, 64, 16), (2, 1, 20, 16)]
    assert not out[3].any()
    assert not out[1:3, :, 20:].any()


@pytest.mark.parametrize("recipe", [None, "window:size=9", *TEXTS])
def test_large_calls_on_a_cpu_take_a_few_heads_at_a_time(recipe, counts, monkeypatch):
    setting = Setting(N, N, heads=4, kv_heads=2)
    q, k, v = setting.tensors(torch.float32)
    with torch.no_grad():
        whole, aux = attention(q, k, v, recipe, causal=True, **OPTIONS)
        monkeypatch.setattr(dispatch, "MAX_CPU_Q_BYTES", q.nbytes)
        monkeypatch.setattr(dispatch, "CPU_PART_BYTES", q.nbytes // 4 // max(2, torch.get_num_threads()))
        parts, part_aux = attention(q, k, v, recipe, causal=True, **OPTIONS)
    assert counts["_run_by_heads"] == int(recipe in TEXTS)  # where nothing is rotated, nothing is gained
    for ours, theirs in ((parts, whole), (part_aux.lse, aux.lse), (part_aux.entropy, aux.entropy)):
        assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


def test_what_sees_all_heads_at_once_still_does(counts, monkeypatch):
    """Dropout draws for all weights, and torch.func may batch some of the tensors alone."""
    monkeypatch.setattr(dispatch, "MAX_CPU_Q_BYTES", 0)
    monkeypatch.setattr(dispatch, "CPU_PART_BYTES", 1)
    q, k, v = Setting(N, N, heads=4, kv_heads=2).tensors(torch.float32)
    shapes = []
    with torch.no_grad():
        attention(q, k, v, "rope", causal=True, dropout=lambda weights: shapes.append(weights.shape) or weights)
        many = torch.vmap(lambda k: attention(q, k, v, "rope", causal=True))(torch.stack((k, 2 * k)))
        assert counts == Counter()
        one = attention(q, 2 * k, v, "rope", causal=True)
    assert shapes == [(2, 4, N, N)]
    assert counts["_run_by_heads"] == 1
    assert_close(many[1], one)


def test_branches_of_a_row_share_rotated_keys(monkeypatch):
    """Near, middle and far chunks of Dual Chunk have the same angles of keys, which are rotated once."""
    monkeypatch.setattr(frame_calls, "MIN_FRAME_SLOTS", 16)
    layout, parts, run = make_layout("left", n=N), [], dispatch._run
    monkeypatch.setattr(dispatch, "_run", lambda call, *args: parts.append(call) or run(call, *args))
    q = torch.randn(2, 1, N, 16)
    with torch.no_grad():
        attention(q, q, q, "dualchunk:chunk=8,local=2", causal=True, layout=layout)
    assert len(parts) == 2
    for part in parts:
        first, *others = part.branches
        assert others
        assert all(first.rotates_keys_like(other) for other in others)


@pytest.mark.parametrize(("lengths", "split"), [((40, 20), True), ((40, 39), False), ((20, 20), True)])
def test_rows_with_little_padding_are_split_where_they_are_long(lengths, split, monkeypatch):
    monkeypatch.setattr(frame_calls, "MIN_FRAME_SLOTS", 32)
    monkeypatch.setattr(frame_calls, "MIN_FULL_FRAME_SLOTS", 64)
    layout = Layout(2, 40, 40, torch.device("cpu"), Rows(lengths=torch.tensor(lengths)))
    layout.padded_queries_matter = False
    q = torch.randn(2, 1, 40, 16)
    with torch.no_grad():
        call = build_call(Inputs(q, q, q, causal=True, layout=layout), as_recipe("rope").resolve())
        assert frame_calls.is_better_split(call) == split
