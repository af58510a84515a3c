"""FlexAttention: block-sparse fused attention, compiled once for all recipes and lengths.

The mask is two small tensors, the visible intervals of each query, so a new recipe or length is new data and not new
code. Block masks are written from the intervals directly; nothing of size n × n is ever allocated.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as flex_module
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from isentrope.backends.merge import PartialOutput, add_offset, merge
from isentrope.backends.protocol import Backend
from isentrope.core.caching import MAX_COMPILED_FUNCTIONS, bounded_cache
from isentrope.core.call import AttentionCall, DistanceLaw, FoldedBranch
from isentrope.core.compile import copy_function, maybe_compile
from isentrope.core.dtypes import accumulation_dtype

BLOCK = 128  # tokens
# one kernel for all lengths: the decoding kernel does not take every shape
OPTIONS: Any = {"BACKEND": "TRITON"}
# on a CPU FlexAttention exists only as a dense check of itself
MAX_CPU_TOKENS = 4096
_lock = Lock()


class FlexBackend(Backend):
    """Branches through FlexAttention, merged by autograd's own operations."""

    name = "flex"
    computes_padding = True

    def refusal(self, call: AttentionCall) -> str | None:
        q, v = call.q, call.v
        if q.is_cuda:
            if q.dtype == torch.float64:
                return "it does not take float64; use 'chunked'"
            if min(q.shape[-1], v.shape[-1]) < 16 or max(q.shape[-1], v.shape[-1]) > 256:
                return f"it takes head sizes from 16 to 256, got {q.shape[-1]} and {v.shape[-1]}; use 'chunked'"
            return None
        if call.needs_grad:
            return "it has no backward on a CPU; use 'sdpa' or 'chunked'"
        if max(q.shape[2], v.shape[2]) > MAX_CPU_TOKENS:
            sizes = f"{q.shape[2]} × {v.shape[2]}"
            return f"on a CPU it is dense, a check for up to {MAX_CPU_TOKENS} tokens, got {sizes}; use 'sdpa'"
        return None

    def forward(self, call: AttentionCall, need_lse: bool) -> tuple[Tensor, Tensor]:
        parts = [add_offset(PartialOutput(*_forward_branch(branch)), branch.offset) for branch in call.fold()]
        return merge(parts, call.q.shape[2])


def _forward_branch(branch: FoldedBranch) -> tuple[Tensor, Tensor]:
    block_mask, spans = _get_block_mask(branch)
    score_mod = _make_score_mod(branch) if branch.biased else None
    tensors, grouped = (branch.q, branch.k, branch.v), branch.groups > 1
    if branch.q.is_cuda:
        # heads, their sizes and the scale are constants of the kernel
        biases = branch.slopes is None, branch.distance_law
        constants = (*branch.q.shape[1::2], *branch.v.shape[1::2], branch.scale, spans, *biases)
        kernel = maybe_compile(_get_run(branch.distance_law), (*tensors, block_mask.kv_indices), *constants)
    else:
        kernel = _run_eagerly
    return kernel(*tensors, score_mod, block_mask, branch.scale, grouped)


def _run(
    q: Tensor, k: Tensor, v: Tensor, score_mod: Any, block_mask: BlockMask, scale: float, grouped: bool
) -> tuple[Tensor, Tensor]:
    out, aux = flex_attention(
        q, k, v, score_mod=score_mod, block_mask=block_mask, scale=scale, enable_gqa=grouped,
        return_aux=AuxRequest(lse=True), kernel_options=OPTIONS,
    )  # fmt: skip
    assert aux.lse is not None
    return out, aux.lse


