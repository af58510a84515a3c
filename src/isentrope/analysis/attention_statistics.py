"""What the attention weights of one layer look like, a few rows at a time: entropies, cosines, cells of a heatmap."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import inf, log

import torch
from torch import Tensor
from torch.nn import functional as F

from isentrope.attention import attention
from isentrope.backends.sdpa import MAX_HEAD_DIM
from isentrope.builder import Inputs, build_call, compute_geometry
from isentrope.core.call import FoldedBranch
from isentrope.core.dtypes import accumulation_dtype, autocast_disabled
from isentrope.core.layout import Layout
from isentrope.core.region import Region
from isentrope.core.rotation import normalise_vectors
from isentrope.hf.capture import CapturedAttention

PAIRS = {"cpu": 1 << 20, "cuda": 1 << 25}  # of queries and keys, held at once
BINS = 200  # of cosines from -1 to 1
CELLS = 512  # of a heatmap, along each side


@dataclass(frozen=True)
class Window:
    """What a heatmap shows: queries first … last - 1 against keys low … high - 1."""

    first: int
    last: int
    low: int
    high: int

    @classmethod
    def read(cls, text: str) -> Window:
        """From `rows,columns`, each as `first:end`."""
        try:
            rows, columns = (part.split(":") for part in text.split(","))
            (first, last), (low, high) = map(int, rows), map(int, columns)
        except ValueError:
            raise ValueError(f"region: expected rows and columns such as 0:512,0:512, got {text!r}") from None
        return cls(first, last, low, high)

    def check(self, length: int) -> None:
        for name, low, high in (("rows", self.first, self.last), ("columns", self.low, self.high)):
            if not 0 <= low < high <= length:
                raise ValueError(f"region: expected {name} within 0:{length}, the longest text, got {low}:{high}")

    @property
    def block(self) -> tuple[int, int]:
        """Rows and columns that share a cell."""
        return -(-(self.last - self.first) // CELLS), -(-(self.high - self.low) // CELLS)


def entropy(seen: CapturedAttention) -> Tensor:
    """Mean entropy of each head's attention in nats, over rows and queries, (heads,) in fp64."""
    seen = _widened(seen)
    # fused kernels know every recipe in fp32; "auto" would compile one for it on a GPU
    fused = seen.q.is_cuda and seen.q.dtype == torch.float32 and seen.q.shape[-1] <= MAX_HEAD_DIM
    options = seen.options | {"backend": "sdpa" if fused else "auto", "return_entropy": True}
    _, aux = attention(seen.q, seen.k, seen.k, seen.recipe, **options)
    return aux.entropy.double().mean((0, 2))


def uniform(seen: CapturedAttention) -> float:
    """The entropy if every query attended alike to all keys that it sees: the mean of ln n."""
    layout, region = _where(seen)
    return float(layout.count_keys("visible", region).clamp_min(1).double().log().mean())


def cosines(seen: CapturedAttention) -> tuple[Tensor, Tensor]:
    """Histograms of cos θ between queries and keys, BINS from -1 to 1: of visible pairs, and of attention over them.

    θ is the angle that the score sees, after the position method. Summed over rows, heads and queries, in fp64: the
    first adds up to the number of visible pairs, the second to that of queries that see any.
    """
    calls = _branches(seen)
    angles = [
        replace(call, q=normalise_vectors(call.q), k=normalise_vectors(call.k), scale=1.0, slopes=None)
        for call in calls
    ]
    pairs, weights = torch.zeros(2, BINS, dtype=torch.float64, device=seen.q.device)
    for rows in _chunks(seen, 0, seen.q.shape[2]):
        cosine = _scores(angles, rows)
        bins = ((cosine.clamp(-1, 1) + 1) * (BINS / 2)).long().clamp_(max=BINS - 1)
        bins = bins.masked_fill_(cosine == -inf, BINS).flatten()  # what is not seen, in a bin of its own
        pairs += torch.bincount(bins, minlength=BINS + 1)[:BINS]
        weights += torch.bincount(bins, _logs(calls, rows).double().exp_().flatten(), minlength=BINS + 1)[:BINS]
    return pairs.cpu(), weights.cpu()


