"""Statistics of one layer's attention, a few rows at a time: entropies, histograms of cosines, heatmaps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import inf, log

import torch
from torch import Tensor
from torch.nn import functional as F

from isentrope.block_selection import choose_blocks
from isentrope.builder import Inputs, build_call, compute_geometry
from isentrope.core.call import FoldedBranch
from isentrope.core.dtypes import accumulation_dtype, autocast_disabled
from isentrope.core.rotation import normalise_vectors
from isentrope.dispatch import AUTO, BLOCKS, CHUNKED, choose_uncompiled
from isentrope.entropy import set_entropy_tau
from isentrope.functional import attention
from isentrope.hf.capture import CapturedAttention

MAX_PAIRS = {"cpu": 1 << 20, "cuda": 1 << 25}  # of queries and keys, in memory at once
COSINE_BINS = 200  # of cosines from -1 to 1
MAX_CELLS = 512  # of a heatmap, along each side


@dataclass(frozen=True)
class HeatmapWindow:
    """The part that a heatmap shows: queries first … last - 1 against keys low … high - 1."""

    first: int
    last: int
    low: int
    high: int

    @classmethod
    def parse(cls, text: str) -> HeatmapWindow:
        """Build from `rows,columns`, each as `first:end`."""
        try:
            rows, columns = (part.split(":") for part in text.split(","))
            (first, last), (low, high) = map(int, rows), map(int, columns)
        except ValueError:
            raise ValueError(f"region: expected rows and columns such as 0:512,0:512, got {text!r}") from None
        return cls(first, last, low, high)

    def check(self, length: int) -> None:
        """Raise a ValueError unless it lies within a text of `length` tokens."""
        for name, low, high in (("rows", self.first, self.last), ("columns", self.low, self.high)):
            if not 0 <= low < high <= length:
                raise ValueError(f"region: expected {name} within 0:{length}, the longest text, got {low}:{high}")

    @property
    def block(self) -> tuple[int, int]:
        """Rows and columns that share a cell."""
        return -(-(self.last - self.first) // MAX_CELLS), -(-(self.high - self.low) // MAX_CELLS)


def head_entropy(captured: CapturedAttention, exact: bool = True) -> Tensor:
    """Compute the mean entropy of each head's attention in nats, over rows and queries, (heads,) in fp64.

    Args:
        captured: the layer's queries and keys.
        exact: in fp32 at least, which takes minutes for a long text; else in the model's own precision, within a few
            per cent in bf16.
    """
    if exact:
        captured = _to_accumulation_dtype(captured)
    fused = captured.recipe.retrieve is None and not any(
        hasattr(law, "by_distance") for law in captured.recipe.temperatures
    )
    backend = choose_uncompiled(captured.q) if fused else AUTO
    options = captured.options | {"backend": backend, "return_entropy": True}
    _, aux = attention(captured.q, captured.k, captured.k, captured.recipe, **options)
    return aux.entropy.double().mean((0, 2))


def uniform_entropy(captured: CapturedAttention) -> float:
    """Compute the entropy if every query attended alike to all its visible keys: the mean of ln n."""
    layout, region = compute_geometry(_inputs(captured), captured.recipe.mask)
    count = layout.count_keys("visible", region)
    if (choice := captured.recipe.retrieve) is not None:
        count = count - choice.count_hidden(layout.query, captured.recipe.position.near_window)
    return float(count.clamp_min(1).double().log().mean())


def cosine_histograms(captured: CapturedAttention) -> tuple[Tensor, Tensor]:
    """Count cos θ between queries and keys in COSINE_BINS from -1 to 1.

    θ is the angle that the score sees, after the position method.

    Returns:
        Two histograms in fp64, summed over rows, heads and queries: of visible pairs, which adds up to their number,
        and of attention over them, which adds up to the number of queries that see any key.
    """
    branches = fold_branches(captured)
    angles = [
        replace(
            branch,
            q=normalise_vectors(branch.q),
            k=normalise_vectors(branch.k),
            scale=1.0,
            slopes=None,
            offset=None,
            distance_law=None,
        )
        for branch in branches
    ]
    pairs, weights = torch.zeros(2, COSINE_BINS, dtype=torch.float64, device=captured.q.device)
    for rows in _split_rows(captured, 0, captured.q.shape[2]):
        cosine = _scores(angles, rows)
        bins = ((cosine.clamp(-1, 1) + 1) * (COSINE_BINS / 2)).long().clamp_(max=COSINE_BINS - 1)
        bins = bins.masked_fill_(cosine == -inf, COSINE_BINS).flatten()  # invisible pairs, in a bin that is cut off
        pairs += torch.bincount(bins, minlength=COSINE_BINS + 1)[:COSINE_BINS]
        attended = _log_weights(branches, rows).double().exp_().flatten()
        weights += torch.bincount(bins, attended, minlength=COSINE_BINS + 1)[:COSINE_BINS]
    return pairs.cpu(), weights.cpu()


def log_attention_map(
    captured: CapturedAttention, window: HeatmapWindow, head: int | None = None, pool: str = "mean"
) -> Tensor:
    """Compute ln of the attention weights in a window of the first row, (cells, cells); -inf where nothing is visible.

    Args:
        captured: the layer's queries and keys.
        window: which part of the text.
        head: that one; by default the mean of all.
        pool: where several pairs share a cell, the ln of their "mean" weight or of their largest ("max").
    """
    if pool not in ("mean", "max"):
        raise ValueError(f"pool: expected 'mean' or 'max', got {pool!r}")
    branches, (down, across) = fold_branches(captured), window.block
    cells = []
    for rows in _split_rows(captured, window.first, window.last, down):
        logs = _select_heads(_log_weights(branches, rows), window, head)
        # added up as logarithms: far from the diagonal the weights themselves are below what fp32 can hold
        logs = logs.logsumexp(0) - log(logs.shape[0])
        blocks = _split_blocks(logs, down, across, -inf)
        if pool == "max":
            cells.append(blocks.amax((1, 3)))
        else:
            pairs = _split_blocks(torch.ones_like(logs), down, across, 0.0).sum((1, 3))
            cells.append(blocks.logsumexp((1, 3)) - pairs.log())
    return torch.cat(cells).cpu()


def score_map(
    captured: CapturedAttention, window: HeatmapWindow, head: int | None = None
) -> tuple[Tensor, float | None, float | None]:
    """Compute bare scores, without temperature and share law, in a window of the first row, and their extremes.

    (cells, cells): means over heads, and over the visible pairs that share a cell; nan (None) where nothing is visible.
    """
    branches, (down, across) = (
        fold_branches(replace(captured, recipe=replace(captured.recipe, temperature=None, share=None))),
        window.block,
    )
    cells, least, most = [], inf, -inf
    for rows in _split_rows(captured, window.first, window.last, down):
        scores = _select_heads(_scores(branches, rows), window, head).mean(0)
        visible = scores > -inf
        if visible.any():
            least, most = min(least, float(scores[visible].min())), max(most, float(scores.max()))
        total = _split_blocks(torch.where(visible, scores, 0.0), down, across, 0.0).sum((1, 3))
        cells.append(total / _split_blocks(visible.to(scores.dtype), down, across, 0.0).sum((1, 3)))
    return torch.cat(cells).cpu(), *((least, most) if least <= most else (None, None))


def _to_accumulation_dtype(captured: CapturedAttention) -> CapturedAttention:
    """Convert to fp32: from queries and keys in bf16, the entropy of large scores would be off by tenths."""
    return replace(
        captured, q=captured.q.to(accumulation_dtype(captured.q)), k=captured.k.to(accumulation_dtype(captured.k))
    )


def _inputs(captured: CapturedAttention) -> Inputs:
    options = captured.options
    mask, causal, scale = options.get("mask"), options.get("causal", False), options.get("scale")
    return Inputs(captured.q, captured.k, captured.k, mask, causal, layout=captured.layout, scale=scale)


def fold_branches(captured: CapturedAttention) -> list[FoldedBranch]:
    """Build the branches that a backend would compute, with everything folded into queries and keys."""
    captured = _to_accumulation_dtype(captured)
    with autocast_disabled(captured.q):
        call = build_call(_inputs(captured), captured.recipe.resolve())
        if call.choice is not None and not call.layout.plain:
            raise ValueError("retrieve: weights over chosen keys are shown for unpadded rows; pass one text at a time")
        return set_entropy_tau(CHUNKED if call.choice is None else BLOCKS, choose_blocks(call)).fold()


def _split_rows(captured: CapturedAttention, first: int, last: int, multiple: int = 1) -> Iterator[slice]:
    """Split rows first … last - 1 into slices of at most MAX_PAIRS pairs, each a multiple of `multiple` rows."""
    batch, heads = captured.q.shape[:2]
    most = MAX_PAIRS.get(captured.q.device.type, 1 << 20) // (batch * heads * captured.k.shape[2])
    step = max(1, most // multiple) * multiple
    for at in range(first, last, step):
        yield slice(at, min(at + step, last))


def _scores(branches: list[FoldedBranch], rows: slice) -> Tensor:
    """Compute scores of a few queries with all keys, (batch, heads, rows, keys); -inf where a key is not visible."""
    scores: Tensor | float = -inf
    with autocast_disabled(branches[0].q):
        for branch in branches:
            q = branch.q[:, :, rows].unflatten(1, (branch.k.shape[1], branch.groups))
            score = (q.flatten(2, 3) @ branch.k.mT).mul_(branch.scale).unflatten(2, q.shape[2:4]).flatten(1, 2)
            factor, bias = branch.distance_terms(rows)
            if factor is not None:
                score = score * factor.to(score.dtype)
            if bias is not None:
                score = score + bias.to(score.dtype)
            if branch.offset is not None:
                score = score + branch.offset[:, :, rows, None].to(score.dtype)
            scores = torch.where(branch.mask(rows), score, scores)
    assert isinstance(scores, Tensor)
    return scores


def _log_weights(branches: list[FoldedBranch], rows: slice) -> Tensor:
    """Compute ln of the attention weights of a few queries; -inf where a key is not visible."""
    scores = _scores(branches, rows)
    total = scores.logsumexp(-1, keepdim=True)
    return scores - torch.where(total == -inf, 0.0, total)


def _select_heads(x: Tensor, window: HeatmapWindow, head: int | None) -> Tensor:
    """Select the columns of a window, of all heads or one, in the first row: (heads, rows, columns)."""
    return x[0, slice(None) if head is None else [head], :, window.low : window.high]


def _split_blocks(x: Tensor, down: int, across: int, fill: float) -> Tensor:
    """Reshape (rows, columns) to (cells, down, cells, across), padded with `fill`."""
    x = F.pad(x, (0, -x.shape[1] % across, 0, -x.shape[0] % down), value=fill)
    return x.unflatten(1, (-1, across)).unflatten(0, (-1, down))
