"""Padded rows as one packed row, for a backend that would compute padding like tokens."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

import isentrope as ise
from isentrope import dispatch
from isentrope.backends.chunked import ChunkedBackend
from isentrope.backends.dense import DenseBackend
from isentrope.builder import Inputs, build_call
from isentrope.core.layout import Layout, Rows
from isentrope.core.unpadding import find_tokens
from isentrope.functional import attention
from isentrope.hf.mask import make_frames_mask
from isentrope.hf.mask import make_layout as make_model_layout
from tests.contract.matrix import Setting
from tests.contract.test_fast import error
from tests.contract.test_fast_rows import TEXTS
from tests.fixtures.turns import in_turns

KINDS = ["lengths", "left", "documents", "padded documents", "model", "no_keys"]
run_packed = dispatch._run_packed


def build(text):
    """A recipe by its text, or a CLEX whose weights have gradients."""
    return ise.Recipe(position=ise.CLEX(16, 16, max_factor=4).double()) if text == "clex" else text


def take_gradients(recipe):
    """Gradients of a recipe's weights, which begin anew."""
    parameters = [] if isinstance(recipe, str) else list(recipe.position.parameters())
    gradients = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    return gradients


def make_layout(kind, device="cpu", n=67):
    """Rows whose padded queries nobody reads: as a model makes them, or with padding and documents."""
    short = torch.tensor([n, 0 if kind == "no_keys" else n // 3])
    if kind == "model":
        x = torch.empty(2, 1, n, 1, device=device)
        return make_model_layout(make_frames_mask(2, n, n, attention_mask=torch.arange(n) >= n - short[:, None]), x, x)
    rows = Rows(lengths=None if kind == "documents" else short, left_padded=kind == "left")
    if "documents" in kind:
        rows = replace(rows, documents=torch.arange(n)[None] // 15)
    layout = Layout(2, n, n, torch.device(device), rows)
    layout.padded_queries_matter = False
    return layout


def run(setting, recipe, dtype, backend="auto", device="cpu", causal=True):
    """Output, log-sum-exp and gradients, with NaN in what nobody sees, and zeros there in the results."""
    layout = make_layout(setting.rows, device, setting.keys)
    hidden = layout.padding()[0].expand(setting.batch, -1)[:, None, :, None] if setting.rows != "documents" else None
    q, k, v = setting.tensors(dtype, device)
    if hidden is not None:
        q, k, v = (x.masked_fill(hidden, torch.nan) for x in (q, k, v))
    for x in (q, k, v):
        x.requires_grad_()
    out, aux = attention(q, k, v, recipe, backend=backend, return_lse=True, layout=layout, causal=causal)
    factors = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
    if hidden is not None:
        factors = factors.masked_fill(hidden, 0)
    (out * factors).sum().backward()
    results = [x.detach() for x in (out, aux.lse[..., None], q.grad, k.grad, v.grad)]
    return results if hidden is None else [x.masked_fill(hidden, 0) for x in results]


@pytest.mark.parametrize("order", ["heads first", "queries first", "shared by rows"])
@pytest.mark.parametrize("sizes", [(3, 67, 8), (1, 67, 4), (3, 67)], ids=str)
def test_packing_is_indexing_in_every_memory_order(order, sizes):
    """And spreading undoes it, with gradients of either."""
    x = torch.randn(1 if order == "shared by rows" else 2, *sizes, dtype=torch.float64)
    if order == "queries first":
        x = x.transpose(1, 2).contiguous().transpose(1, 2)
    x = x.expand(2, *sizes).requires_grad_()
    setting = Setting(67, 67, "lengths")
    q, k, v = setting.tensors(torch.float32)
    call = build_call(Inputs(q, k, v, causal=True, layout=make_layout("lengths")), ise.Recipe.parse("rope").resolve())
    tokens = find_tokens(call)
    hidden = make_layout("lengths").padding()[0][:, None].expand(2, sizes[0], -1)
    packed = tokens.pack(x)
    assert torch.equal(packed[0], torch.cat([row[:, ~hide[0]] for row, hide in zip(x, hidden, strict=True)], 1))
    spread = tokens.spread(packed, -torch.inf)
    assert torch.equal(spread[~hidden], x[~hidden]) and (spread[hidden] == -torch.inf).all()
    factors = torch.randn(spread.shape, dtype=torch.float64)
    (gradient,) = torch.autograd.grad(spread, x, factors)
    assert torch.equal(gradient[~hidden], factors[~hidden]) and not gradient[hidden].any()


@pytest.mark.parametrize(("recipe", "kind"), in_turns([*TEXTS, "alibi", "clex"], KINDS))
@pytest.mark.parametrize("causal", [True, False])
def test_packed_tokens_of_padded_rows_are_the_reference(recipe, kind, causal, monkeypatch):
    setting, recipe = Setting(67, 67, kind, dv=8), build(recipe)
    exact = run(setting, recipe, torch.float64, "reference", causal=causal) + take_gradients(recipe)
    packed = []
    monkeypatch.setattr(dispatch, "_run_packed", lambda *args: packed.append(args[1]) or run_packed(*args))
    monkeypatch.setattr(ChunkedBackend, "computes_padding", True)
    results = run(setting, recipe, torch.float64, "chunked", causal=causal) + take_gradients(recipe)
    for one, other in zip(results, exact, strict=True):
        assert_close(one, other, rtol=1e-9, atol=1e-9)
    count = {"no_keys": 67}.get(kind, 67 + 22)
    assert [tokens.layout.keys for tokens in packed] == ([] if kind == "documents" else [count])


def test_rows_that_are_read_or_have_no_padding_are_not_packed(monkeypatch):
    packed, q = [], torch.randn(2, 2, 24, 16)
    monkeypatch.setattr(dispatch, "_run_packed", lambda *args: packed.append(args[1]) or run_packed(*args))
    layouts = [Layout(2, 24, 24, torch.device("cpu"), Rows(lengths=torch.tensor([24, n]))) for n in (9, 20, 9)]
    layouts[1].padded_queries_matter = layouts[2].padded_queries_matter = False
    counts = []
    for layout in layouts:
        attention(q, q, q, "rope+window:size=4", layout=layout, backend="flex")
        counts.append(len(packed))
    assert counts == [0, 0, 1]


def test_a_call_on_a_layout_seen_in_inference_mode_has_gradients(monkeypatch):
    monkeypatch.setattr(DenseBackend, "computes_padding", True)
    layout, tensors = make_layout("model"), Setting(67, 67, dv=16).tensors(torch.float64)
    recipe = "rerope:window=8+share:reference=8"
    with torch.inference_mode():
        for _ in range(3):
            attention(*(x.clone() for x in tensors), recipe, layout=layout, backend="dense")
    q, k, v = (x.requires_grad_() for x in tensors)
    attention(q, k, v, recipe, layout=layout, backend="dense").sum().backward()
    assert bool(q.grad.isfinite().all())


def test_rows_too_long_together_are_not_packed():
    """On a CPU flex takes no more than so many tokens, of one row and not of all."""
    q = torch.randn(3, 1, 1500, 16)
    layout = Layout(3, 1500, 1500, torch.device("cpu"), Rows(lengths=torch.tensor([1500, 1000, 500])))
    layout.padded_queries_matter = False
    attention(q, q, q, "rope+window:size=4", layout=layout, backend="flex")


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["lengths", "left"])
@pytest.mark.parametrize("recipe", ["rerope:window=256+infoscale:train_length=512", "rope+window:size=256", "alibi"])
def test_padded_rows_with_gradients_are_packed(recipe, kind, monkeypatch):
    setting, packed = Setting(1500, 1500, kind, heads=8, kv_heads=4, d=64, dv=64), []
    monkeypatch.setattr(dispatch, "_run_packed", lambda *args: packed.append(args[1]) or run_packed(*args))
    exact = run(setting, recipe, torch.float64, "reference", "cuda")
    for one, best in zip(run(setting, recipe, torch.bfloat16, device="cuda"), exact, strict=True):
        assert error(one, best) <= 2e-2
    assert packed
