"""An attention call on its way to a backend: as branches that rotate q and k, and with the rotations folded in."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import ceil
from typing import Any, Literal, Protocol, TypeVar

import torch
from torch import Tensor

from isentrope.core.caching import MAX_CALL_VALUES
from isentrope.core.choice import BlockChoice, ChosenBlocks
from isentrope.core.dtypes import accumulation_dtype
from isentrope.core.layout import Layout
from isentrope.core.region import CAUSAL, EVERYTHING, Region
from isentrope.core.rotation import Angles, prepare_rotations, rotate_and_scale, widen_angles
from isentrope.core.tracing import GraphCache

T = TypeVar("T")
MAX_FEW_QUERIES = 16  # of which the keys that none sees are not rotated


class EntropyLaw(Protocol):
    """A temperature that follows from attention itself: hashable, and the same at every call."""

    def by_entropy(self, entropy: Tensor) -> Tensor:
        """Return τ for the entropy of each query's attention without it, in nats."""
        ...


class DistanceLaw(Protocol):
    """A factor and a bias of scores by distance: hashable, and the same at every call."""

    def by_distance(self, distance: Tensor) -> tuple[Tensor, Tensor]:
        """Return a and m of scores a s + m, for each |Δ|."""
        ...


@dataclass(frozen=True, eq=False)
class RotatedBranch:
    """Pairs in `region`: scale · τ q·k of queries and keys rotated by these angles, - slopes · |Δ| + offset.

    tau, offset: (batch or 1, heads or 1, queries).
    far: whether these are the keys beyond the window of a position method.
    entropy_law: gives τ, once the entropy of the call without it is known; no backend receives it.
    distance_law: multiplies scale · τ q·k by a(|Δ|) and adds m(|Δ|).
    chosen: blocks of these keys that queries see, where they do not see all.
    traced: in a graph that is being traced, what layers share of this branch.
    """

    region: Region
    query_angles: Angles | None = None
    key_angles: Angles | None = None
    slopes: Tensor | None = None
    far: bool = False
    tau: Tensor | None = None
    offset: Tensor | None = None
    entropy_law: EntropyLaw | None = None
    distance_law: DistanceLaw | None = None
    chosen: ChosenBlocks | None = None
    traced: GraphCache | None = None

    @property
    def biased(self) -> bool:
        """Whether scores depend on the distance other than through rotation."""
        return self.slopes is not None or self.distance_law is not None

    def rotates_keys_like(self, other: RotatedBranch) -> bool:
        """Return whether two branches have the very same angles of keys."""
        if self.key_angles is None or other.key_angles is None:
            return self.key_angles is other.key_angles
        return self.key_angles[0] is other.key_angles[0]

    def rotates_like(self, other: RotatedBranch) -> bool:
        """Return whether two branches have the very same angles of queries and keys."""
        own, others = self.query_angles, other.query_angles
        same = own is others if own is None or others is None else own[0] is others[0]
        return same and self.rotates_keys_like(other)

    def take_heads(self, heads: slice, key_heads: slice) -> RotatedBranch:
        """Return the branch for some query heads and the key heads that they share."""
        tau, offset = (x if x is None or x.shape[1] == 1 else x[:, heads] for x in (self.tau, self.offset))
        slopes = None if self.slopes is None else self.slopes[heads]
        chosen = None if self.chosen is None else self.chosen.take_heads(key_heads)
        return replace(self, slopes=slopes, tau=tau, offset=offset, chosen=chosen)


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """softmax(scale · τ q·k + bias) v over disjoint branches, with q, k and v as the caller passed them.

    q (batch, heads, queries, d), k (batch, kv_heads, keys, d), v (batch, kv_heads, keys, dv).
    normalise: scores are cosines. interleaved: layout of the rotated pairs.
    dropout: function of the attention weights, for backends that have them.
    choice: how far keys are to be chosen, before a backend runs.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    layout: Layout
    branches: list[RotatedBranch]
    scale: float
    normalise: bool = False
    interleaved: bool = False
    dropout: Callable[[Tensor], Tensor] | None = None
    choice: BlockChoice | None = None
    _folded: list[FoldedBranch] = field(default_factory=list, init=False, repr=False)
    # what calls that differ in q, k and v alone share; a copy with other branches begins without
    shared: dict[Any, Any] | None = field(default=None, init=False, repr=False)

    def set_tensors(self, q: Tensor, k: Tensor, v: Tensor) -> AttentionCall:
        """Return the call with other tensors of the same sizes; a graph traces this faster than `replace`."""
        parts = self.layout, self.branches, self.scale, self.normalise, self.interleaved, self.dropout, self.choice
        call = AttentionCall(q, k, v, *parts)
        vars(call)["shared"] = self.shared
        return call

    def cached(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return `make()`, which depends on neither q, k nor v, once for all calls that differ in those alone."""
        shared = self.shared
        if shared is None or torch.compiler.is_compiling():
            return make()
        value: Any = shared.get(key, shared)
        if value is shared:  # not yet there
            with torch.inference_mode(False):  # or a later call could not save it for its backward
                value = make()
            if len(shared) < MAX_CALL_VALUES:
                shared[key] = value
        return value

    @property
    def groups(self) -> int:
        """Query heads per key head."""
        return self.q.shape[1] // self.k.shape[1]

    @property
    def rotations(self) -> list[Angles]:
        """The angles of all branches."""
        pairs = [angles for branch in self.branches for angles in (branch.query_angles, branch.key_angles)]
        return [angles for angles in pairs if angles is not None]

    @property
    def needs_grad(self) -> bool:
        """Whether autograd records this call."""
        if not torch.is_grad_enabled():
            return False
        factors = (x for branch in self.branches for x in (branch.tau, branch.offset))
        inputs = (self.q, self.k, self.v, *factors, *(x for angles in self.rotations for x in angles))
        return any(x is not None and x.requires_grad for x in inputs)

    def fold(self) -> list[FoldedBranch]:
        """Return the branches with angles, τ and norms folded into q and k; computed once."""
        if not self._folded:
            for branch in self.branches:
                pairs = zip(self.branches, self._folded, strict=False)
                k = next((folded.k for other, folded in pairs if branch.rotates_keys_like(other)), None)
                self._folded.append(self.fold_branch(branch, k))
        return self._folded

    def fold_branch(self, branch: RotatedBranch, k: Tensor | None = None) -> FoldedBranch:
        """Return a branch with everything folded; its keys may be given if they are folded already."""
        assert branch.entropy_law is None, "measure the entropy first"
        angles = branch.query_angles if branch.traced is None else self.widen_angles(branch, "query")
        q = rotate_and_scale(self.q, angles, branch.tau, self.normalise, self.interleaved)
        k = self.fold_keys(branch) if k is None else k
        laws = branch.slopes, branch.offset, branch.chosen, branch.distance_law
        return FoldedBranch(q, k, self.v, self.scale, branch.region, self.layout, *laws, branch.traced)

    def fold_keys(self, branch: RotatedBranch, count: int | None = None) -> Tensor:
        """Return the keys, or the first `count`, as a branch rotates them."""
        k, angles = self.k, branch.key_angles if branch.traced is None else self.widen_angles(branch, "key")
        if count is not None:
            k, angles = k[:, :, :count], angles and (angles[0][:, :, :count], angles[1][:, :, :count])
        elif angles is not None and (seen := self._find_seen_keys(branch)) is not None:
            inside = rotate_and_scale(
                k[:, :, seen], (angles[0][:, :, seen], angles[1][:, :, seen]), None, self.normalise, self.interleaved
            )
            return torch.cat((k[:, :, : seen.start], inside, k[:, :, seen.stop :]), 2)
        return rotate_and_scale(k, angles, None, self.normalise, self.interleaved)

    def prepare_keys(self, branches: Sequence[RotatedBranch]) -> Callable[[Tensor], list[Tensor]]:
        """Return what rotates keys laid out like these for each branch, on a GPU and without gradients.

        Padded ones may be anything.
        """
        layout, angles = self.layout, [branch.key_angles for branch in branches]
        bounds = layout.cached("tokens of rows", layout.find_tokens) if layout.padded else None
        return prepare_rotations(self.k, angles, self.normalise, self.interleaved, bounds)

    def widen_angles(self, branch: RotatedBranch, kind: Literal["query", "key"]) -> Angles | None:
        """Return the angles of queries or keys in a graph: of whole vectors widened, once for its layers."""
        assert branch.traced is not None
        angles = branch.query_angles if kind == "query" else branch.key_angles
        if angles is None or self.interleaved or 2 * angles[0].shape[-1] != self.q.shape[3]:
            return angles
        return branch.traced.get(kind, lambda: widen_angles(angles))

    def _find_seen_keys(self, branch: RotatedBranch) -> slice | None:
        """Return the keys that a few queries see in a branch, where they are at most half: near keys when decoding.

        The others need no rotation.
        """
        layout, angles = self.layout, branch.key_angles
        if self.k.device.type != "cpu":  # the kernels of a GPU rotate near keys alone themselves
            return None
        if torch.is_grad_enabled() or torch.compiler.is_compiling() or self.normalise or not layout.banded:
            return None
        few = layout.queries <= MAX_FEW_QUERIES and angles is not None and angles[0].shape[2] == layout.keys
        if not few or sum(branch.rotates_keys_like(other) for other in self.branches) > 1:
            return None
        low, high = layout.key_range(branch.region, 0, layout.queries)
        return slice(low, high) if 2 * (high - low) <= layout.keys else None

    def split_heads(self, max_q_elements: int) -> Iterator[tuple[slice, AttentionCall]]:
        """Yield groups of query heads, evenly sized, with at most so many elements of q where one key head has less."""
        kv_heads = self.k.shape[1]
        count = max(1, max_q_elements * kv_heads // self.q.numel())
        count = ceil(kv_heads / ceil(kv_heads / count))
        for first in range(0, kv_heads, count):
            key_heads = slice(first, first + count)
            heads = slice(first * self.groups, (first + count) * self.groups)
            q, k, v = self.q[:, heads], self.k[:, key_heads], self.v[:, key_heads]
            yield (
                heads,
                replace(
                    self, q=q, k=k, v=v, branches=[branch.take_heads(heads, key_heads) for branch in self.branches]
                ),
            )


def describe_tensors(q: Tensor, k: Tensor, v: Tensor) -> tuple[Any, ...]:
    """Return all that a launch depends on in q, k and v, but for their addresses and contents."""
    return (
        q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(), q.dtype, k.dtype, v.dtype,
        q.device, k.device, v.device,
    )  # fmt: skip


@dataclass(frozen=True, eq=False)
class FoldedBranch:
    """One branch with rotation, τ and norms folded into q and k.

    Scores are scale · q·k - slopes · |Δ| + offset; under a distance law a · scale · q·k + m instead of scale · q·k.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    region: Region
    layout: Layout
    slopes: Tensor | None = None
    offset: Tensor | None = None
    chosen: ChosenBlocks | None = None
    distance_law: DistanceLaw | None = None
    traced: GraphCache | None = None

    def set_operands(self, q: Tensor, k: Tensor, v: Tensor, offset: Tensor | None) -> FoldedBranch:
        """Return the branch with other tensors; a graph traces this faster than `replace`."""
        laws = self.slopes, offset, self.chosen, self.distance_law
        return FoldedBranch(q, k, v, self.scale, self.region, self.layout, *laws, self.traced)

    def cached_in_graph(self, name: Hashable, make: Callable[[], T]) -> T:
        """Return `make()`, which depends on the region and the layout alone, traced once for the layers of a graph."""
        if self.traced is not None:  # found by a name, since Dynamo takes milliseconds to compute the hash of a region
            return self.traced.get(name, make)
        return self.layout.cached_in_graph((name, self.region), make)

    def as_call(self) -> AttentionCall:
        """Return a call of this branch alone, without its offset, which has nothing left to fold."""
        branch = RotatedBranch(self.region, slopes=self.slopes, chosen=self.chosen, distance_law=self.distance_law)
        return AttentionCall(self.q, self.k, self.v, self.layout, [branch], self.scale)

    @property
    def groups(self) -> int:
        """Query heads per key head."""
        return self.q.shape[1] // self.k.shape[1]

    @property
    def unmasked(self) -> bool:
        return is_unmasked(self.region, self.layout)

    @property
    def causal(self) -> bool:
        return is_causal(self.region, self.layout)

    def split_spans(self) -> list[FoldedBranch]:
        """Return one branch per span, where that lets a chunk of rows skip the keys between spans."""
        regions = split_region(self.region, self.layout)
        return [self] if len(regions) == 1 else [replace(self, region=region, traced=None) for region in regions]

    @property
    def bounds(self) -> tuple[Tensor, Tensor]:
        """Visible slots of each query, [low, high): (batch or 1, queries, spans)."""
        return self.layout.bounds(self.region)

    @property
    def visible_counts(self) -> Tensor:
        """How many keys each query sees in this branch: (batch or 1, 1, queries)."""
        return self.layout.count_slots(self.region)[:, None]

    def mask(self, rows: slice | None = None, columns: slice | None = None) -> Tensor:
        visible = self.layout.visible(self.region, rows, columns)
        if self.chosen is None:
            return visible
        return visible & self.chosen.mask(rows, columns).repeat_interleave(self.groups, 1)

    @property
    def biased(self) -> bool:
        """Whether scores depend on the distance other than through rotation."""
        return self.slopes is not None or self.distance_law is not None

    def bias(self, rows: slice | None = None, columns: slice | None = None) -> Tensor | None:
        """Return m - slopes · |Δ|, (batch or 1, heads or 1, rows, columns) in fp32 or wider."""
        return self.distance_terms(rows, columns)[1]

    def distance_terms(
        self, rows: slice | None = None, columns: slice | None = None
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return a, and m - slopes · |Δ|: (batch or 1, heads or 1, rows, columns), None where nothing changes."""
        if not self.biased:
            return None, None
        query, key = self.layout.query, self.layout.key
        query = query if rows is None else query[:, rows]
        key = key if columns is None else key[:, columns]
        distance = (query[:, None, :, None] - key[:, None, None]).abs()
        bias = None if self.slopes is None else -self.slopes[:, None, None] * distance
        if self.distance_law is None:
            return None, bias
        factor, shift = self.distance_law.by_distance(distance.to(accumulation_dtype(self.q)))
        return factor, shift if bias is None else bias + shift


def is_unmasked(region: Region, layout: Layout) -> bool:
    """Return whether every query sees every key."""
    return layout.plain and region == EVERYTHING


def is_causal(region: Region, layout: Layout) -> bool:
    """Return whether a region is the plain causal triangle of self-attention."""
    return layout.plain and layout.queries == layout.keys and region == CAUSAL


def split_region(region: Region, layout: Layout) -> list[Region]:
    """Return one region per span where spans are the same bands of slots in every row, else the region itself."""
    if len(region.spans) < 2 or not layout.banded:
        return [region]
    return [Region((span,)) for span in region.spans]
