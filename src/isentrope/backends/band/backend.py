"""Windows, and whatever else whole rows see: a Triton kernel for the band around the diagonal.

It turns and heats queries in registers, takes first keys in on the way, and merges far keys, which are a triangle and
PyTorch's fastest kernel has, into its output. Keys are folded beforehand: many blocks of queries read each. Gradients
are those of PyTorch's kernels, from its output and log-sum-exp.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf
from typing import NamedTuple

import torch
from torch import Tensor

from isentrope.backends import merge, sdpa
from isentrope.backends.sdpa import SDPA
from isentrope.core.call import AttentionCall, FoldedBranch
from isentrope.core.compile import cuda_capability_major
from isentrope.core.region import Region, Span

MOST_SINKS = 64
HOPPER = 9


class Cut(NamedTuple):
    """Which meetings see what: within `left` and `right` of the diagonal, the first keys, and a span of far ones."""

    near: int
    left: int
    right: int
    sink: int | None = None
    sinks: int = 0
    far: int | None = None
    span: Span = Span()


def refusal(asked: AttentionCall) -> str | None:
    if torch.compiler.is_compiling():
        return "it is not for graphs, which make kernels of their own"
    if asked.q.dtype not in (torch.float16, torch.bfloat16 if asked.q.is_cuda else torch.float32):
        return f"it takes half precision, got {asked.q.dtype}"  # the interpreter has other halves
    if asked.q.is_cuda and (torch.version.hip is not None or cuda_capability_major(asked.q.device) < HOPPER):
        return "it lives on the copy engine that NVIDIA's cards have since Hopper"
    if (why := asked.refusal()) is not None:
        return why
    if (cut := _cut(asked)) is None:
        return "it takes whole rows that see a window, first keys and a triangle of far ones"
    if asked.differentiated and (cut.far is None or cut.sinks):
        return "it has no backward but of a window with a triangle of far keys"
    return None


def alone(asked: AttentionCall) -> bool:
    """Whether the kernel takes it and has all of it, so that nothing is held besides but keys."""
    return refusal(asked) is None and (cut := _cut(asked)) is not None and cut.far is None


def attend(asked: AttentionCall) -> tuple[Tensor, Tensor]:
    """Output (batch, heads, queries, dv) and log-sum-exp (batch, heads, queries)."""
    from isentrope.backends.band.kernel import launch

    if asked.differentiated:
        return merge.attend(KERNEL, asked.folded())
    cut = _cut(asked)
    assert cut is not None
    near = asked.branches[cut.near]
    k = asked.keys(near)
    sink = near if cut.sink is None else asked.branches[cut.sink]
    sink_keys = k if sink is near else asked.keys(sink, cut.sinks)
    far = None
    if cut.far is not None:
        at = replace(asked.branches[cut.far], region=Region((cut.span,)))
        far = sdpa.KERNEL.forward(asked.call(at))
    return launch(
        asked.q, k, asked.v, cut.left, cut.right, near.query, asked.tau, asked.scale, asked.normalise,
        cut.sinks, sink_keys, sink.query, far,
    )  # fmt: skip


class Band(SDPA):
    """Branches folded already, a window and a triangle of far keys, and their backward."""

    def together(self, calls: list[FoldedBranch]) -> tuple[Tensor, Tensor]:
        from isentrope.backends.band.kernel import launch

        layout = calls[0].layout
        cut = cut_up([call.region for call in calls], layout.queries, layout.keys)
        assert cut is not None and cut.far is not None and not cut.sinks
        near, far = calls[cut.near], self.forward(calls[cut.far])
        return launch(near.q, near.k, near.v, cut.left, cut.right, None, None, near.scale, False, far=far)


KERNEL = Band()


def _cut(asked: AttentionCall) -> Cut | None:
    if not asked.layout.plain:
        return None
    regions = tuple(m.region for m in asked.branches)
    layout = asked.layout
    return layout.cached(("cut", *regions), lambda: cut_up(regions, layout.queries, layout.keys))


def cut_up(regions: Sequence[Region], queries: int, keys: int) -> Cut | None:
    """The regions as one window, at most one set of first keys before it, and at most one triangle; None if not."""
    if queries > keys:  # some see nothing
        return None
    spans = [(n, span) for n, region in enumerate(regions) for span in region.spans]
    windows = [(n, s) for n, s in spans if s.start <= 0 and s.stop >= keys and -inf < s.low <= 0 < s.high]
    if len(windows) != 1:
        return None
    near, window = windows[0]
    cut = Cut(near, -int(window.low), int(min(window.high - 1, keys)))
    for n, span in spans:
        if span is window:
            continue
        band = span.to_band(queries, keys)
        early = span.start <= 0 and span.stop <= MOST_SINKS and (span.low, span.high) == (-inf, window.low)
        if early and not cut.sinks:
            cut = cut._replace(sink=n, sinks=int(min(span.stop, keys)))
        elif band is not None and (band.causal or band.full) and cut.far is None:
            cut = cut._replace(far=n, span=span)
        else:
            return None
    return cut
