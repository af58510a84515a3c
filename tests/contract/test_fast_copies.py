"""What a GPU runs beside attention kernels: no copies of queries, keys, values or outputs."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from isentrope import dispatch
from isentrope.backends.band import backend
from isentrope.core import switches
from isentrope.core.layout import Layout, Rows
from isentrope.functional import attention
from tests.contract.matrix import Setting
from tests.contract.test_fast import interprets

ALLOCATIONS = {"empty", "new_empty", "empty_like", "empty_strided"}
PADDED = Setting(64, 64, heads=4, kv_heads=4, d=32, dv=32)


class LargeOperations(TorchDispatchMode):
    """The names of operations that fill a tensor of at least so many entries; views and allocations fill none."""

    def __init__(self, entries):
        super().__init__()
        self.entries, self.names = entries, []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        name = function.overloadpacket.__name__
        filled = [x for x in tree_leaves(out) if torch.is_tensor(x) and x.numel() >= self.entries]
        if filled and not function.is_view and name not in ALLOCATIONS:
            self.names.append(name)
        return out


@pytest.fixture
def launches(monkeypatch):
    """Stand-ins for Triton's kernels, which only allocate their outputs; the shapes of q and k at each launch."""
    from isentrope.backends.band import kernel
    from isentrope.core import rotation_kernel

    seen = []

    def launch(q, k, v, *rest, **options):
        seen.append((tuple(q.shape), tuple(k.shape)))
        return q.new_empty(*q.shape[:3], v.shape[-1]), q.new_empty(q.shape[:3], dtype=torch.float32)

    monkeypatch.setattr(kernel, "launch", launch)
    monkeypatch.setattr(rotation_kernel, "launch", lambda x, *rest, **options: torch.empty_like(x))
    return seen


def make_layout(rows):
    lengths = torch.tensor([64, 20])
    documents = torch.arange(64) // 40
    layout = Layout(2, 64, 64, torch.device("cpu"), Rows(documents=documents) if rows == "packed" else Rows(lengths))
    layout.padded_queries_matter = False  # as in a model
    return layout


@interprets
@pytest.mark.parametrize("rows", ["padded", "packed"])
@pytest.mark.parametrize(("text", "runs"), [("rope+window:size=20", 1), ("rerope:window=24", 2)])
def test_padded_and_packed_rows_are_not_copied_interpreted(text, runs, rows, launches, monkeypatch):
    """However many elements there are, as long as two outputs fit: all heads go at once."""
    monkeypatch.setattr(switches, "_on", switches.DEFAULTS)
    monkeypatch.setattr(dispatch, "MAX_BRANCHED_Q_ELEMENTS", 1)
    q, k, v = PADDED.tensors(torch.float32)
    if rows == "padded":
        for x in (q, k, v):
            x[1, :, 20:] = torch.nan
    options = {"causal": True, "layout": make_layout(rows)}
    with torch.no_grad():
        attention(q, k, v, text, **options)  # fills the layout's cache
        launches.clear()
        with LargeOperations(q.numel()) as operations:
            attention(q, k, v, text, **options)
    assert operations.names == [] and launches == runs * [(tuple(q.shape), tuple(k.shape))]


@interprets
def test_too_large_outputs_go_a_few_heads_at_a_time_interpreted(launches, monkeypatch):
    monkeypatch.setattr(switches, "_on", switches.DEFAULTS)
    q, k, v = PADDED.tensors(torch.float32)
    monkeypatch.setattr(dispatch, "MAX_BRANCHED_Q_ELEMENTS", q.numel() // 2)
    monkeypatch.setattr(backend, "MAX_INTERVAL_Q_ELEMENTS", q.numel() - 1)
    with torch.no_grad():
        attention(q, k, v, "rerope:window=24", causal=True, layout=make_layout("padded"))
    assert [shape[1] for shape, _ in launches] == [2, 2, 2, 2]  # heads of two regions, twice
