"""The Triton kernel of `band`. Imported only where Triton is there."""

# mypy: ignore-errors
from __future__ import annotations

from math import log

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from isentrope.backends.merge import PartialOutput
from isentrope.core.compile import device_context
from isentrope.core.rotation import Angles
from isentrope.core.rotation_kernel import broadcast_strides, normalise_halves

# queries and keys of a block, pipeline stages, warps, by the size of a vector. Up to 128 two blocks fit on a
# multiprocessor, one multiplies while the other takes exponentials; and with up to 32 first keys no registers spill
LARGE = {32: (128, 64, 3, 4), 64: (64, 64, 3, 4), 128: (64, 64, 3, 4), 256: (64, 32, 2, 8)}
SMALL = {32: (128, 64, 2, 4), 64: (128, 64, 2, 8), 128: (128, 32, 2, 8), 256: (64, 32, 2, 8)}
ROOM = 160 << 10  # bytes of shared memory, which server cards have
LEAST = 16  # rows or columns of a matrix that tensor cores take
LN2 = tl.constexpr(log(2))


def launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    left: int,
    right: int,
    turn: Angles | None,
    tau: Tensor | None,
    scale: float,
    normalise: bool,
    sinks: int = 0,
    sink_keys: Tensor | None = None,
    sink_turn: Angles | None = None,
    far: PartialOutput | None = None,
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of queries, the last of the keys, that see `left` keys before their own and `right` after.

    q is raw: it is normalised, turned and multiplied by τ here, or left exactly as it is where none of that is asked
    for: a backward will have it so. k is as the kernel multiplies it. Queries turned by
    `sink_turn` also see those of the first `sinks` keys that lie before the band, as `sink_keys` has them. far: what
    they see besides, merged in.
    """
    batch, heads, queries, size = q.shape
    kv_heads, keys, value_size = k.shape[1], k.shape[2], v.shape[-1]
    rows, columns, stages, warps = _shapes(q.device)[max(size, value_size)]
    out = torch.empty(batch, heads, queries, value_size, dtype=q.dtype, device=q.device)
    lse = torch.empty(batch, heads, queries, dtype=torch.float32, device=q.device)
    if batch == 0:
        return out, lse
    cos, sin = turn or (lse, lse)
    sink_cos, sink_sin = sink_turn or (lse, lse)
    sink_keys = k if sink_keys is None else sink_keys
    far_out, far_lse, first = far or PartialOutput(out, lse, 0)
    with device_context(q):
        _band[(triton.cdiv(queries, rows), heads, batch)](
            q, _blocked(k, columns), _blocked(v, columns), v, sink_keys, out, lse, cos, sin, sink_cos, sink_sin,
            lse if tau is None else tau, far_out, far_lse,
            *q.stride()[:3], *v.stride()[:3], *sink_keys.stride()[:3],
            *broadcast_strides(turn and cos, 0, 2), *broadcast_strides(sink_turn and sink_cos, 0, 2),
            *broadcast_strides(tau, 0, 1, 2),
            *far_out.stride()[:3], *far_lse.stride(),
            heads, queries, keys, left, right, sinks, first, first + far_out.shape[2], scale / log(2),
            GROUPS=heads // kv_heads, SIZE=size, VALUES=value_size, ROWS=rows, COLUMNS=columns,
            SINKS=max(LEAST, triton.next_power_of_2(sinks)) if sinks else 0, TURN=turn is not None,
            SINK_TURN=sink_turn is not None, TAU=tau is not None, NORMALISE=normalise, FAR=far is not None,
            LATE=turn is None and sink_turn is None and tau is None and not normalise,
            EXACT=q.dtype == torch.float32, num_stages=stages, num_warps=warps,
        )  # fmt: skip
    return out, lse


def _blocked(x: Tensor, rows: int) -> TensorDescriptor:
    """x (batch, heads, length, size) in blocks of so many vectors, as Hopper's copy engine takes it: in whole steps."""
    step = 16 // x.element_size()
    if x.data_ptr() % 16 or any(n > 1 and (at == 0 or at % step) for n, at in _axes(x)):
        x = x.clone(memory_format=torch.contiguous_format)
    strides = [at if n > 1 else x.shape[-1] for n, at in _axes(x)]  # of an axis with one entry it may be anything
    return TensorDescriptor(x, list(x.shape), [*strides, 1], [1, 1, rows, x.shape[-1]])


def _axes(x: Tensor) -> list[tuple[int, int]]:
    """Entries and stride of all axes but the last."""
    return list(zip(x.shape[:-1], x.stride()[:-1], strict=True))