def log_attention(seen: CapturedAttention, window: Window, head: int | None = None, pool: str = "mean") -> Tensor:
    """ln of the attention weights in a window of the first row, (cells, cells); -inf where nothing is seen.

    head: that one; by default the mean of all. Where several pairs share a cell it holds the ln of their mean weight,
    or of their largest (pool="max").
    """
    if pool not in ("mean", "max"):
        raise ValueError(f"pool: expected 'mean' or 'max', got {pool!r}")
    calls, (down, across) = _branches(seen), window.block
    cells = []
    for rows in _chunks(seen, window.first, window.last, down):
        logs = _heads(_logs(calls, rows), window, head)
        # added up as logarithms: far from the diagonal the weights themselves are below what fp32 can hold
        logs = logs.logsumexp(0) - log(logs.shape[0])
        found = _blocks(logs, down, across, -inf)
        if pool == "max":
            cells.append(found.amax((1, 3)))
        else:
            pairs = _blocks(torch.ones_like(logs), down, across, 0.0).sum((1, 3))
            cells.append(found.logsumexp((1, 3)) - pairs.log())
    return torch.cat(cells).cpu()


def products(
    seen: CapturedAttention, window: Window, head: int | None = None
) -> tuple[Tensor, float | None, float | None]:
    """Scores in a window of the first row, without temperature, (cells, cells); and the least and largest of them.

    Means over heads, and over the visible pairs that share a cell; nan (None) where nothing is seen.
    """
    calls, (down, across) = _branches(replace(seen, recipe=replace(seen.recipe, temperature=None))), window.block
    cells, least, most = [], inf, -inf
    for rows in _chunks(seen, window.first, window.last, down):
        found = _heads(_scores(calls, rows), window, head).mean(0)
        visible = found > -inf
        if visible.any():
            least, most = min(least, float(found[visible].min())), max(most, float(found.max()))
        total = _blocks(torch.where(visible, found, 0.0), down, across, 0.0).sum((1, 3))
        cells.append(total / _blocks(visible.to(found.dtype), down, across, 0.0).sum((1, 3)))
    return torch.cat(cells).cpu(), *((least, most) if least <= most else (None, None))


def _widened(seen: CapturedAttention) -> CapturedAttention:
    """In fp32: from queries and keys in bf16, the entropy of large scores would be off by tenths."""
    return replace(seen, q=seen.q.to(accumulation_dtype(seen.q)), k=seen.k.to(accumulation_dtype(seen.k)))


def _where(seen: CapturedAttention) -> tuple[Layout, Region]:
    return compute_geometry(_inputs(seen), seen.recipe.mask)


def _inputs(seen: CapturedAttention) -> Inputs:
    options = seen.options
    mask, causal, scale = options.get("mask"), options.get("causal", False), options.get("scale")
    return Inputs(seen.q, seen.k, seen.k, mask, causal, layout=seen.layout, scale=scale)


def _branches(seen: CapturedAttention) -> list[FoldedBranch]:
    """Return the attention as a backend computes it, with everything folded into queries and keys."""
    seen = _widened(seen)
    with autocast_disabled(seen.q):
        return build_call(_inputs(seen), seen.recipe.resolve()).fold()


def _chunks(seen: CapturedAttention, first: int, last: int, multiple: int = 1) -> Iterator[slice]:
    """Rows first … last - 1, as many at once as PAIRS lets, and a multiple of `multiple`."""
    batch, heads = seen.q.shape[:2]
    most = PAIRS.get(seen.q.device.type, 1 << 20) // (batch * heads * seen.k.shape[2])
    step = max(1, most // multiple) * multiple
    for at in range(first, last, step):
        yield slice(at, min(at + step, last))


def _scores(calls: list[FoldedBranch], rows: slice) -> Tensor:
    """Scores of a few queries with all keys, (batch, heads, rows, keys); -inf where a key is not seen."""
    found: Tensor | float = -inf
    with autocast_disabled(calls[0].q):
        for call in calls:
            q = call.q[:, :, rows].unflatten(1, (call.k.shape[1], call.groups))
            score = (q.flatten(2, 3) @ call.k.mT).mul_(call.scale).unflatten(2, q.shape[2:4]).flatten(1, 2)
            if (bias := call.bias(rows)) is not None:
                score = score + bias.to(score.dtype)
            found = torch.where(call.mask(rows), score, found)
    assert isinstance(found, Tensor)
    return found


def _logs(calls: list[FoldedBranch], rows: slice) -> Tensor:
    """ln of the attention weights of a few queries; -inf where a key is not seen."""
    scores = _scores(calls, rows)
    total = scores.logsumexp(-1, keepdim=True)
    return scores - torch.where(total == -inf, 0.0, total)


def _heads(x: Tensor, window: Window, head: int | None) -> Tensor:
    """The columns of a window, of all heads or one, in the first row: (heads, rows, columns)."""
    return x[0, slice(None) if head is None else [head], :, window.low : window.high]


def _blocks(x: Tensor, down: int, across: int, fill: float) -> Tensor:
    """(rows, columns) as (cells, down, cells, across)."""
    x = F.pad(x, (0, -x.shape[1] % across, 0, -x.shape[0] % down), value=fill)
    return x.unflatten(1, (-1, across)).unflatten(0, (-1, down))
