"""The Triton kernels of the decode backend. Imported only where Triton is installed."""

# mypy: ignore-errors
from __future__ import annotations

from math import log

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents

from isentrope.backends.decode.blocks import (
    MIN_KEYS,
    MIN_KEYS_PER_WARP,
    MIN_ROWS,
    MIN_SPLIT_KEYS,
    count_splits,
    divide_block,
    find_device_blocks,
    fit_angles,
    share_heads,
)
from isentrope.backends.decode.merge_splits_kernel import MERGED_SPLITS, merge_splits
from isentrope.core import compile as compiling
from isentrope.core import launching
from isentrope.core.launching import RepeatedLaunch, can_overlap_launches, next_power_of_2
from isentrope.core.rotation_kernel import broadcast_strides, list_strides, normalise_halves

LN2 = tl.constexpr(log(2))


class DecodeLaunch:
    """Attention of one query per row over raw keys, in up to three branches, for any tensors laid out like the first.

    All but the addresses of q, k, v and the output is worked out here, once for the layers of a model.

    Args:
        q: (batch, heads, 1, d).
        k: (batch, kv_heads, keys, d).
        v: (batch, kv_heads, keys, dv).
        bounds: visible keys, two intervals [low, high) per branch, all disjoint: (batch or 1, branches, 4).
        angles: cos and sin of each entry of `rotated` that is true.
        rotated: whether queries of branch 0, keys of branch 0, queries and keys of branch 1 are rotated; a third branch
            has the angles of branch 1.
        factors: temperatures of all branches, then what is added to their scores, (batch or 1, heads or 1, 1) each.
        scale: factor of the scores.
        normalise: whether to divide queries and keys by their lengths.
    """

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bounds: Tensor,
        angles: list[Tensor],
        rotated: list[bool],
        factors: list[Tensor | None],
        scale: float,
        normalise: bool,
    ) -> None:
        batch, heads, _, size = q.shape
        kv_heads, keys, value_size = k.shape[1], k.shape[2], v.shape[-1]
        groups = heads // kv_heads
        rotated = rotated + [False] * (4 - len(rotated))
        multiprocessors, blocks = find_device_blocks(q)
        own_blocks = blocks[max(size, value_size)]
        vectors, stages, warps, _ = own_blocks
        if q.element_size() > 2:
            vectors, stages = max(MIN_KEYS, vectors // 2), 2
        together = share_heads(kv_heads, groups, vectors // (MIN_KEYS_PER_WARP * warps))
        if q.element_size() == 2 and (rotated[1] or rotated[3]):
            vectors = fit_angles(own_blocks, together)
        block, resident = divide_block(own_blocks, vectors, together)
        rows = batch * kv_heads // together
        self.splits = splits = count_splits(rows, -(-keys // MIN_SPLIT_KEYS), multiprocessors * resident)
        self.outputs = batch * heads
        self.partial_size = self.outputs * splits * value_size  # a multiple of what is aligned
        unused = bounds
        remaining, tables, angle_strides = iter(angles), [], []
        for is_rotated in rotated:
            pair = (next(remaining), next(remaining)) if is_rotated else (unused, unused)
            tables += pair
            # a table for all rows or all positions has stride 0 there
            angle_strides += broadcast_strides(pair[0] if is_rotated else None, 0, 2)
        branches = len(factors) // 2
        taus, offsets = (_pad_branches(values) for values in (factors[:branches], factors[branches:]))
        factors = [*taus, *offsets]
        tensors = (bounds, *[unused if x is None else x for x in factors], *tables)
        numbers = (
            *list_strides(q)[:2], *list_strides(k, v), *broadcast_strides(bounds, 0),
            *[stride for x in factors for stride in broadcast_strides(x, 0, 1)],
            *angle_strides, float(scale), kv_heads // together, splits,
        )  # fmt: skip
        constants = {
            "GROUPS": groups, "HEADS": together, "ROWS": max(MIN_ROWS, next_power_of_2(groups * together)),
            "HALF": size // 2, "VALUE_SIZE": value_size, "BLOCK": block,
            "BRANCHES": bounds.shape[1], **{f"TAU{n}": x is not None for n, x in enumerate(taus)},
            **{f"OFFSET{n}": x is not None for n, x in enumerate(offsets)}, "NORMALISE": normalise,
            "ROTATE_Q0": rotated[0], "ROTATE_K0": rotated[1], "ROTATE_Q1": rotated[2], "ROTATE_K1": rotated[3],
            "IEEE": q.dtype == torch.float32, "OVERLAP": (overlap := can_overlap_launches(q)),
        }  # fmt: skip
        options = {"num_stages": stages, "num_warps": warps}
        self._attend = RepeatedLaunch(_attend_split, (rows, splits, 1), tensors, numbers, constants, options)
        self._merge_constants = {"VALUE_SIZE": value_size, "CHUNK": MERGED_SPLITS, "OVERLAP": overlap}
        self._merge: dict[bool, RepeatedLaunch] = {}  # by whether the log-sum-exp is written

    def run(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor | None = None) -> None:
        """Write the output, in memory (batch, heads, 1, dv), and the log-sum-exp, where one is given."""
        stream = None
        if q.is_cuda:
            index = q.device.index
            if index != compiling.current_device():  # where Triton launches its kernels
                with torch.cuda.device(q.device):
                    self.run(q, k, v, out, lse)
                return
            stream = launching.current_stream(index)
        if self.splits == 1:  # nothing to merge; without a kernel of its own, so that no length compiles another
            partial = q.new_empty(self.outputs, dtype=torch.float32) if lse is None else lse
            lses = partial.data_ptr()
        else:  # outputs of the splits, and log-sum-exps from an address on
            partial = q.new_empty(self.partial_size + self.outputs * self.splits, dtype=torch.float32)
            lses = partial.data_ptr() + partial.element_size() * self.partial_size
        self._attend.run(
            (q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), partial.data_ptr(), lses),
            lambda: (q, k, v, out, partial, _view_from(partial, lses)),
            stream=stream,
        )
        if self.splits > 1:
            self._run_merge(partial, lses, out, lse, stream)

    def _run_merge(
        self, partial: Tensor, lse_address: int, out: Tensor, lse: Tensor | None, stream: int | None
    ) -> None:
        """Launch the kernel that merges the splits."""
        if (merge := self._merge.get(lse is not None)) is None:
            constants = {**self._merge_constants, "LSE": lse is not None}
            options = {"launch_pdl": True} if constants["OVERLAP"] else None
            merge = RepeatedLaunch(merge_splits, (self.outputs, 1, 1), (), (self.splits,), constants, options)
            self._merge[lse is not None] = merge
        written = partial if lse is None else lse
        merge.run(
            (partial.data_ptr(), lse_address, out.data_ptr(), written.data_ptr()),
            lambda: (partial, _view_from(partial, lse_address), out, written),
            stream=stream,
        )


def _view_from(x: Tensor, address: int) -> Tensor:
    """Return a tensor's entries from an address on."""
    return x.flatten()[(address - x.data_ptr()) // x.element_size() :]


def _pad_branches(values: list[Tensor | None]) -> list[Tensor | None]:
    """Return values of one, two or three branches as three."""
    return [*values, None, None][:3]


@triton.jit
def _load_heads(x, batch, head, x_batch, x_head, valid):
    """Load a value for each query head of a program, (batch or 1, heads or 1, 1)."""
    return tl.load(x + batch * x_batch + head * x_head, mask=valid, other=0.0).to(tl.float32)


@triton.jit
def _load_factors(tau, offset, batch, head, tau_batch, tau_head, offset_batch, offset_head, valid, TAU: tl.constexpr,
                  OFFSET: tl.constexpr):  # fmt: skip
    """Load τ and the offset of each query head of a program, the latter for powers of 2."""
    factor, shift = tl.full(head.shape, 1.0, tl.float32), tl.zeros(head.shape, tl.float32)
    if TAU:
        factor = _load_heads(tau, batch, head, tau_batch, tau_head, valid)
    if OFFSET:
        shift = _load_heads(offset, batch, head, offset_batch, offset_head, valid) / LN2
    return factor, shift


@triton.jit
def _rotate(a, b, cos, sin):
    return a * cos - b * sin, b * cos + a * sin


@triton.jit
def _load_queries(q, row, factor, cos, sin, lane, COUNT: tl.constexpr, HALF: tl.constexpr, ROTATE: tl.constexpr,
                  NORMALISE: tl.constexpr):  # fmt: skip
    """Load `COUNT` query heads in halves, normalise, rotate and multiply them by `factor`."""
    valid = row[:, None] < COUNT
    a = tl.load(q, mask=valid, other=0.0).to(tl.float32)
    b = tl.load(q + HALF, mask=valid, other=0.0).to(tl.float32)
    if NORMALISE:
        a, b = normalise_halves(a, b)
    if ROTATE:
        a, b = _rotate(a, b, tl.load(cos + lane)[None, :], tl.load(sin + lane)[None, :])
    return a * factor[:, None], b * factor[:, None]


@triton.jit
def _load_angles(cos, sin, key, key_valid, lane, angle_row, ROTATE: tl.constexpr):
    """Load cos and sin of a block of keys, or nothing that is read where keys are not rotated."""
    c, s = 1.0, 0.0
    if ROTATE:
        offset = key.to(tl.int64)[:, None] * angle_row + lane[None, :]
        c = tl.load(cos + offset, mask=key_valid[:, None], other=0.0)
        s = tl.load(sin + offset, mask=key_valid[:, None], other=0.0)
    return c, s


@triton.jit
def _compute_scores(qa, qb, a, b, c, s, ROTATE: tl.constexpr, NORMALISE: tl.constexpr, IEEE: tl.constexpr):
    """Multiply queries with a block of keys, normalised and rotated, both given in halves."""
    dtype = a.dtype
    if NORMALISE:
        a, b = normalise_halves(a.to(tl.float32), b.to(tl.float32))
    if ROTATE:
        a, b = _rotate(a.to(tl.float32), b.to(tl.float32), c, s)
    a, b = a.to(dtype), b.to(dtype)
    precision: tl.constexpr = "ieee" if IEEE else "tf32"
    scores = tl.dot(qa.to(dtype), tl.trans(a), input_precision=precision)
    return scores + tl.dot(qb.to(dtype), tl.trans(b), input_precision=precision)


@triton.jit
def _attend_block(
    row_max, weights, acc, qa, qb, k, v, cos, sin, shift, start, end, low0, size0, low1, row_head, lane, value_lane,
    k_head, k_key, v_head, v_key, angle_row, scale,
    HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr, ROTATE: tl.constexpr, NORMALISE: tl.constexpr,
    IEEE: tl.constexpr,
):  # fmt: skip
    """Attend to the keys [start, start + BLOCK) of a branch, counted without the gap between its two intervals.

    Query heads of all key heads are rows of one matrix, so that there is one softmax for them. Nothing here depends on
    a condition: loads in an `if` are not pipelined.
    """
    place = start + tl.arange(0, BLOCK)
    valid = place < end
    key = tl.where(place < size0, low0 + place, low1 + place - size0).to(tl.int64)
    k_pointer = k + key[:, None] * k_key + lane[None, :]
    v_pointer = v + key[:, None] * v_key + value_lane[None, :]
    c, s = _load_angles(cos, sin, key, valid, lane, angle_row, ROTATE)
    precision: tl.constexpr = "ieee" if IEEE else "tf32"
    scores = tl.full((acc.shape[0], BLOCK), float("-inf"), tl.float32)
    for head in tl.static_range(HEADS):
        a = tl.load(k_pointer + head * k_head, mask=valid[:, None], other=0.0)
        b = tl.load(k_pointer + head * k_head + HALF, mask=valid[:, None], other=0.0)
        head_scores = _compute_scores(qa, qb, a, b, c, s, ROTATE, NORMALISE, IEEE) * scale + shift[:, None]
        scores = tl.where((row_head == head)[:, None] & valid[None, :], head_scores, scores)
    new_max = tl.maximum(row_max, tl.max(scores, 1))
    anchor = tl.where(new_max == float("-inf"), 0.0, new_max)
    weight = tl.exp2(scores - anchor[:, None])
    decay = tl.exp2(row_max - anchor)[:, None]
    weights, acc = weights * decay + weight, acc * decay
    for head in tl.static_range(HEADS):
        v_block = tl.load(v_pointer + head * v_head, mask=valid[:, None], other=0.0)
        part = tl.dot(weight.to(v_block.dtype), v_block, input_precision=precision)
        acc += tl.where((row_head == head)[:, None], part, 0.0)
    return new_max, weights, acc


# lengths, numbers of heads and strides of small tables are not specialised: one kernel serves them all
@triton.jit(do_not_specialize=[
    "bounds_batch", "tau0_batch", "tau0_head", "tau1_batch", "tau1_head", "tau2_batch", "tau2_head",
    "offset0_batch", "offset0_head", "offset1_batch", "offset1_head", "offset2_batch", "offset2_head",
    "q0_row", "q1_row", "head_groups", "splits",
])  # fmt: skip
def _attend_split(
    q, k, v, out, partial_out, partial_lse, bounds, tau0, tau1, tau2, offset0, offset1, offset2,
    cos_q0, sin_q0, cos_k0, sin_k0, cos_q1, sin_q1, cos_k1, sin_k1,
    q_batch, q_head, k_batch, k_head, k_key, v_batch, v_head, v_key, bounds_batch,
    tau0_batch, tau0_head, tau1_batch, tau1_head, tau2_batch, tau2_head,
    offset0_batch, offset0_head, offset1_batch, offset1_head, offset2_batch, offset2_head,
    q0_batch, q0_row, k0_batch, k0_row, q1_batch, q1_row, k1_batch, k1_row, scale, head_groups, splits,
    GROUPS: tl.constexpr, HEADS: tl.constexpr, ROWS: tl.constexpr, HALF: tl.constexpr, VALUE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr, BRANCHES: tl.constexpr, TAU0: tl.constexpr, TAU1: tl.constexpr, TAU2: tl.constexpr,
    OFFSET0: tl.constexpr, OFFSET1: tl.constexpr, OFFSET2: tl.constexpr, NORMALISE: tl.constexpr,
    ROTATE_Q0: tl.constexpr, ROTATE_K0: tl.constexpr, ROTATE_Q1: tl.constexpr, ROTATE_K1: tl.constexpr,
    IEEE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Compute output and log-sum-exp of the queries of `HEADS` key heads over one split of the visible keys."""
    batch, first_head = (tl.program_id(0) // head_groups).to(tl.int64), tl.program_id(0) % head_groups * HEADS
    split = tl.program_id(1)
    row, lane, value_lane = tl.arange(0, ROWS), tl.arange(0, HALF), tl.arange(0, VALUE_SIZE)
    count: tl.constexpr = GROUPS * HEADS
    row_valid, row_head = row < count, row // GROUPS

    # of all branches here: between their loops every program would wait for them
    q_head_index = first_head * GROUPS + row
    factor0, shift0 = _load_factors(
        tau0, offset0, batch, q_head_index, tau0_batch, tau0_head, offset0_batch, offset0_head, row_valid, TAU0, OFFSET0
    )
    factor1, shift1 = _load_factors(
        tau1, offset1, batch, q_head_index, tau1_batch, tau1_head, offset1_batch, offset1_head, row_valid, TAU1, OFFSET1
    )
    factor2, shift2 = _load_factors(
        tau2, offset2, batch, q_head_index, tau2_batch, tau2_head, offset2_batch, offset2_head, row_valid, TAU2, OFFSET2
    )

    # visible keys: two intervals per branch, empty where low = high; a split counts them all, branch after branch
    bounds += batch * bounds_batch
    low0, low1 = tl.load(bounds), tl.load(bounds + 2)
    size0, size1 = tl.load(bounds + 1) - low0, tl.load(bounds + 3) - low1
    first_size = size0 + size1
    total = first_size
    if BRANCHES > 1:
        low2, low3 = tl.load(bounds + 4), tl.load(bounds + 6)
        size2, size3 = tl.load(bounds + 5) - low2, tl.load(bounds + 7) - low3
        second_size = size2 + size3
        total += second_size
    if BRANCHES > 2:
        low4, low5 = tl.load(bounds + 8), tl.load(bounds + 10)
        size4, size5 = tl.load(bounds + 9) - low4, tl.load(bounds + 11) - low5
        total += size4 + size5
    split_size = tl.cdiv(tl.cdiv(total, splits), BLOCK) * BLOCK
    begin = tl.minimum(split * split_size, total)
    end = tl.minimum(begin + split_size, total)

    q_pointer = q + batch * q_batch + q_head_index[:, None].to(tl.int64) * q_head + lane[None, :]
    k += batch * k_batch + first_head.to(tl.int64) * k_head
    v += batch * v_batch + first_head.to(tl.int64) * v_head
    k_head, v_head = tl.cast(k_head, tl.int64), tl.cast(v_head, tl.int64)
    scale = scale / LN2
    row_max = tl.full((ROWS,), float("-inf"), tl.float32)
    weights = tl.zeros((ROWS, BLOCK), tl.float32)  # summed over blocks, and over keys at the end
    acc = tl.zeros((ROWS, VALUE_SIZE), tl.float32)

    cos_q0, sin_q0, cos_k0, sin_k0 = (
        cos_q0 + batch * q0_batch, sin_q0 + batch * q0_batch, cos_k0 + batch * k0_batch, sin_k0 + batch * k0_batch,
    )  # fmt: skip
    qa, qb = _load_queries(q_pointer, row, factor0, cos_q0, sin_q0, lane, count, HALF, ROTATE_Q0, NORMALISE)
    stop = tl.minimum(end, first_size)
    for start in range(begin, stop, BLOCK):
        row_max, weights, acc = _attend_block(
            row_max, weights, acc, qa, qb, k, v, cos_k0, sin_k0, shift0, start, stop, low0, size0, low1, row_head, lane,
            value_lane, k_head, k_key, v_head, v_key, k0_row, scale, HEADS, HALF, BLOCK, ROTATE_K0, NORMALISE, IEEE,
        )  # fmt: skip
    if BRANCHES > 1:
        cos_q1, sin_q1, cos_k1, sin_k1 = (
            cos_q1 + batch * q1_batch, sin_q1 + batch * q1_batch, cos_k1 + batch * k1_batch, sin_k1 + batch * k1_batch,
        )  # fmt: skip
        qa, qb = _load_queries(q_pointer, row, factor1, cos_q1, sin_q1, lane, count, HALF, ROTATE_Q1, NORMALISE)
        stop = tl.minimum(end - first_size, second_size)
        for start in range(tl.maximum(begin - first_size, 0), stop, BLOCK):
            row_max, weights, acc = _attend_block(
                row_max, weights, acc, qa, qb, k, v, cos_k1, sin_k1, shift1, start, stop, low2, size2, low3, row_head,
                lane, value_lane, k_head, k_key, v_head, v_key, k1_row, scale, HEADS, HALF, BLOCK, ROTATE_K1, NORMALISE,
                IEEE,
            )  # fmt: skip
        if BRANCHES > 2:
            if TAU1 or TAU2:
                qa, qb = _load_queries(q_pointer, row, factor2, cos_q1, sin_q1, lane, count, HALF, ROTATE_Q1, NORMALISE)
            before = first_size + second_size
            stop = end - before
            for start in range(tl.maximum(begin - before, 0), stop, BLOCK):
                row_max, weights, acc = _attend_block(
                    row_max, weights, acc, qa, qb, k, v, cos_k1, sin_k1, shift2, start, stop, low4, size4, low5,
                    row_head, lane, value_lane, k_head, k_key, v_head, v_key, k1_row, scale, HEADS, HALF, BLOCK,
                    ROTATE_K1, NORMALISE, IEEE,
                )  # fmt: skip

    if OVERLAP:  # noqa: SIM102 (known to the compiler, where the number of splits is not)
        if splits > 1:  # else what follows is a kernel that may not wait
            gdc_launch_dependents()  # the merge may start, which waits for what is written here
    row_sum = tl.sum(weights, 1)
    denominator = tl.where(row_sum > 0, row_sum, 1.0)
    index = (batch * head_groups * count + q_head_index) * splits + split
    lse = tl.where(row_sum > 0, (row_max + tl.log2(denominator)) * LN2, float("-inf"))
    tl.store(partial_lse + index, lse, mask=row_valid)
    place, acc = index[:, None] * VALUE_SIZE + value_lane[None, :], acc / denominator[:, None]
    if splits == 1:
        tl.store(out + place, acc.to(out.dtype.element_ty), mask=row_valid[:, None])
    else:
        tl.store(partial_out + place, acc, mask=row_valid[:, None])
