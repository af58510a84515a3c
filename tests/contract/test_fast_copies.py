"""What a GPU runs beside attention kernels: no copies of queries, keys, values or outputs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from isentrope import dispatch
from isentrope.backends import sdpa, tile_kernels
from isentrope.backends.band import backend
from isentrope.core import switches
from isentrope.core.layout import Layout, Rows
from isentrope.functional import attention
from tests.contract.matrix import Setting
from tests.contract.test_fast import error, hopper, interprets, recipe_of

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
        batch, heads, queries, _ = q.shape
        out = q.new_empty(batch, queries, heads, v.shape[-1]).transpose(1, 2)
        return out, q.new_empty(q.shape[:3], dtype=torch.float32)

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


GROUPED = Setting(130, 130, heads=6, kv_heads=2, d=32, dv=16)


def check_grouped_heads(monkeypatch, dtype, device, backend):
    """Compare far keys whose heads are shared with the reference, forward and backward; return repeated sizes."""
    repeated = []
    monkeypatch.setattr(sdpa, "_repeat_heads", lambda x, branch: repeated.append(x.shape) or repeat(x, branch))
    recipe, results = recipe_of("rerope:window=24", device), []
    setting = replace(GROUPED, dv=GROUPED.d) if backend == "band" else GROUPED  # its kernel takes few sizes
    for kind, name in ((dtype, backend), (torch.float64, "reference")):
        inputs = [x.to(kind).requires_grad_() for x in setting.tensors(dtype, device)]
        out = attention(*inputs, recipe, causal=True, backend=name)
        weights = torch.linspace(0.5, 1.5, out.numel(), device=device, dtype=torch.float64).view_as(out)
        results.append([out.detach(), *torch.autograd.grad((out.double() * weights).sum(), inputs)])
    for ours, truth in zip(*results, strict=True):
        assert ours.shape == truth.shape and error(ours, truth) < (1e-4 if dtype == torch.float32 else 4e-2)
    return repeated


repeat = sdpa._repeat_heads


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize("backend", ["band", "sdpa"])
def test_kernels_take_fewer_key_heads(backend, monkeypatch):
    assert check_grouped_heads(monkeypatch, torch.bfloat16, "cuda", backend) == []


def test_key_heads_are_repeated_for_kernels_that_need_it(monkeypatch):
    """Kernels of a CPU stand in for those of a GPU: with repeated heads, and with shared ones that they repeat."""
    monkeypatch.setattr(sdpa, "tiles_on_cpu", lambda branch, sharing=1: None)
    monkeypatch.setattr(sdpa, "_takes_flash", lambda q, v: False)
    far = (2, 2, 106, 32)  # the triangle's keys; the window has a mask here, and repeats all
    assert far in check_grouped_heads(monkeypatch, torch.float32, "cpu", "sdpa")

    def widen(tile):
        return tile._replace(k=tile.k.repeat_interleave(3, 1), v=tile.v.repeat_interleave(3, 1))

    def backward(tile, *outputs):
        dq, *rest = tile_kernels.backward_tile(widen(tile) if tile.bias is None else tile, *outputs)
        return dq, *(x if tile.bias is not None else x.unflatten(1, (2, 3)).sum(2) for x in rest)

    monkeypatch.setattr(sdpa, "takes_fewer_key_heads", lambda tile: True)
    forward = tile_kernels.forward_tile
    monkeypatch.setattr(sdpa, "forward_tile", lambda tile: forward(widen(tile) if tile.bias is None else tile))
    monkeypatch.setattr(sdpa, "backward_tile", backward)
    assert far not in check_grouped_heads(monkeypatch, torch.float32, "cpu", "sdpa")


@interprets
def test_gradients_of_far_keys_are_added_in_place_interpreted(launches, monkeypatch):
    """Of a window and a triangle nothing is padded: autograd adds nothing, dq is added where it is rotated back."""
    from isentrope.core import rotation_kernel

    rotated = []

    def rotate(x, *rest, total=None, **options):
        rotated.append((tuple(x.shape), total is not None))
        return torch.empty_like(x) if total is None else total

    monkeypatch.setattr(rotation_kernel, "launch", rotate)
    monkeypatch.setattr(sdpa, "tiles_on_cpu", lambda branch, sharing=1: None)
    monkeypatch.setattr(sdpa, "_takes_flash", lambda q, v: True)
    monkeypatch.setattr(
        sdpa, "forward_tile", lambda tile: (torch.empty_like(tile.q), tile.q.new_empty(tile.q.shape[:3]))
    )
    monkeypatch.setattr(sdpa, "backward_tile", lambda tile, *rest: tuple(map(torch.empty_like, tile[:3])))
    q, k, v = (x.requires_grad_() for x in PADDED.tensors(torch.float32))
    out = attention(q, k, v, "rerope:window=24", causal=True, backend="band")
    far = (2, 4, 64 - 24, 32)
    # as a model gives it, which reads the output query by query, and in another order, which is copied once
    for grad, copies in ((torch.empty_like(out), []), (torch.empty(out.shape), ["copy_"])):
        rotated.clear()
        with LargeOperations(q.numel() // 2) as operations:
            torch.autograd.grad(out, (q, k, v), grad, retain_graph=True)
        assert operations.names == [*copies, "add_", "add_"]  # far keys, which are not rotated, and values
        assert rotated == [(tuple(q.shape), False), (tuple(k.shape), False), (far, True)]


@interprets
def test_outputs_are_stored_as_models_read_them_interpreted():
    q, k, v = Setting(40, 40, heads=2, kv_heads=2, d=32, dv=32).tensors(torch.float32)
    for learns in (False, True):
        out = attention(q.requires_grad_(learns), k, v, "rerope:window=8", causal=True, backend="band")
        assert out.transpose(1, 2).is_contiguous() and out.requires_grad == learns
        out += 1  # no view, which autograd would refuse to change
