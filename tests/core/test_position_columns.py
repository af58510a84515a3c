"""A linear bias as columns of q and k: exact, small where keys are near, and the same attention."""

from __future__ import annotations

from math import inf

import pytest
import torch

from isentrope import dispatch
from isentrope.backends import sdpa
from isentrope.builder import Inputs, build_call
from isentrope.core import position_columns
from isentrope.core.position_columns import FIRST_COLUMNS, _make_key_columns, _make_query_columns, takes_columns
from isentrope.core.switches import ALIBI_COLUMNS, set_switches
from isentrope.functional import attention
from isentrope.positions import ALiBi
from isentrope.recipe import Recipe
from tests.contract.matrix import Setting

HALVES = (torch.bfloat16, torch.float16)
SCALE = 128**-0.5
SLOPES = ALiBi.slopes(12) / SCALE  # steep and flat ones, no power of two among most
LAST = 131071


def make_columns(query, key, dtype):
    q = torch.cat(_make_query_columns(query[None], SLOPES, dtype), -1)[0]
    k = torch.cat(_make_key_columns(key[None], dtype), -1)[0, 0]
    return q, k


@pytest.mark.parametrize("dtype", HALVES)
def test_columns_are_the_bias(dtype):
    query = torch.tensor([0, 1, 255, 256, 257, 2047, 2048, 65535, 65536, 70000, LAST])
    key = torch.tensor([-3, 0, 255, 256, 2048, 65535, 65536, 65537, 69999, LAST])
    q, k = make_columns(query, key, dtype)
    bias = q.double() @ k.double().mT
    exact = SLOPES[:, None, None] * (key[None] - query[:, None])
    # M is held to 17 bits, and - M i to 24
    assert ((bias - exact).abs() <= 2.0**-16 * exact.abs() + 2.0**-18 * SLOPES[:, None, None]).all()


@pytest.mark.parametrize("dtype", HALVES)
def test_first_columns_add_up_exactly_in_fp32_and_stay_small_nearby(dtype):
    query = torch.tensor([65536, 65600, 131070, LAST])
    key = query[:, None] - torch.tensor([0, 1, 40])
    q, k = make_columns(query, key.flatten(), dtype)
    q, k = q[..., :FIRST_COLUMNS], k.unflatten(0, key.shape)[..., :FIRST_COLUMNS]
    terms = q[:, :, None].double() * k[None].double()
    partial, exact = torch.zeros(terms.shape[:-1]), terms.cumsum(-1)
    for column in range(FIRST_COLUMNS):
        partial = partial + terms[..., column].float()
        assert torch.equal(partial.double(), exact[..., column])
    digit = 2.0 ** position_columns.DIGIT_BITS[dtype]
    assert (partial.abs() <= SLOPES[:, None, None] * (40 + digit)).all()


def add_truncated(total, terms):
    """fp32 sum of 16 products and a total as tensor cores may form it: bits below the largest one's 24 are dropped."""
    stacked = torch.cat((total[..., None], terms), -1)
    unit = 2.0 ** (torch.frexp(stacked.abs().amax(-1, keepdim=True))[1] - 24).double()
    return ((stacked / unit).trunc() * unit).sum(-1).float().double()