def _shapes(device: torch.device) -> dict[int, tuple[int, int, int, int]]:
    if device.type != "cuda":
        return LARGE
    return LARGE if torch.cuda.get_device_properties(device).shared_memory_per_block_optin > ROOM else SMALL


@triton.jit
def _queries(q, cos, sin, heat, row, live, q_row, turn_row, SIZE: tl.constexpr, TURN: tl.constexpr,
             NORMALISE: tl.constexpr):  # fmt: skip
    """A block of queries, normalised, turned and multiplied by `heat`, in the dtype that they have."""
    half: tl.constexpr = SIZE // 2
    lane = tl.arange(0, half)
    where = row[:, None].to(tl.int64) * q_row + lane[None, :]
    a = tl.load(q + where, mask=live[:, None], other=0.0).to(tl.float32)
    b = tl.load(q + where + half, mask=live[:, None], other=0.0).to(tl.float32)
    if NORMALISE:
        a, b = normalise_halves(a, b)
    if TURN:
        turn = row[:, None].to(tl.int64) * turn_row + lane[None, :]
        c = tl.load(cos + turn, mask=live[:, None], other=1.0)
        s = tl.load(sin + turn, mask=live[:, None], other=0.0)
        a, b = a * c - b * s, b * c + a * s
    whole = tl.reshape(tl.permute(tl.join(a * heat[:, None], b * heat[:, None]), (0, 2, 1)), (row.shape[0], SIZE))
    return whole.to(q.dtype.element_ty)


@triton.jit
def _mixed(top, total, mixed, s, x, EXACT: tl.constexpr, MASKED: tl.constexpr):
    """One more block of scores (to base 2) and values taken in."""
    best = tl.maximum(top, tl.max(s, 1))
    anchor = best
    if MASKED:  # a row may have seen nothing yet
        anchor = tl.where(best == float("-inf"), 0.0, best)
    weight = tl.exp2(s - anchor[:, None])
    fade = tl.exp2(top - anchor)
    precision: tl.constexpr = "ieee" if EXACT else "tf32"
    mixed = tl.dot(weight.to(x.dtype), x, mixed * fade[:, None], input_precision=precision)
    return best, total * fade + tl.sum(weight, 1), mixed


@triton.jit
def _blocks(top, total, mixed, tile, k, v, batch, head, at, left, right, keys, begin, end, scale, SIZE: tl.constexpr,
            VALUES: tl.constexpr, COLUMNS: tl.constexpr, LATE: tl.constexpr, EXACT: tl.constexpr,
            MASKED: tl.constexpr):  # fmt: skip
    """Blocks of keys from `begin` to `end`: all pairs of them, or those in the band. Past the last key come zeros."""
    precision: tl.constexpr = "ieee" if EXACT else "tf32"
    for start in tl.range(begin, end, COLUMNS):
        y = k.load([batch, head, start, 0]).reshape(COLUMNS, SIZE)
        s = tl.dot(tile, tl.trans(y), input_precision=precision)
        if LATE:
            s = s * scale
        if MASKED:
            column = start + tl.arange(0, COLUMNS)
            apart = column[None, :] - at[:, None]
            s = tl.where((apart >= -left) & (apart <= right) & (column < keys)[None, :], s, float("-inf"))
        x = v.load([batch, head, start, 0]).reshape(COLUMNS, VALUES)
        top, total, mixed = _mixed(top, total, mixed, s, x, EXACT, MASKED)
    return top, total, mixed


