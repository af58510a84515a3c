"""The Triton kernels of `decode`. Imported only where Triton is there."""

# mypy: ignore-errors
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from isentrope.core.compile import device_context
from isentrope.core.rotation_kernel import broadcast_strides, normalise_halves

BLOCK = 64  # keys, at most, and bytes of them: small cards have little shared memory
BYTES = 32 << 10
ROWS = 16  # query heads that share a key head, at least: what tensor cores take
PROGRAMS = 264  # in flight: two for each processor of the largest cards


def launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bounds: Tensor,
    turns: list[Tensor],
    which: list[bool],
    tau: Tensor | None,
    scale: float,
    normalise: bool,
) -> tuple[Tensor, Tensor]:
    """See `decode.attend`. turns: cos and sin for each of `which` (queries, keys of branch 0, then of 1) that turns."""
    batch, heads, _, size = q.shape
    kv_heads, keys, value_size = k.shape[1], k.shape[2], v.shape[-1]
    groups = heads // kv_heads
    splits = max(1, min(PROGRAMS // max(1, batch * kv_heads), triton.cdiv(keys, 4 * BLOCK)))
    splits = 1 << (splits.bit_length() - 1)
    parts = q.new_empty(batch, heads, splits, value_size, dtype=torch.float32)
    lses = q.new_empty(batch, heads, splits, dtype=torch.float32)
    which = which + [False] * (4 - len(which))
    given, tables, steps = iter(turns), [], []
    for turned in which:
        for _ in range(2):
            table = next(given) if turned else lses
            tables.append(table)
        # a table of one row, or of one position, is read again and again
        steps += broadcast_strides(table if turned else None, 0, 2)
    out = q.new_empty(batch, heads, 1, value_size)
    lse = q.new_empty(batch, heads, 1, dtype=torch.float32)
    with device_context(q):
        _attend[(batch * kv_heads, splits)](
            q, k, v, parts, lses, bounds, lses if tau is None else tau, *tables,
            q.stride(0), q.stride(1), k.stride(0), k.stride(1), k.stride(2), v.stride(0), v.stride(1), v.stride(2),
            0 if bounds.shape[0] == 1 else bounds.stride(0),
            *broadcast_strides(tau, 0, 1), *steps, scale, kv_heads, splits,
            GROUPS=groups, ROWS=max(ROWS, triton.next_power_of_2(groups)), SIZE=size, HALF=size // 2,
            VALUES=value_size, BLOCK=min(BLOCK, BYTES // (size * q.element_size())), BRANCHES=bounds.shape[1],
            TAU=tau is not None, NORMALISE=normalise, EXACT=q.dtype == torch.float32,
            TURN_Q0=which[0], TURN_K0=which[1], TURN_Q1=which[2], TURN_K1=which[3],
        )  # fmt: skip
        _join[(batch * heads,)](parts, lses, out, lse, VALUES=value_size, SPLITS=splits)
    return out, lse


@triton.jit
def _turned(a, b, cos, sin):
    return a * cos - b * sin, b * cos + a * sin


@triton.jit
def _query(q, row, tau, cos, sin, half, GROUPS: tl.constexpr, HALF: tl.constexpr, TURN: tl.constexpr,
           NORMALISE: tl.constexpr):  # fmt: skip
    """The query heads of one key head, both halves, as one branch has them."""
    held = row[:, None] < GROUPS
    a = tl.load(q, mask=held, other=0.0).to(tl.float32)
    b = tl.load(q + HALF, mask=held, other=0.0).to(tl.float32)
    if NORMALISE:
        a, b = normalise_halves(a, b)
    if TURN:
        a, b = _turned(a, b, tl.load(cos + half)[None, :], tl.load(sin + half)[None, :])
    return a * tau[:, None], b * tau[:, None]


@triton.jit
def _scores(qa, qb, a, b, cos, sin, at, live, half, step, TURN: tl.constexpr,
            NORMALISE: tl.constexpr, EXACT: tl.constexpr):  # fmt: skip
    """Products of the queries with a block of keys, as one branch has them."""
    kind = a.dtype
    if NORMALISE:
        a, b = normalise_halves(a.to(tl.float32), b.to(tl.float32))
    if TURN:
        where = at.to(tl.int64)[:, None] * step + half[None, :]
        c = tl.load(cos + where, mask=live[:, None], other=0.0)
        s = tl.load(sin + where, mask=live[:, None], other=0.0)
        a, b = _turned(a.to(tl.float32), b.to(tl.float32), c, s)
    a, b = a.to(kind), b.to(kind)
    precision: tl.constexpr = "ieee" if EXACT else "tf32"
    found = tl.dot(qa.to(kind), tl.trans(a), input_precision=precision)
    return found + tl.dot(qb.to(kind), tl.trans(b), input_precision=precision)


@triton.jit
def _attend(
    q, k, v, parts, lses, bounds, tau,
    cos_q0, sin_q0, cos_k0, sin_k0, cos_q1, sin_q1, cos_k1, sin_k1,
    q_batch, q_head, k_batch, k_head, k_key, v_batch, v_head, v_key, bounds_batch, tau_batch, tau_head,
    q0_batch, q0_row, k0_batch, k0_row, q1_batch, q1_row, k1_batch, k1_row, scale, kv_heads, splits,
    GROUPS: tl.constexpr, ROWS: tl.constexpr, SIZE: tl.constexpr, HALF: tl.constexpr, VALUES: tl.constexpr,
    BLOCK: tl.constexpr, BRANCHES: tl.constexpr, TAU: tl.constexpr, NORMALISE: tl.constexpr,
    TURN_Q0: tl.constexpr, TURN_K0: tl.constexpr, TURN_Q1: tl.constexpr, TURN_K1: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """One share of the keys that one key head's queries see: its output and log-sum-exp."""
    batch, head = (tl.program_id(0) // kv_heads).to(tl.int64), tl.program_id(0) % kv_heads
    split = tl.program_id(1)
    row, half, value = tl.arange(0, ROWS), tl.arange(0, HALF), tl.arange(0, VALUES)

    # what is seen: two intervals a branch, empty ones with low = high
    bounds += batch * bounds_batch
    low0, high0 = tl.load(bounds), tl.load(bounds + 1)
    low1, high1 = tl.load(bounds + 2), tl.load(bounds + 3)
    first = tl.minimum(tl.where(low0 < high0, low0, 2147483647), tl.where(low1 < high1, low1, 2147483647))
    last = tl.maximum(tl.where(low0 < high0, high0, 0), tl.where(low1 < high1, high1, 0))
    low2, high2, low3, high3 = first * 0, first * 0, first * 0, first * 0
    if BRANCHES == 2:
        low2, high2 = tl.load(bounds + 4), tl.load(bounds + 5)
        low3, high3 = tl.load(bounds + 6), tl.load(bounds + 7)
        first = tl.minimum(first, tl.where(low2 < high2, low2, 2147483647))
        first = tl.minimum(first, tl.where(low3 < high3, low3, 2147483647))
        last = tl.maximum(last, tl.where(low2 < high2, high2, 0))
        last = tl.maximum(last, tl.where(low3 < high3, high3, 0))
    share = tl.cdiv(tl.cdiv(tl.maximum(last - first, 0), splits), BLOCK) * BLOCK
    begin = first + split * share
    end = tl.minimum(begin + share, last)

    mine = head * GROUPS + row
    heat = tl.full((ROWS,), 1.0, tl.float32)
    if TAU:
        heat = tl.load(tau + batch * tau_batch + mine * tau_head, mask=row < GROUPS, other=0.0).to(tl.float32)
    at_q = q + batch * q_batch + mine[:, None].to(tl.int64) * q_head + half[None, :]
    cos_q0, sin_q0, cos_k0, sin_k0 = (
        cos_q0 + batch * q0_batch, sin_q0 + batch * q0_batch, cos_k0 + batch * k0_batch, sin_k0 + batch * k0_batch,
    )  # fmt: skip
    qa0, qb0 = _query(at_q, row, heat, cos_q0, sin_q0, half, GROUPS, HALF, TURN_Q0, NORMALISE)
    qa1, qb1 = qa0, qb0
    if BRANCHES == 2:
        cos_q1, sin_q1, cos_k1, sin_k1 = (
            cos_q1 + batch * q1_batch, sin_q1 + batch * q1_batch, cos_k1 + batch * k1_batch, sin_k1 + batch * k1_batch,
        )  # fmt: skip
        qa1, qb1 = _query(at_q, row, heat, cos_q1, sin_q1, half, GROUPS, HALF, TURN_Q1, NORMALISE)

    k += batch * k_batch + head.to(tl.int64) * k_head
    v += batch * v_batch + head.to(tl.int64) * v_head
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    mixed = tl.zeros((ROWS, VALUES), tl.float32)
    for start in range(begin, end, BLOCK):
        at = start + tl.arange(0, BLOCK)
        stop = tl.minimum(start + BLOCK, end)
        live = at < end
        near = (low0 < stop) & (high0 > start) | (low1 < stop) & (high1 > start)
        far = (low2 < stop) & (high2 > start) | (low3 < stop) & (high3 > start)
        if near | far:
            here = at.to(tl.int64)[:, None] * k_key + half[None, :]
            a = tl.load(k + here, mask=live[:, None], other=0.0)
            b = tl.load(k + here + HALF, mask=live[:, None], other=0.0)
            s = tl.full((ROWS, BLOCK), float("-inf"), tl.float32)
            if near:
                found = _scores(qa0, qb0, a, b, cos_k0, sin_k0, at, live, half, k0_row, TURN_K0, NORMALISE, EXACT)
                seen = live & ((at >= low0) & (at < high0) | (at >= low1) & (at < high1))
                s = tl.where(seen[None, :], found * scale, s)
            if far:
                found = _scores(qa1, qb1, a, b, cos_k1, sin_k1, at, live, half, k1_row, TURN_K1, NORMALISE, EXACT)
                seen = live & ((at >= low2) & (at < high2) | (at >= low3) & (at < high3))
                s = tl.where(seen[None, :], found * scale, s)
            best = tl.maximum(top, tl.max(s, 1))
            anchor = tl.where(best == float("-inf"), 0.0, best)
            weight = tl.exp(s - anchor[:, None])
            fade = tl.exp(top - anchor)
            x = tl.load(v + at.to(tl.int64)[:, None] * v_key + value[None, :], mask=live[:, None], other=0.0)
            precision: tl.constexpr = "ieee" if EXACT else "tf32"
            mixed = mixed * fade[:, None] + tl.dot(weight.to(x.dtype), x, input_precision=precision)
            total = total * fade + tl.sum(weight, 1)
            top = best

    anchor = tl.where(total > 0, total, 1.0)
    held = row < GROUPS
    place = (batch * kv_heads * GROUPS + mine) * splits + split
    tl.store(lses + place, tl.where(total > 0, top + tl.log(anchor), float("-inf")), mask=held)
    tl.store(parts + place[:, None] * VALUES + value[None, :], mixed / anchor[:, None], mask=held[:, None])


@triton.jit
def _join(parts, lses, out, lse, VALUES: tl.constexpr, SPLITS: tl.constexpr):
    """The shares of one head together."""
    head, split, value = tl.program_id(0), tl.arange(0, SPLITS), tl.arange(0, VALUES)
    one = tl.load(lses + head * SPLITS + split)
    top = tl.max(one, 0)
    anchor = tl.where(top == float("-inf"), 0.0, top)
    weight = tl.exp(one - anchor)
    total = tl.sum(weight, 0)
    x = tl.load(parts + (head * SPLITS + split)[:, None] * VALUES + value[None, :])
    whole = tl.where(total > 0, total, 1.0)
    mixed = tl.sum(x * weight[:, None], 0) / whole
    tl.store(out + head * VALUES + value, mixed.to(out.dtype.element_ty))
    tl.store(lse + head, tl.where(total > 0, anchor + tl.log(whole), float("-inf")))
