"""Padded rows as one packed row, for a backend that would compute padding like tokens."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

import isentrope as ise
from isentrope import dispatch
from isentrope.backends.chunked import ChunkedBackend
from isentrope.core.layout import Layout, Rows
from isentrope.functional import attention
from tests.contract.matrix import Setting
from tests.contract.test_fast import error
from tests.contract.test_fast_rows import TEXTS
from tests.fixtures.turns import in_turns

KINDS = ["lengths", "left", "documents", "no_keys"]
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
    """Rows whose padded queries nobody reads, as a model makes them."""
    short = torch.tensor([n, 0 if kind == "no_keys" else n * 2 // 3])
    ids = torch.arange(n)[None] // (n // 3)
    rows = Rows(documents=ids) if kind == "documents" else Rows(lengths=short, left_padded=kind == "left")
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
    tokens = {"no_keys": 67, "documents": 134}.get(kind, 67 + 44)
    assert [tokens.layout.keys for tokens in packed] == ([] if kind == "documents" else [tokens])


def test_rows_that_are_read_or_have_no_padding_are_not_packed(monkeypatch):
    packed, q = [], torch.randn(2, 2, 24, 16)
    monkeypatch.setattr(dispatch, "_run_packed", lambda *args: packed.append(args[1]) or run_packed(*args))
    layouts = [Layout(2, 24, 24, torch.device("cpu"), Rows(lengths=torch.tensor([24, n]))) for n in (9, 24, 9)]
    layouts[1].padded_queries_matter = layouts[2].padded_queries_matter = False
    counts = []
    for layout in layouts:
        attention(q, q, q, "rope+window:size=4", layout=layout, backend="flex")
        counts.append(len(packed))
    assert counts == [0, 0, 1]


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
