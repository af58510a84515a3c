"""The Triton kernels of one query a row that chooses blocks of far keys: one scores and chooses, one attends.

Keys are read where they lie in a cache of raw keys, and rotated in registers. In each kernel the program that ends last
takes up what the others have written: it chooses the blocks, or merges partial outputs, so that a call is two
launches. Imported only where Triton is installed.
"""

# mypy: ignore-errors
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from isentrope.backends.blocks.one_query import OneQueryPlan
from isentrope.backends.decode.kernel import _compute_scores, _load_angles, _load_queries
from isentrope.core.compile import device_context
from isentrope.core.launching import RepeatedLaunch
from isentrope.core.rotation_kernel import list_strides
from isentrope.core.tile_shapes import is_server_card

MIN_TILE_KEYS, MAX_TILE_KEYS = 16, 64  # tensor cores take no fewer
MAX_TILE_BYTES = 32 << 10  # of keys; consumer GPUs have little shared memory
MAX_POINTER_TILE_BYTES = 8 << 10  # the same on other cards than servers', where registers would spill
TARGET_PROGRAMS = 264  # two for each multiprocessor of the largest GPUs
SPLIT_KEYS = 128  # that a program attends to, where so many programs fit
SEARCH_STEPS = tl.constexpr(31)  # bits of a float that is not negative


