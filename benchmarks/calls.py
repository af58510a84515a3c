"""Calls to measure, with random q, k and v, and what they are measured against."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from inputs import PLAIN, rope_for
from measure import Call, Sizes
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import isentrope as ise
from isentrope.core import switches
from isentrope.core.layout import Layout, Rows

CAUSAL = {"causal": True}
Build = Callable[["Case", "Tensors"], tuple[Call, str]]


class Shape(NamedTuple):
    """Of q, k and v."""

    batch: int
    heads: int
    key_heads: int
    queries: int
    keys: int
    head_size: int


class Tensors(NamedTuple):
    """Random q, k and v, and the gradient of the output where there is a backward."""

    q: Tensor
    k: Tensor
    v: Tensor
    out_grad: Tensor | None


@dataclass(frozen=True)
class Case:
    """One call to measure.

    Attributes:
        group, method: its name in the table.
        recipe: of the call.
        shape: of q, k and v.
        pairs: of a query and a key it sees, in all rows of one head; 0 where values decide.
        target: the ratio to its baseline that it may have at most.
        baseline: makes the call it is measured against, and says what that is.
        options: of `attention`.
        lengths: of padded rows, or of packed documents if the shape has one row.
        grad: whether the backward is measured too.
        switches: kernels that may speed it up.
        compared: whether it is measured without them too.
        equal_pairs: pairs of the baseline, where it has as many tokens in equal rows.
    """

    group: str
    method: str
    recipe: str
    shape: Shape
    pairs: int
    target: float | None
    baseline: Build
    options: dict[str, Any] = field(default_factory=lambda: CAUSAL)
    lengths: tuple[int, ...] = ()
    grad: bool = False
    switches: tuple[str, ...] = ()
    compared: bool = True
    equal_pairs: int = 0

    @property
    def packed(self) -> bool:
        return self.shape.batch == 1


def count_pairs(queries: int, keys: int, causal: bool = True, window: int | None = None, sinks: int = 0) -> int:
    """Count the pairs of a query and a key that a row leaves, the last query being at the last key."""
    if not causal:
        reach = keys - 1 if window is None else min(window, keys - 1)
        return queries * (2 * reach + 1) - reach * (reach + 1)
    if window is None:
        return queries * keys - queries * (queries - 1) // 2
    seen = min(keys, window + sinks)
    return seen * queries - seen * (seen - 1) // 2


def make_shape(size: Sizes, keys: int, queries: int | None = None) -> Shape:
    return Shape(1, size.heads, size.heads, queries or keys, keys, size.size)


def make_tensors(size: Sizes, case: Case) -> Tensors:
    generator = torch.Generator(size.device).manual_seed(0)
    options: dict[str, Any] = {"device": size.device, "dtype": size.dtype, "generator": generator}
    batch, heads, key_heads, queries, keys, d = case.shape
    shapes = ((batch, heads, queries, d), (batch, key_heads, keys, d), (batch, key_heads, keys, d))
    q, k, v = (torch.randn(shape, **options).requires_grad_(case.grad) for shape in shapes)
    out_grad = torch.randn(q.shape, **options) if case.grad else None
    if out_grad is not None and not case.packed:
        for row, n in enumerate(case.lengths):
            out_grad[row, :, n:] = 0  # nobody reads the output of padding
    return Tensors(q, k, v, out_grad)


def make_call(case: Case, tensors: Tensors, used: Iterable[str], **changed: Any) -> Call:
    """Return the call, or forward and backward, with these switches on and no others.

    The layout of padded and packed rows is made beforehand: the layers of a model share one.
    """
    q, k, v, out_grad = tensors
    options = {"recipe": case.recipe, **case.options, "layout": make_layout(case, q.device), **changed}

    def run() -> object:
        before = switches.set_switches(used)
        try:
            if out_grad is None:
                with torch.no_grad():
                    return ise.attention(q, k, v, **options)
            return torch.autograd.grad(ise.attention(q, k, v, **options), (q, k, v), out_grad)
        finally:
            switches.set_switches(before)

    return run


def make_layout(case: Case, device: torch.device) -> Layout | None:
    if not case.lengths:
        return None
    lengths = torch.tensor(case.lengths, device=device)
    documents = torch.arange(len(lengths), device=device).repeat_interleave(lengths)[None] if case.packed else None
    rows = Rows(documents=documents) if case.packed else Rows(lengths=lengths)
    layout = Layout(case.shape.batch, case.shape.queries, case.shape.keys, device, rows)
    layout.padded_queries_matter = False  # as in a model
    return layout


def rope_sdpa(size: Sizes, case: Case, tensors: Tensors) -> tuple[Call, str]:
    """RoPE by a compiled function, then SDPA on cuDNN; of a chunk with earlier keys all pairs, keys being rotated."""
    q, k, v, out_grad = tensors
    n, queries, d = case.shape.keys, case.shape.queries, case.shape.head_size
    angle = torch.arange(n, device=q.device)[:, None] * 1e4 ** (-torch.arange(0, d, 2, device=q.device) / d)
    cos, sin, turn = angle.cos(), angle.sin(), rope_for(n, case.grad, size.device)
    groups = case.shape.heads // case.shape.key_heads
    causal, cudnn = bool(case.options["causal"]) and queries == n, size.device == "cuda"
    keys, values = (x.repeat_interleave(groups, 1) if cudnn and groups > 1 else x for x in (k, v))

    def attend() -> Tensor:
        rotated = turn(q, cos[-queries:], sin[-queries:])
        rotated_keys = turn(keys, cos, sin) if queries == n else keys
        if not cudnn:
            return F.scaled_dot_product_attention(
                rotated, rotated_keys, values, is_causal=causal, enable_gqa=groups > 1
            )
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return F.scaled_dot_product_attention(rotated, rotated_keys, values, is_causal=causal)

    def run() -> object:
        if out_grad is None:
            with torch.no_grad():
                return attend()
        return torch.autograd.grad(attend(), (q, k, v), out_grad)

    return run, f"{PLAIN}{' (cudnn)' if cudnn else ''}{'' if causal else ', all pairs'}"


def rope_sdpa_by_row(size: Sizes, case: Case, tensors: Tensors) -> tuple[Call, str]:
    """RoPE and SDPA of each row or document alone, one after the other: the same pairs, nothing padded."""
    alone = [replace(case, shape=case.shape._replace(batch=1, queries=n, keys=n), lengths=()) for n in case.lengths]
    calls = [rope_sdpa(size, row, make_tensors(size, row)) for row in alone]

    def run() -> object:
        return [call() for call, _ in calls]

    return run, f"{calls[0][1]}, {len(calls)} rows"


def the_same(recipe: str, options: dict[str, Any], case: Case, tensors: Tensors) -> tuple[Call, str]:
    """The call with another recipe or option, without the case's switches."""
    used = switches.DEFAULTS - set(case.switches)
    return make_call(case, tensors, used, recipe=recipe, **options), "the same without"


def equal_rows(size: Sizes, case: Case, tensors: Tensors) -> tuple[Call, str]:
    """The same kernels on as many tokens, in rows of equal length without padding."""
    n = sum(case.lengths) // len(case.lengths)
    shape = case.shape._replace(batch=len(case.lengths), queries=n, keys=n)
    equal = replace(case, shape=shape, lengths=(), equal_pairs=0)
    used = switches.DEFAULTS | set(case.switches)
    return make_call(equal, make_tensors(size, equal), used), f"{len(case.lengths)} rows of {n}"