# what changes with the length is not looked at more closely: one kernel serves all lengths
@triton.jit(do_not_specialize=[
    "turn_batch", "sink_turn_batch", "tau_batch", "tau_head", "far_lse_batch", "far_lse_head",
    "queries", "keys", "left", "right", "sinks", "first", "last",
])  # fmt: skip
def _band(
    q, k_blocks, v_blocks, v, sink_keys, out, lse, cos, sin, sink_cos, sink_sin, tau, far_out, far_lse,
    q_batch, q_head, q_row, v_batch, v_head, v_key, sink_batch, sink_head, sink_key,
    turn_batch, turn_row, sink_turn_batch, sink_turn_row, tau_batch, tau_head, tau_row,
    far_batch, far_head, far_row, far_lse_batch, far_lse_head, far_lse_row,
    heads, queries, keys, left, right, sinks, first, last, scale,
    GROUPS: tl.constexpr, SIZE: tl.constexpr, VALUES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    SINKS: tl.constexpr, TURN: tl.constexpr, SINK_TURN: tl.constexpr, TAU: tl.constexpr, NORMALISE: tl.constexpr,
    FAR: tl.constexpr, LATE: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """One block of queries of one head. LATE: the scale goes into scores, for queries are not touched."""
    head, kv_head, batch = tl.program_id(1), tl.program_id(1) // GROUPS, tl.program_id(2).to(tl.int64)
    one, shared = head.to(tl.int64), kv_head.to(tl.int64)
    start = tl.program_id(0) * ROWS
    row = start + tl.arange(0, ROWS)
    live = row < queries
    ahead = keys - queries
    at = row + ahead
    heat = tl.full((ROWS,), 1.0, tl.float32)
    if not LATE:
        heat = heat * scale
    if TAU:
        laws = tau + batch * tau_batch + one * tau_head + row.to(tl.int64) * tau_row
        heat = heat * tl.load(laws, mask=live, other=0.0).to(tl.float32)
    q += batch * q_batch + one * q_head
    v += batch * v_batch + shared * v_head
    value = tl.arange(0, VALUES)
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    mixed = tl.zeros((ROWS, VALUES), tl.float32)

    tile = _queries(q, cos + batch * turn_batch, sin + batch * turn_batch, heat, row, live, q_row, turn_row, SIZE, TURN,
                    NORMALISE)  # fmt: skip
    # blocks that some row sees, and among them those that all rows see whole
    front, back = start + ahead, tl.minimum(start + ROWS, queries) - 1 + ahead
    begin = tl.maximum(front - left, 0) // COLUMNS * COLUMNS
    end = tl.cdiv(tl.minimum(back + right + 1, keys), COLUMNS) * COLUMNS
    whole = tl.minimum(tl.cdiv(tl.maximum(back - left, 0), COLUMNS) * COLUMNS, end)
    stop = tl.maximum(tl.minimum(front + right + 1, keys) // COLUMNS * COLUMNS, whole)
    top, total, mixed = _blocks(top, total, mixed, tile, k_blocks, v_blocks, tl.program_id(2), kv_head, at, left, right,
                                keys, begin, whole, scale, SIZE, VALUES, COLUMNS, LATE, EXACT, True)  # fmt: skip
    top, total, mixed = _blocks(top, total, mixed, tile, k_blocks, v_blocks, tl.program_id(2), kv_head, at, left, right,
                                keys, whole, stop, scale, SIZE, VALUES, COLUMNS, LATE, EXACT, False)  # fmt: skip
    top, total, mixed = _blocks(top, total, mixed, tile, k_blocks, v_blocks, tl.program_id(2), kv_head, at, left, right,
                                keys, stop, end, scale, SIZE, VALUES, COLUMNS, LATE, EXACT, True)  # fmt: skip

    if SINKS > 0:  # last, when the memory of the loops is free again
        tile = _queries(q, sink_cos + batch * sink_turn_batch, sink_sin + batch * sink_turn_batch, heat, row, live,
                        q_row, sink_turn_row, SIZE, SINK_TURN, NORMALISE)  # fmt: skip
        column, lane = tl.arange(0, SINKS), tl.arange(0, SIZE)
        there = (column < sinks)[:, None]
        where = column.to(tl.int64)[:, None]
        base = sink_keys + batch * sink_batch + shared * sink_head
        y = tl.load(base + where * sink_key + lane[None, :], mask=there, other=0.0)
        x = tl.load(v + where * v_key + value[None, :], mask=there, other=0.0)
        precision: tl.constexpr = "ieee" if EXACT else "tf32"
        s = tl.dot(tile, tl.trans(y), input_precision=precision)
        if LATE:
            s = s * scale
        seen = (column < sinks)[None, :] & (column[None, :] < (at - left)[:, None])
        top, total, mixed = _mixed(top, total, mixed, tl.where(seen, s, float("-inf")), x, EXACT, True)

    if FAR:
        held = live & (row >= first) & (row < last)
        there = (row - first).to(tl.int64)
        other = far_lse + batch * far_lse_batch + one * far_lse_head + there * far_lse_row
        other = tl.load(other, mask=held, other=float("-inf")).to(tl.float32) / LN2
        place = far_out + batch * far_batch + one * far_head + there[:, None] * far_row + value[None, :]
        x = tl.load(place, mask=held[:, None], other=0.0).to(tl.float32)
        best = tl.maximum(tl.where(live, top, 0.0), other)
        fade, weight = tl.exp2(top - best), tl.exp2(other - best)
        mixed = mixed * fade[:, None] + x * weight[:, None]
        total, top = total * fade + weight, best

    total = tl.where(live, total, 1.0)
    place = (batch * heads + one) * queries + row
    tl.store(lse + place, (top + tl.log2(total)) * LN2, mask=live)
    mixed = mixed / total[:, None]
    tl.store(out + place[:, None] * VALUES + value[None, :], mixed.to(out.dtype.element_ty), mask=live[:, None])