class OneQueryLaunch:
    """Attention of one query per row over near keys and the far blocks that it chooses: all but q, k and v.

    Args:
        q: (batch, heads, 1, d), laid out like those of every run, as are k and v.
        k: raw keys, (batch, kv_heads, keys, d).
        v: (batch, kv_heads, keys, dv).
        scale: factor of the scores.
        plan: what does not depend on the values of q, k and v.
    """

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, scale: float, plan: OneQueryPlan) -> None:
        batch, heads, _, size = q.shape
        kv_heads, keys, value_size = k.shape[1], k.shape[2], v.shape[-1]
        choice, near, far = plan.choice, plan.near, plan.far
        rows, pairs = batch * heads, batch * kv_heads
        programs = max(1, TARGET_PROGRAMS // pairs)
        per_program = -(-plan.candidates // programs)
        seen = (choice.blocks + choice.first_block) * choice.size + keys - plan.tail
        splits = min(programs, -(-seen // SPLIT_KEYS))
        splits = 1 << (splits.bit_length() - 1)
        # one allocation for block scores, partial log-sum-exps and outputs, and log-sum-exps where none are wanted;
        # another for two counters and the blocks
        lse_start = -(-rows * plan.candidates // 16) * 16
        out_start = lse_start + -(-rows * splits // 16) * 16
        self.lse_place = out_start + -(-rows * splits * value_size // 16) * 16
        self.floats = self.lse_place + rows
        self.integers = 2 * pairs + (batch if plan.joint else pairs) * choice.blocks
        most = MAX_TILE_BYTES if is_server_card(q) else MAX_POINTER_TILE_BYTES
        tile = max(MIN_TILE_KEYS, min(MAX_TILE_KEYS, most // (size * q.element_size())))
        strides = *list_strides(q)[:2], *list_strides(k)
        shared = {
            "GROUPS": heads // kv_heads, "ROWS": plan.padded_groups, "HALF": size // 2,
            "CHOICES": choice.blocks, "BLOCK_SIZE": choice.size, "JOINT": plan.joint, "NORMALISE": plan.normalise,
            "IEEE": q.dtype == torch.float32,
        }  # fmt: skip
        self._score = RepeatedLaunch(
            _score_and_choose,
            (pairs, -(-plan.candidates // per_program), 1),
            (*far.tables, far.tau),
            (*strides, far.tau_head, far.key_row, plan.candidates, choice.first_block, per_program, kv_heads,
             float(scale)),
            {
                **shared, "TILE": min(tile, plan.padded_block), "PADDED": plan.padded_candidates,
                "TAU": far.has_tau, "ROTATE_Q": far.rotates_queries, "ROTATE_K": far.rotates_keys,
            },
        )  # fmt: skip
        self._attend = RepeatedLaunch(
            _attend_chosen,
            (pairs, splits, 1),
            (*near.tables, *far.tables, near.tau, far.tau, near.offset, far.offset),
            (
                *strides, *list_strides(v), near.tau_head, far.tau_head, near.offset_head, far.offset_head,
                near.key_row, far.key_row, keys, plan.window, plan.tail, lse_start, out_start, kv_heads, float(scale),
            ),
            {
                **shared, "FIRST_KEYS": choice.first_block * choice.size, "VALUE_SIZE": value_size, "TILE": tile,
                "SPLITS": splits, "NEAR_TAU": near.has_tau, "FAR_TAU": far.has_tau, "NEAR_OFFSET": near.has_offset,
                "FAR_OFFSET": far.has_offset, "ROTATE_NEAR_Q": near.rotates_queries,
                "ROTATE_NEAR_K": near.rotates_keys, "ROTATE_FAR_Q": far.rotates_queries,
                "ROTATE_FAR_K": far.rotates_keys,
            },
        )  # fmt: skip

    def run(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor | None = None) -> None:
        """Write the output, in memory (batch, heads, 1, dv), and the log-sum-exp, where one is given."""
        scratch = q.new_empty(self.floats, dtype=torch.float32)
        integers = q.new_zeros(self.integers, dtype=torch.int32)
        floats = scratch.data_ptr()
        lses = floats + scratch.element_size() * self.lse_place if lse is None else lse.data_ptr()
        counters = integers.data_ptr()
        with device_context(q):
            self._score.run((q.data_ptr(), k.data_ptr(), floats, counters), lambda: (q, k, scratch, integers))
            self._attend.run(
                (q.data_ptr(), k.data_ptr(), v.data_ptr(), floats, counters, out.data_ptr(), lses),
                lambda: (q, k, v, scratch, integers, out, scratch[self.lse_place :] if lse is None else lse),
            )


@triton.jit
def _load_head_values(x, head, x_head, row, GROUPS: tl.constexpr):
    """Load a value for each query head of one key head, (heads or 1)."""
    return tl.load(x + head * x_head, mask=row < GROUPS, other=0.0).to(tl.float32)


@triton.jit
def _count_finished(counter):
    """Return how many programs ended before; the last one sees all that they wrote."""
    tl.debug_barrier()
    return tl.atomic_add(counter, 1, sem="acq_rel")


@triton.jit
def _choose_largest(share, lane, candidates, first_block, index, CHOICES: tl.constexpr):
    """Write the places of the largest shares in ascending order; of equal ones, the first."""
    # bits of floats that are not negative are ordered like them
    bits = tl.where(lane < candidates, share.to(tl.int32, bitcast=True), -1)
    low, high = tl.min(bits, 0) * 0, tl.max(bits, 0) + 1
    for _ in range(SEARCH_STEPS):  # the largest threshold that enough shares reach
        middle = low + (high - low) // 2
        enough = tl.sum((bits >= middle).to(tl.int32), 0) >= CHOICES
        low, high = tl.where(enough, middle, low), tl.where(enough, high, middle)
    above, equal = bits > low, bits == low
    missing = CHOICES - tl.sum(above.to(tl.int32), 0)
    taken = above | (equal & (tl.cumsum(equal.to(tl.int32), 0) <= missing))
    place = tl.cumsum(taken.to(tl.int32), 0) - 1
    tl.store(index + place, lane + first_block, mask=taken)


@triton.jit(do_not_specialize=["candidates", "per_program", "kv_heads"])
def _score_and_choose(
    q, k, best, integers, cos_q, sin_q, cos_k, sin_k, tau, q_batch, q_head, k_batch, k_head, k_key, tau_head, angle_row,
    candidates, first_block, per_program, kv_heads, scale,
    GROUPS: tl.constexpr, ROWS: tl.constexpr, HALF: tl.constexpr, CHOICES: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, JOINT: tl.constexpr, NORMALISE: tl.constexpr, IEEE: tl.constexpr, TILE: tl.constexpr,
    PADDED: tl.constexpr, TAU: tl.constexpr, ROTATE_Q: tl.constexpr, ROTATE_K: tl.constexpr,
):  # fmt: skip
    """Score a few blocks for the query heads of one key head; the last program chooses for all of them."""
    pair = tl.program_id(0)
    batch, kv_head = (pair // kv_heads).to(tl.int64), pair % kv_heads
    row, lane = tl.arange(0, ROWS), tl.arange(0, HALF)
    head = kv_head * GROUPS + row
    factor = tl.full((ROWS,), 1.0, tl.float32)
    if TAU:
        factor = _load_head_values(tau, head, tau_head, row, GROUPS)
    q_pointer = q + batch * q_batch + head[:, None].to(tl.int64) * q_head + lane[None, :]
    qa, qb = _load_queries(q_pointer, row, factor, cos_q, sin_q, lane, GROUPS, HALF, ROTATE_Q, NORMALISE)
    keys = k + batch * k_batch + kv_head.to(tl.int64) * k_head
    best_row = best + (batch * kv_heads * GROUPS + head) * candidates
    first = tl.program_id(1) * per_program
    for block in range(first, tl.minimum(first + per_program, candidates)):
        top = tl.full((ROWS,), float("-inf"), tl.float32)
        for start in range(0, BLOCK_SIZE, TILE):
            within = start + tl.arange(0, TILE)
            inside = within < BLOCK_SIZE
            key = (first_block + block) * BLOCK_SIZE + within
            offset = key.to(tl.int64)[:, None] * k_key + lane[None, :]
            a = tl.load(keys + offset, mask=inside[:, None], other=0.0)
            b = tl.load(keys + offset + HALF, mask=inside[:, None], other=0.0)
            c, s = _load_angles(cos_k, sin_k, key, inside, lane, angle_row, ROTATE_K)
            scores = _compute_scores(qa, qb, a, b, c, s, ROTATE_K, NORMALISE, IEEE)
            top = tl.maximum(top, tl.max(tl.where(inside[None, :], scores, float("-inf")), 1))
        tl.store(best_row + block, top, mask=row < GROUPS)

    # heads that choose together, and the programs that score for them
    together = pair // kv_heads if JOINT else pair
    heads = kv_heads * GROUPS if JOINT else GROUPS
    programs = tl.num_programs(1) * (kv_heads if JOINT else 1)
    if _count_finished(integers + together) == programs - 1:
        place = tl.arange(0, PADDED)
        share = tl.zeros((PADDED,), tl.float32)
        for member in range(heads):
            block_scores = best + (together * heads + member).to(tl.int64) * candidates + place
            r = tl.load(block_scores, mask=place < candidates, other=float("-inf"), cache_modifier=".cg") * scale
            weight = tl.exp(r - tl.max(r, 0))
            share += weight / tl.sum(weight, 0)
        pairs = tl.num_programs(0)
        index = integers + 2 * pairs + together * CHOICES
        _choose_largest(share / heads, place, candidates, first_block, index, CHOICES)


@triton.jit(do_not_specialize=["keys", "tail", "lse_start", "out_start", "kv_heads"])
def _attend_chosen(
    q, k, v, scratch, integers, out, lse, cos_q0, sin_q0, cos_k0, sin_k0, cos_q1, sin_q1, cos_k1, sin_k1,
    tau0, tau1, offset0, offset1, q_batch, q_head, k_batch, k_head, k_key, v_batch, v_head, v_key,
    tau0_head, tau1_head, offset0_head, offset1_head, angle0_row, angle1_row,
    keys, window, tail, lse_start, out_start, kv_heads, scale,
    GROUPS: tl.constexpr, ROWS: tl.constexpr, HALF: tl.constexpr, CHOICES: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, JOINT: tl.constexpr, NORMALISE: tl.constexpr, IEEE: tl.constexpr,
    FIRST_KEYS: tl.constexpr, VALUE_SIZE: tl.constexpr, TILE: tl.constexpr, SPLITS: tl.constexpr,
    NEAR_TAU: tl.constexpr, FAR_TAU: tl.constexpr, NEAR_OFFSET: tl.constexpr, FAR_OFFSET: tl.constexpr,
    ROTATE_NEAR_Q: tl.constexpr, ROTATE_NEAR_K: tl.constexpr, ROTATE_FAR_Q: tl.constexpr, ROTATE_FAR_K: tl.constexpr,
):  # fmt: skip
    """Attend to one split of the keys that are seen: chosen blocks, first keys, and all from `tail` on."""
    pair, split = tl.program_id(0), tl.program_id(1)
    batch, kv_head = (pair // kv_heads).to(tl.int64), pair % kv_heads
    row, lane, value_lane = tl.arange(0, ROWS), tl.arange(0, HALF), tl.arange(0, VALUE_SIZE)
    head = kv_head * GROUPS + row
    one = tl.full((ROWS,), 1.0, tl.float32)
    factor0, factor1, shift0, shift1 = one, one, one * 0, one * 0
    if NEAR_TAU:
        factor0 = _load_head_values(tau0, head, tau0_head, row, GROUPS)
    if FAR_TAU:
        factor1 = _load_head_values(tau1, head, tau1_head, row, GROUPS)
    if NEAR_OFFSET:
        shift0 = _load_head_values(offset0, head, offset0_head, row, GROUPS)
    if FAR_OFFSET:
        shift1 = _load_head_values(offset1, head, offset1_head, row, GROUPS)
    q_pointer = q + batch * q_batch + head[:, None].to(tl.int64) * q_head + lane[None, :]
    qa0, qb0 = _load_queries(q_pointer, row, factor0, cos_q0, sin_q0, lane, GROUPS, HALF, ROTATE_NEAR_Q, NORMALISE)
    qa1, qb1 = _load_queries(q_pointer, row, factor1, cos_q1, sin_q1, lane, GROUPS, HALF, ROTATE_FAR_Q, NORMALISE)
    k += batch * k_batch + kv_head.to(tl.int64) * k_head
    v += batch * v_batch + kv_head.to(tl.int64) * v_head
    pairs = tl.num_programs(0)
    index = integers + 2 * pairs + (pair // kv_heads if JOINT else pair) * CHOICES

    # keys that are seen, counted without gaps; the last `window` are near
    chosen_keys: tl.constexpr = CHOICES * BLOCK_SIZE
    seen = chosen_keys + FIRST_KEYS + keys - tail
    near_start = seen - window
    split_size = tl.cdiv(tl.cdiv(seen, SPLITS), TILE) * TILE
    begin = split * split_size
    end = tl.minimum(begin + split_size, seen)
    precision: tl.constexpr = "ieee" if IEEE else "tf32"
    row_max = tl.full((ROWS,), float("-inf"), tl.float32)
    row_sum = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, VALUE_SIZE), tl.float32)
    for start in range(begin, end, TILE):
        place = start + tl.arange(0, TILE)
        valid = place < end
        is_chosen = place < chosen_keys
        block = tl.load(index + place // BLOCK_SIZE, mask=is_chosen, other=0)
        rest = place - chosen_keys
        key = tl.where(rest < FIRST_KEYS, rest, rest - FIRST_KEYS + tail)
        key = tl.where(is_chosen, block * BLOCK_SIZE + place % BLOCK_SIZE, key)
        offset = key.to(tl.int64)[:, None] * k_key + lane[None, :]
        a = tl.load(k + offset, mask=valid[:, None], other=0.0)
        b = tl.load(k + offset + HALF, mask=valid[:, None], other=0.0)
        v_pointer = v + key.to(tl.int64)[:, None] * v_key + value_lane[None, :]
        v_block = tl.load(v_pointer, mask=valid[:, None], other=0.0)
        scores = tl.full((ROWS, TILE), float("-inf"), tl.float32)
        if start < near_start:
            c, s = _load_angles(cos_k1, sin_k1, key, valid, lane, angle1_row, ROTATE_FAR_K)
            far_scores = _compute_scores(qa1, qb1, a, b, c, s, ROTATE_FAR_K, NORMALISE, IEEE)
            is_far = valid & (place < near_start)
            scores = tl.where(is_far[None, :], far_scores * scale + shift1[:, None], scores)
        if start + TILE > near_start:
            c, s = _load_angles(cos_k0, sin_k0, key, valid, lane, angle0_row, ROTATE_NEAR_K)
            near_scores = _compute_scores(qa0, qb0, a, b, c, s, ROTATE_NEAR_K, NORMALISE, IEEE)
            is_near = valid & (place >= near_start)
            scores = tl.where(is_near[None, :], near_scores * scale + shift0[:, None], scores)
        new_max = tl.maximum(row_max, tl.max(scores, 1))  # finite: every tile has a key that is seen
        weight = tl.exp(scores - new_max[:, None])
        decay = tl.exp(row_max - new_max)
        acc = acc * decay[:, None] + tl.dot(weight.to(v_block.dtype), v_block, input_precision=precision)
        row_sum = row_sum * decay + tl.sum(weight, 1)
        row_max = new_max

    partial_lse, partial_out = scratch + lse_start, scratch + out_start
    split_valid = row_sum > 0  # there may be fewer keys than splits
    denominator = tl.where(split_valid, row_sum, 1.0)
    place = (batch * kv_heads * GROUPS + head) * SPLITS + split
    split_lse = tl.where(split_valid, row_max + tl.log(denominator), float("-inf"))
    tl.store(partial_lse + place, split_lse, mask=row < GROUPS)
    out_pointer = partial_out + place[:, None] * VALUE_SIZE + value_lane[None, :]
    tl.store(out_pointer, acc / denominator[:, None], mask=(row < GROUPS)[:, None])
    if _count_finished(integers + pairs + pair) == SPLITS - 1:
        for member in range(GROUPS):
            one_head = pair.to(tl.int64) * GROUPS + member
            part = one_head * SPLITS + tl.arange(0, SPLITS)
            part_lse = tl.load(partial_lse + part, cache_modifier=".cg")
            top = tl.max(part_lse, 0)
            part_weight = tl.exp(part_lse - top)
            total = tl.sum(part_weight, 0)
            outputs = tl.load(partial_out + part[:, None] * VALUE_SIZE + value_lane[None, :], cache_modifier=".cg")
            merged = tl.sum(outputs * part_weight[:, None], 0) / total
            tl.store(out + one_head * VALUE_SIZE + value_lane, merged.to(out.dtype.element_ty))
            tl.store(lse + one_head, top + tl.log(total))
