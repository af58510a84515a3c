"""Padded and packed rows with gradients, one after another, where that is faster than FlexAttention."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from isentrope import dispatch
from isentrope.core.frame_calls import list_frames, split_rows
from isentrope.core.layout import Layout, Rows
from isentrope.functional import attention
from tests.contract.matrix import Setting
from tests.contract.test_fast import error, hopper
from tests.contract.test_fast_rows import TEXTS
from tests.fixtures.turns import in_turns

KINDS = ["lengths", "left", "documents", "no_keys"]


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


@pytest.mark.parametrize(("recipe", "kind"), in_turns([*TEXTS, "alibi"], KINDS))
@pytest.mark.parametrize("causal", [True, False])
def test_rows_one_after_another_are_the_reference(recipe, kind, causal, monkeypatch):
    setting = Setting(67, 67, kind, dv=8)
    exact = run(setting, recipe, torch.float64, "reference", causal=causal)
    split = []

    def find(call):
        split.append(split_rows(call, list_frames(call.layout)))
        return split[-1]

    monkeypatch.setattr(dispatch, "_find_rows", find)
    for one, other in zip(run(setting, recipe, torch.float64, causal=causal), exact, strict=True):
        assert_close(one, other, rtol=1e-9, atol=1e-9)
    counts = [[part.tokens for part in parts if part.call is not None] for parts in split[0]]
    expected = {"documents": [[22, 22, 22, 1]] * 2, "no_keys": [[67], []]}
    assert counts == expected.get(kind, [[67], [44]])


@hopper
@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["lengths", "left", "documents"])
@pytest.mark.parametrize(
    "recipe", ["rerope:window=256+infoscale:train_length=512", "rope+window:size=256", "infoscale"]
)
def test_long_rows_with_gradients_run_one_after_another(recipe, kind, monkeypatch):
    recipe += ":train_length=512" if recipe == "infoscale" else ""
    setting = Setting(1500, 1500, kind, heads=8, kv_heads=4, d=64, dv=64)
    exact = run(setting, recipe, torch.float64, "reference", "cuda")
    plain = run(setting, recipe, torch.bfloat16, device="cuda")
    calls, whole = [], dispatch._run_rows
    monkeypatch.setattr(dispatch, "MIN_ROW_ELEMENTS", 1 << 16)
    monkeypatch.setattr(dispatch, "_run_rows", lambda *args: calls.append(1) or whole(*args))
    rows = run(setting, recipe, torch.bfloat16, device="cuda")
    assert calls or recipe.startswith("infoscale")
    for one, other, best in zip(rows, plain, exact, strict=True):
        assert error(one, best) <= max(1e-2, 1.5 * error(other, best))