@bounded_cache(MAX_COMPILED_FUNCTIONS, compiled=True)
def _get_run(law: DistanceLaw | None) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return `_run` with a name for each law.

    By the name of a function torch remembers which numbers have changed, and makes them arguments from then on; the
    kernel cannot be generated with an argument that `score_mod` captures, so the numbers of a law must not change.
    """
    return _run if law is None else copy_function(_run, f"{_run.__name__} by {law}")


def _run_eagerly(*args: Any) -> tuple[Tensor, Tensor]:
    """Run FlexAttention's own dense formula; it would otherwise trace every shape anew, until torch gives up."""
    args = tuple(x.detach() if isinstance(x, Tensor) else x for x in args)  # it refuses tensors that require gradients
    with _lock:
        before = flex_module._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG
        flex_module._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = True
        try:
            return _run(*args)
        finally:
            flex_module._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = before


def _make_score_mod(branch: FoldedBranch) -> Callable[..., Tensor]:
    dtype, law = accumulation_dtype(branch.q), branch.distance_law
    slopes = None if branch.slopes is None else branch.slopes.to(dtype)
    batch = branch.q.shape[0]
    query = branch.layout.query.to(torch.int32).expand(batch, -1).contiguous()
    key = branch.layout.key.to(torch.int32).expand(batch, -1).contiguous()

    def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        distance = (query[b, i] - key[b, j]).abs()
        if law is not None:
            factor, bias = law.by_distance(distance.to(dtype))
            score = score * factor + bias
        return score if slopes is None else score - slopes[h] * distance

    return score_mod


def _make_mask_mod(low: Tensor, high: Tensor) -> Callable[..., Tensor]:
    spans = low.shape[-1]

    def mask_mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        seen = (j >= low[b, i, 0]) & (j < high[b, i, 0])
        for s in range(1, spans):
            seen = seen | ((j >= low[b, i, s]) & (j < high[b, i, s]))
        return seen

    return mask_mod


def _get_block_mask(branch: FoldedBranch) -> tuple[BlockMask, int]:
    """Return the mask and its intervals a query, made once for the layers of a pass."""
    if branch.traced is not None:
        return branch.cached_in_graph("block mask", lambda: _make_block_mask(branch))
    return branch.layout.cached(("block mask", branch.region), lambda: _make_block_mask(branch))


def _make_block_mask(branch: FoldedBranch) -> tuple[BlockMask, int]:
    """Return the mask, from intervals alone: which blocks each row of blocks visits, and which need no mask."""
    low, high = branch.bounds
    batch, queries, keys = branch.layout.batch, branch.layout.queries, branch.layout.keys
    # rows past the end repeat the last: a block that reaches over it reads something harmless
    spare = -queries % BLOCK
    low, high = (torch.cat((x, x[:, -1:].expand(-1, spare, -1)), 1) for x in (low, high))
    low, high = (x.to(torch.int32).expand(batch, -1, -1).contiguous() for x in (low, high))
    first = torch.arange(0, keys, BLOCK, device=low.device)
    low_rows, high_rows = (x.unflatten(1, (-1, BLOCK))[..., None] for x in (low, high))
    # (batch, query blocks, rows, spans, key blocks) is never formed: extremes over rows come first
    seen = low_rows < high_rows
    union_low = torch.where(seen, low_rows, keys).amin(2)
    union_high = torch.where(seen, high_rows, 0).amax(2)
    touched = ((union_low < first + BLOCK) & (union_high > first)).any(2)
    full = ((low_rows.amax(2) <= first) & (high_rows.amin(2) >= first + BLOCK)).any(2)
    partial = touched & ~full
    block_mask = BlockMask.from_kv_blocks(
        *_order_blocks(partial),
        *_order_blocks(full),
        BLOCK_SIZE=BLOCK,
        mask_mod=_make_mask_mod(low, high),
        seq_lengths=(queries, keys),
    )
    return block_mask, low.shape[-1]


def _order_blocks(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return how many blocks each row of blocks visits, and the blocks with those first."""
    blocks = blocks[:, None].to(torch.int32)
    return blocks.sum(-1, dtype=torch.int32), blocks.argsort(dim=-1, descending=True, stable=True).to(torch.int32)