@pytest.mark.parametrize("dtype", HALVES)
def test_scores_of_the_last_queries_at_131072_tokens_as_tensor_cores_add(dtype):
    torch.manual_seed(0)
    query, key = torch.tensor([LAST]), torch.arange(LAST - 600, LAST + 1)
    q, k = torch.randn(1, 32).to(dtype), torch.randn(len(key), 32).to(dtype)
    columns_q, columns_k = make_columns(query, key, dtype)
    first, last = columns_q.split((FIRST_COLUMNS, columns_q.shape[-1] - FIRST_COLUMNS), -1)
    wide_q = torch.cat((first[:, 0], q.expand(len(SLOPES), -1), last[:, 0]), -1).double()
    wide_k = torch.cat((columns_k[:, :FIRST_COLUMNS], k, columns_k[:, FIRST_COLUMNS:]), -1).double()
    total = torch.zeros(len(SLOPES), len(key), dtype=torch.float64)
    for start in range(0, wide_q.shape[-1], 16):
        part = slice(start, start + 16)
        total = add_truncated(total, wide_q[:, None, part] * wide_k[None, :, part])
    bias = SLOPES[:, None] * (key - LAST)
    exact = SCALE * (q.double() @ k.double().mT + bias)
    # where a weight counts at all, it is off by less than rounding it would be
    counts = exact > exact.amax(-1, keepdim=True) - 20
    assert (SCALE * total - exact)[counts].abs().max() < torch.finfo(dtype).eps / 4


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("rows", ["", "lengths", "left", "documents", "position_ids"])
def test_the_same_attention_and_gradients(rows, dtype, monkeypatch):
    for causal in (True, False):
        setting = Setting(63, 63, rows, heads=6, kv_heads=3, d=20, dv=16)
        results = []
        for on, kind in ((True, dtype), (False, dtype), (False, torch.float64)):
            monkeypatch.setattr(sdpa, "takes_columns", takes_columns if on else lambda call: False)
            inputs = [x.to(kind).requires_grad_() for x in setting.tensors(dtype)]
            out, aux = attention(
                *inputs, "alibi", causal=causal, backend="sdpa", return_lse=True, **setting.arguments("cpu")
            )
            weights = torch.linspace(0.5, 1.5, out.numel(), dtype=torch.float64).view_as(out)
            (out.double() * weights).sum().backward()
            results.append([out.detach(), aux.lse, *(x.grad for x in inputs)])
        for ours, plain, truth in zip(*results, strict=True):
            seen = truth > -inf
            off, usual = ((x - truth)[seen].norm() for x in (ours.double(), plain.double()))
            assert off <= 2 * max(usual, torch.finfo(dtype).eps / 2 * truth[seen].norm())


def make_call(queries, keys, dtype, device="cpu", text="alibi"):
    q, k, v = (torch.zeros(1, 4, n, 64, dtype=dtype, device=device) for n in (queries, keys, keys))
    return build_call(Inputs(q, k, v, causal=True), Recipe.parse(text))


def test_where_columns_are_used():
    assert takes_columns(make_call(40, 40, torch.bfloat16))
    assert not takes_columns(make_call(40, 40, torch.float32))  # its contract is tighter than any order of summation
    assert not takes_columns(make_call(1, 40, torch.bfloat16))
    assert not takes_columns(make_call(40, 40, torch.bfloat16, text="rope"))
    assert takes_columns(make_call(20, 30000, torch.float16)) and not takes_columns(make_call(20, 40000, torch.float16))


class OnGPU(torch.Tensor):
    is_cuda = True


def test_a_gpu_uses_them_only_when_switched_on_and_without_gradients(monkeypatch):
    monkeypatch.setattr(sdpa, "has_fused_kernels", lambda call: False)
    call = make_call(40, 40, torch.bfloat16)
    object.__setattr__(call, "q", call.q.as_subclass(OnGPU))
    before = set_switches([])
    try:
        assert not takes_columns(call) and dispatch._choose_fused(call) is dispatch.FLEX
        set_switches([ALIBI_COLUMNS])
        assert takes_columns(call) and dispatch._choose_fused(call) is dispatch.SDPA
        call.v.requires_grad_()
        assert not takes_columns(call) and dispatch._choose_fused(call) is dispatch.FLEX
    finally:
        set_switches(before)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("keys", [333, 70000, 131072])
def test_columns_on_a_gpu(keys, dtype):
    """Against fp64 for the last queries: no further off than FlexAttention, twice over."""
    before = set_switches([ALIBI_COLUMNS])
    try:
        torch.manual_seed(0)
        q, k, v = (torch.randn(1, 8, keys, 128, device="cuda", dtype=dtype) for _ in range(3))
        tail = slice(-64, None)
        truth = attention(q[:, :, tail].double(), k.double(), v.double(), "alibi", causal=True, backend="chunked")
        off = {}
        for backend in ("sdpa", "flex"):
            out = attention(q, k, v, "alibi", causal=True, backend=backend)
            off[backend] = (out[:, :, tail].double() - truth).norm() / truth.norm()
        assert off["sdpa"] <= 2 * max(off["flex"].item(), torch.finfo(dtype).eps / 2), off
    finally:
        set_switches(before)
