"""The launch of the band's kernel for Hopper. Imported only where Triton is installed."""

# mypy: ignore-errors
from __future__ import annotations

from collections.abc import Sequence
from math import log

import torch
from torch import Tensor

from isentrope.backends.band.copy_engine import describe_blocks
from isentrope.backends.band.hopper_kernel import CACHED_BYTES, Q_STAGES, STAGES, _attend_spans
from isentrope.backends.band.hopper_tile_kernel import COLUMNS, ROWS
from isentrope.backends.band.intervals import Attended
from isentrope.backends.band.key_span import MAX_SPANS, TILE_QUERIES, KeySpan
from isentrope.core.compile import count_multiprocessors
from isentrope.core.launching import RepeatedLaunch
from isentrope.core.rotation_kernel import broadcast_strides, list_strides


class SpanLaunch:
    """Attention over all spans, which share no key, with queries aligned with the last keys.

    All but the addresses of queries, keys, values and what is written is worked out here; it holds none of these.

    Args:
        spans: one to three; either all have intervals or none, and their queries the same strides.
        v: values.
        scale: positive factor of the scores.
        normalise: whether to divide queries by their lengths.
        padded: whether keys and values that no query sees may be anything, NaN too.
        need_entropy: whether to compute that of each query's weights.
    """

    def __init__(
        self, spans: list[KeySpan], v: Tensor, scale: float, normalise: bool, padded: bool, need_entropy: bool
    ) -> None:
        q, k = spans[0].q, spans[0].k
        batch, heads, queries, size = self.shape = q.shape
        kv_heads, keys = k.shape[1:3]
        # as queries, so that neither a model nor a backward that reads both copies it
        self.order = torch.empty_like(q, device="meta").stride()
        self.unused_spans, self.need_entropy = MAX_SPANS - len(spans), need_entropy
        tiles = -(-queries // TILE_QUERIES) * heads * batch
        nearby = max(1, CACHED_BYTES // ((1 + len(spans)) * keys * size * k.element_size())) * (heads // kv_heads)
        given = spans + [spans[0]] * self.unused_spans
        flags = {
            "ROTATE": sum((x.angles is not None) << n for n, x in enumerate(spans)),
            "UNIFORM": sum(bool(x.angles and x.angles[0].shape[2] == 1) << n for n, x in enumerate(spans)),
            "TAU": sum((x.tau is not None) << n for n, x in enumerate(spans)),
            "OFFSET": sum((x.offset is not None) << n for n, x in enumerate(spans)),
        }
        intervals = spans[0].interval is not None
        unused = q.new_empty(1, dtype=torch.float32)
        tensors = (
            *(x.angles[0] if x.angles else unused for x in given),
            *(x.angles[1] if x.angles else unused for x in given),
            *(unused if x.tau is None else x.tau for x in given),
            *(unused if x.offset is None else x.offset for x in given),
            *(x.interval[0] if intervals else unused for x in given),
            *(x.interval[1] if intervals else unused for x in given),
        )
        numbers = [*list_strides(q), *self._list_out_strides()]
        for x in given:
            numbers += [*broadcast_strides(x.angles and x.angles[0], 0, 2), *broadcast_strides(x.tau, 0, 1, 2),
                        *broadcast_strides(x.offset, 0, 1, 2), x.left, x.right]  # fmt: skip
        numbers += broadcast_strides(spans[0].interval and spans[0].interval[0], 0)
        numbers += [heads, heads * batch, queries, keys, tiles, nearby, scale / log(2)]
        constants = {
            "SPANS": len(spans), "GROUPS": heads // kv_heads, "SIZE": size, "STAGES": STAGES[size],
            "Q_STAGES": Q_STAGES, **flags, "NORMALISE": normalise, "INTERVALS": intervals,
            "FOLDED": any(x.q is not q for x in spans), "ENTROPY": need_entropy, "PADDED": padded,
        }  # fmt: skip
        grid = min(tiles, count_multiprocessors(q.device)), 1, 1
        options = {"num_warps": ROWS.value // 16}
        self._attend = RepeatedLaunch(_attend_spans, grid, tensors, tuple(numbers), constants, options)

    def _list_out_strides(self) -> list[int]:
        return [0 if self.shape[0] == 1 else self.order[0], *self.order[1:3]]

    def run(self, queries: Sequence[Tensor], keys: Sequence[Tensor], v: Tensor) -> Attended:
        """Attend with the queries and the keys of each span; their device is the current one.

        Returns:
            Output (batch, heads, queries, d), log-sum-exp and entropy (batch, heads, queries) or None; zeros and -inf
            without keys. Rounding may leave an entropy below 0.
        """
        q = queries[0]
        out = q.new_empty_strided(self.shape, self.order)
        lse = q.new_empty(self.shape[:3], dtype=torch.float32)
        entropy = q.new_empty(self.shape[:3], dtype=torch.float32) if self.need_entropy else None
        if self.shape[0] == 0:
            return Attended(out, lse, entropy)
        taken = torch.zeros(1, dtype=torch.int32, device=q.device)  # tiles after each program's first
        blocks = [describe_blocks(x, COLUMNS.value, swizzled=True) for x in keys]
        blocks += blocks[:1] * self.unused_spans
        blocks.append(describe_blocks(v, COLUMNS.value, swizzled=True))
        inputs = *queries, *queries[:1] * self.unused_spans
        results = out, lse, lse if entropy is None else entropy, taken
        first, last = [x.data_ptr() for x in inputs], [x.data_ptr() for x in results]
        self._attend.run((*first, *blocks, *last), lambda: (*inputs, *blocks, *results), (*first, *last))
        return Attended(out, lse, entropy)
