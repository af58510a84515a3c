"""The tokens of padded rows as one packed row, for kernels that would compute padding like any token."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from isentrope.core.call import AttentionCall, RotatedBranch
from isentrope.core.compile import values_are_readable
from isentrope.core.layout import Layout, Rows
from isentrope.core.rotation import is_transformed

MIN_PADDING = 0.25  # of all slots; with less, a kernel for one length of rows gains more than it loses
MAX_TOKENS = 1 << 18  # whose table of blocks is squared


class Tokens(NamedTuple):
    """The slot of each token among those of all padded rows, (tokens,), and the layout of a packed row of them.

    order: the token of each slot of each row, (batch, slots); of padding, one past the last.
    """

    slot: Tensor
    order: Tensor
    layout: Layout

    def pack(self, x: Tensor) -> Tensor:
        """Return x (batch, heads, slots, …) without padding, (1, heads, tokens, …)."""
        packed: Tensor = _Pack.apply(x, self.slot, self.order)
        return packed

    def spread(self, x: Tensor, padding: float = 0.0) -> Tensor:
        """Return x (1, heads, tokens, …) with a value at padding, (batch, heads, slots, …)."""
        spread: Tensor = _Spread.apply(x, self.slot, self.order, padding)
        return spread


def find_tokens(call: AttentionCall) -> Tokens | None:
    """Return the tokens of a call with much padding that nobody reads. Waits for the device once per layout."""
    layout, q = call.layout, call.q
    if type(layout) is not Layout or not layout.padded or layout.padded_queries_matter or layout.harmless_padding:
        return None
    if layout.queries != layout.keys or not layout.implicit or not values_are_readable(q) or is_transformed():
        return None
    return layout.cached("tokens", lambda: _find_tokens(layout))


def _find_tokens(layout: Layout) -> Tokens | None:
    size = layout.batch, layout.queries
    padding, low, origin = (x.expand(size) for x in (layout.padding()[0], layout.frame_low, layout.origin))
    row, slot = (~padding).nonzero(as_tuple=True)
    if not 0 < len(row) <= min(MAX_TOKENS, (1 - MIN_PADDING) * padding.numel()):
        return None
    if bool((low != origin).any() | (layout.own_slot != layout.slots).any()):  # a cache has dropped keys
        return None
    documents = row * layout.keys + low[row, slot]
    order = row.new_full(size, len(row))
    order[row, slot] = torch.arange(len(row), device=row.device)
    packed = Layout(1, len(row), len(row), layout.device, Rows(documents=documents[None]))
    return Tokens(row * layout.keys + slot, order, packed)


def pack_call(call: AttentionCall, tokens: Tokens) -> AttentionCall:
    """Return the call as one packed row."""
    factors = (x for branch in call.branches for x in (branch.tau, branch.offset))
    learned = any(x is not None and x.requires_grad for x in (*factors, *(x for pair in call.rotations for x in pair)))
    make = partial(_pack_branches, call.branches, (call.layout.batch, call.layout.keys), tokens)
    built: tuple[list[RotatedBranch], dict[Any, Any] | None]
    built = (make(), None) if learned else call.cached("packed", lambda: (make(), {}))
    q, k, v = (tokens.pack(x) for x in (call.q, call.k, call.v))
    packed = replace(call, q=q, k=k, v=v, layout=tokens.layout, branches=built[0])
    vars(packed)["shared"] = built[1]
    return packed


def _pack_branches(branches: list[RotatedBranch], size: tuple[int, int], tokens: Tokens) -> list[RotatedBranch]:
    """Return branches, whose factors and angles may be the same for all rows or slots, as those of one packed row."""
    done: dict[int, Tensor] = {}  # branches that share angles share the packed ones too

    def pack(x: Tensor | None) -> Any:
        if x is None or x.shape[0] == x.shape[2] == 1:
            return x
        if id(x) not in done and x.shape[0] == 1 and not x.requires_grad:  # rows need no copies of it
            done[id(x)] = x[:, :, tokens.slot % size[1]]
        elif id(x) not in done:
            done[id(x)] = tokens.pack(x.expand(size[0], -1, size[1], *x.shape[3:]))
        return done[id(x)]

    return [
        replace(
            branch,
            query_angles=branch.query_angles and tuple(map(pack, branch.query_angles)),
            key_angles=branch.key_angles and tuple(map(pack, branch.key_angles)),
            tau=pack(branch.tau),
            offset=pack(branch.offset),
        )
        for branch in branches
    ]


class _Pack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, slot: Tensor, order: Tensor) -> Tensor:
        ctx.save_for_backward(slot, order)
        return _pack(x, slot)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _spread(grad, ctx.saved_tensors[1]), None, None


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, slot: Tensor, order: Tensor, padding: float) -> Tensor:
        ctx.save_for_backward(slot, order)
        return _spread(x, order, padding)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _pack(grad, ctx.saved_tensors[0]), None, None, None


# Whole vectors by one index in the first dimension: on a GPU PyTorch copies them 16 bytes at a time, and two indices or
# an assignment element by element.


def _pack(x: Tensor, slot: Tensor) -> Tensor:
    if not x.is_contiguous():  # as a model has it, query by query
        return x.transpose(1, 2).flatten(0, 1)[slot].transpose(0, 1)[None]
    heads, slots = x.shape[1:3]
    place = slot + slot // slots * ((heads - 1) * slots) + torch.arange(heads, device=x.device)[:, None] * slots
    return x.flatten(0, 2)[place.flatten()].unflatten(0, place.shape)[None]


def _spread(x: Tensor, order: Tensor, padding: float = 0.0) -> Tensor:
    """Unlike autograd's own, this adds nothing: no token is there twice."""
    tokens = x[0].transpose(0, 1)
    rows = torch.cat((tokens, tokens.new_full((1, *tokens.shape[1:]), padding)))[order.flatten()]
    return rows.unflatten(0, order.shape).transpose(1, 2)
