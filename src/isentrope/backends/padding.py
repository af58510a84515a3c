"""Put zeros into padding: a weight of 0 does not undo a NaN, and kernels multiply before they mask."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import Parameter

from isentrope.core.call import AttentionCall
from isentrope.core.compile import values_are_readable
from isentrope.core.dtypes import accumulation_dtype
from isentrope.core.layout import Layout

MAX_HARMLESS = 1e15  # entries, and norms of all: their products stay within fp32


def blank_padding(call: AttentionCall) -> AttentionCall:
    """Return a call with zeros in keys and values that no query sees, and for what is huge in padded queries.

    On a CPU the padded slots are read first, which costs less than copying all keys. Elsewhere huge queries stay: only
    what is not finite is replaced, by fewer operations.
    """
    layout = call.layout
    if not needs_zeros(layout):
        return call
    q, k, v = call.q, call.k, call.v
    if _can_inspect(q, k, v):
        queries, slots = layout.padding()
        first, last, any_query = layout.cached("padded edges", lambda: (*_find_edges(slots), bool(queries.any())))
        inside = (_is_small(x[:, :, :first]) and _is_small(x[:, :, last:]) for x in (k, v))
        k, v = (x if small else _blank(x, _spread(slots)) for x, small in zip((k, v), inside, strict=True))
        q = q if not any_query or _is_small(q) else _blank_huge(q, _spread(queries))
    else:
        q, k, v = blank_vectors(q, k, v, *get_padded_vectors(layout))
    return call if q is call.q and k is call.k and v is call.v else call.set_tensors(q, k, v)


def needs_zeros(layout: Layout) -> bool:
    """Return whether padding may hold what must not enter a product."""
    return layout.padded and not layout.harmless_padding


def get_padded_vectors(layout: Layout) -> tuple[Tensor, Tensor]:
    """Return which vectors of q, and which of k and v, are padding: (batch or 1, 1, length, 1) each."""
    return layout.cached_in_graph("padded vectors", lambda: _spread_both(layout.padding()))


def blank_vectors(q: Tensor, k: Tensor, v: Tensor, queries: Tensor, slots: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return tensors with zeros in padded keys and values, and for what is not finite in padded queries."""
    return _blank_nonfinite(q, queries), _blank(k, slots), _blank(v, slots)


def blank_queries(call: AttentionCall) -> AttentionCall:
    """Return a call with zeros for what is not finite in padded queries, where anybody reads their outputs."""
    layout, q = call.layout, call.q
    if not needs_zeros(layout) or not layout.padded_queries_matter:
        return call
    if _can_inspect(q) and _is_small(q):
        return call
    return call.set_tensors(_blank_nonfinite(q, _spread(layout.padding()[0])), call.k, call.v)


def _spread(padding: Tensor) -> Tensor:
    """Return a boolean of each slot (batch or 1, length) as one of each vector."""
    return padding[:, None, :, None]


def _spread_both(paddings: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return _spread(paddings[0]), _spread(paddings[1])


def _blank(x: Tensor, slots: Tensor) -> Tensor:
    return x.masked_fill(slots, 0)


def _blank_nonfinite(q: Tensor, queries: Tensor) -> Tensor:
    return torch.where(queries, q.nan_to_num(0.0, 0.0, 0.0), q)


def _blank_huge(q: Tensor, queries: Tensor) -> Tensor:
    """Return q with zeros in padded queries for what is not finite, or so large that their gradients would not be."""
    return q.masked_fill(queries & ~(q.detach().abs() < MAX_HARMLESS), 0)


def _can_inspect(*tensors: Tensor) -> bool:
    """Return whether values may be read without waiting for a device: not in a graph, nor under torch.func."""
    return torch._C._functorch.peek_interpreter_stack() is None and all(
        x.device.type == "cpu" and type(x) in (Tensor, Parameter) and values_are_readable(x) for x in tensors
    )


def _find_edges(slots: Tensor) -> tuple[int, int]:
    """Return two slots: those before the first, and from the second on, are padding in some row."""
    inside = (~slots).all(0).nonzero()
    return (int(inside[0]), int(inside[-1]) + 1) if len(inside) else (slots.shape[1], slots.shape[1])


def _is_small(x: Tensor) -> bool:
    """Return whether all entries are finite, and so small that their products are finite too."""
    return x.numel() == 0 or bool(torch.linalg.vector_norm(x.detach(), dtype=accumulation_dtype(x)) < MAX_HARMLESS)
