"""Attention under a recipe: the only place where parts, geometry and backends meet."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from math import inf, isfinite
from types import ModuleType
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from isentrope.backends import chunked, dense, flex, reference, sdpa
from isentrope.backends.call import Call
from isentrope.compiled import compiled
from isentrope.fold import Angles, angles, fold
from isentrope.layout import Layout, PositionIds, layout_of
from isentrope.masks import Document, Full, Mask, Padding, data_masks
from isentrope.positions import Branch, NoPE, Position
from isentrope.precision import as_given, wide
from isentrope.recipe import Recipe
from isentrope.region import Region, band
from isentrope.scores import Dot
from isentrope.temperatures import Temperature

BACKENDS: dict[str, ModuleType] = {
    "reference": reference, "dense": dense, "sdpa": sdpa, "flex": flex, "chunked": chunked
}  # fmt: skip
logger = logging.getLogger("isentrope")
T = TypeVar("T")
MOST_TEXTS = 256
FEW_QUERIES = 16
# weights worth having all at once, by measurement: until they leave a CPU's caches, or crowd a GPU's memory
LARGEST_TABLE = {"cpu": 1 << 22, "cuda": 1 << 29}
LARGEST_KEPT = 1 << 26  # where a backward will want them again
_texts: dict[str, Recipe] = {}


@dataclass(frozen=True)
class Aux:
    """What attention can tell besides its output, in nats, (batch, heads, queries); and the backend that ran."""

    lse: Tensor | None
    entropy: Tensor | None
    backend: str


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    recipe: Recipe | str | None = None,
    *,
    causal: bool = False,
    lengths: Tensor | Sequence[int] | None = None,
    position_ids: PositionIds | None = None,
    mask: Mask | None = None,
    layout: Layout | None = None,
    scale: float | None = None,
    rotated_keys: bool = False,
    dropout: float | Callable[[Tensor], Tensor] | None = None,
    backend: str = "auto",
    return_lse: bool = False,
    return_entropy: bool = False,
) -> Any:
    """softmax(τ(n) · s(q, k) + bias) v under a recipe.

    q (batch, heads, queries, d), k (batch, kv_heads, keys, d), v (batch, kv_heads, keys, dv), as in
    `torch.nn.functional.scaled_dot_product_attention`. With fewer queries than keys the last query stands at the last
    key (the last unpadded one).

    causal: no query sees a key ahead of it.
    lengths: unpadded keys per row, (batch,), padding on the right.
    position_ids: positions of the keys (their last `queries` are the queries'), or of the queries alone, or a pair
        (queries, keys). Masks and distances are measured in positions.
    mask: a mask for this call, joined to the recipe's with `&`: `Padding` and `Document` belong here.
    layout: in place of lengths, position_ids, Padding and Document, where a caller has made the geometry beforehand.
    scale: replaces the score's own factor (1/√d, or α).
    rotated_keys: k comes from a cache of keys that this recipe's position method has already rotated.
    dropout: share of attention weights set to 0, the others scaled up to match, or a function that does it. A
        regulariser for training at short lengths: it needs the weights themselves, so only "reference" and "dense" have
        it, and "auto" takes dense.
    backend: "reference", "dense", "sdpa", "flex", "chunked": that one, or a ValueError that says why it cannot. "auto":
        on a CPU sdpa; on a GPU sdpa for plain full or causal attention and for a few queries, flex for the rest; where
        those refuse, dense at short lengths and chunked at long ones.
    return_lse, return_entropy: return (output, `Aux`) with the log-sum-exp of the scores and the entropy of the
        attention weights. They carry gradients on the reference backend only. Entropy is as exact as the dtype of q and
        k lets the mean score be: about 1e-6 nats in fp32; in bf16 a few hundredths, more where scores are large.

    A query that sees no key gives zeros (lse -inf, entropy 0).
    """
    recipe = as_recipe(recipe).resolved()
    _check_shapes(q, k, v)
    with as_given(q):
        layout, region = geometry(q, k, recipe.mask, mask, causal, lengths, position_ids, layout)
        calls = calls_of(q, k, v, recipe, layout, region, scale, rotated_keys)
        if dropout is not None and dropout != 0:
            backend, drop = _with_dropout(dropout, backend)
            calls = [replace(call, dropout=drop) for call in calls]
        name = _choose(backend, calls)
        need_lse = return_lse or return_entropy
        out, lse = BACKENDS[name].attend(calls, need_lse)
        if not need_lse:
            return out
        lse = lse if name == "reference" else lse.detach()
        entropy = _entropy(name, calls, lse) if return_entropy else None
    return out, Aux(lse if return_lse else None, entropy, name)


def as_recipe(recipe: Recipe | str | None) -> Recipe:
    if isinstance(recipe, str):
        return _texts[recipe] if recipe in _texts else _parse(recipe)
    if recipe is None:
        return Recipe()
    if not isinstance(recipe, Recipe):
        raise ValueError(f"recipe: expected a Recipe, its text or None, got {recipe!r}")
    return recipe


def _parse(text: str) -> Recipe:
    recipe = Recipe.parse(text)
    if not recipe.learned and len(_texts) < MOST_TEXTS:  # a part that learns belongs to its own recipe
        _texts[text] = recipe
    return recipe


def _check_shapes(q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor) or x.dim() != 4:
            got = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(f"{name}: expected a tensor (batch, heads, length, size), got {got}")
        if not x.dtype.is_floating_point:
            raise ValueError(f"{name}: expected a floating-point tensor, got {x.dtype}")
        if x.dtype != q.dtype or x.device != q.device:
            raise ValueError(f"{name}: expected {q.dtype} on {q.device} like q, got {x.dtype} on {x.device}")
        if x.shape[0] != q.shape[0]:
            raise ValueError(f"{name}: expected batch {q.shape[0]} like q, got {x.shape[0]}")
        if 0 in x.shape[1:]:
            raise ValueError(f"{name}: expected at least one head, token and entry, got {tuple(x.shape)}")
    if k.shape[-1] != q.shape[-1]:
        raise ValueError(f"k: expected head size {q.shape[-1]} like q, got {k.shape[-1]}")
    if v.shape[1:3] != k.shape[1:3]:
        raise ValueError(f"v: expected heads and length {tuple(k.shape[1:3])} like k, got {tuple(v.shape[1:3])}")
    if q.shape[1] % k.shape[1]:
        raise ValueError(f"k: expected a number of heads that divides q's {q.shape[1]}, got {k.shape[1]}")


def geometry(
    q: Tensor,
    k: Tensor,
    recipe_mask: Mask | None,
    call_mask: Mask | None,
    causal: bool,
    lengths: Tensor | Sequence[int] | None,
    position_ids: PositionIds | None,
    layout: Layout | None = None,
) -> tuple[Layout, Region]:
    """Where tokens sit, and what each query may see."""
    if call_mask is not None and not isinstance(call_mask, Mask):
        raise ValueError(f"mask: expected a mask such as Document(ids), got {call_mask!r}")
    masks = [mask for mask in (recipe_mask, call_mask) if mask is not None]
    data = [d for mask in masks for d in data_masks(mask)]
    paddings = [d for d in data if isinstance(d, Padding)]
    documents = [d for d in data if isinstance(d, Document)]
    if len(paddings) + (lengths is not None) > 1:
        raise ValueError("lengths: expected lengths or one Padding mask, got more than one")
    if len(documents) > 1:
        raise ValueError(f"mask: expected one Document mask, got {len(documents)}")
    padding = paddings[0] if paddings else None
    if layout is not None:
        if data or lengths is not None or position_ids is not None:
            raise ValueError("layout: expected it alone, got lengths, position_ids, Padding or Document beside it")
        if (layout.queries, layout.keys) != (q.shape[2], k.shape[2]):
            raise ValueError(
                f"layout: expected {q.shape[2]} queries and {k.shape[2]} keys, got {layout.queries} and {layout.keys}"
            )
    layout = layout or layout_of(
        q.shape[0],
        q.shape[2],
        k.shape[2],
        q.device,
        lengths=lengths if padding is None else padding.lengths,
        left_padded=padding is not None and padding.side == "left",
        documents=documents[0].ids if documents else None,
        position_ids=position_ids,
    )
    if data or torch.compiler.is_compiling():
        return layout, layout.simplify(_region(masks, causal))
    region = layout.remember(("region", *masks, causal), lambda: layout.simplify(_region(masks, causal)))
    return layout, region


def _region(masks: list[Mask], causal: bool) -> Region:
    causal = causal or any(mask.causal for mask in masks)
    region = Full().region(causal)
    for mask in masks:
        region = region & mask.region(causal)
    return region


def calls_of(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    recipe: Recipe,
    layout: Layout,
    region: Region,
    scale: float | None,
    rotated_keys: bool,
) -> list[Call]:
    """One call for each branch of the position method that is reached, with everything folded into q and k."""
    score, position = recipe.score or Dot(), recipe.position or NoPE()
    if rotated_keys and not position.keys_cacheable:
        raise ValueError(
            f"rotated_keys: {position.name()} needs raw keys, since a key's angle depends on the query or the length; "
            "cache the keys before rotation"
        )
    if rotated_keys and score.normalises:
        raise ValueError("rotated_keys: cosine scores normalise the keys; cache them before rotation")
    if scale is not None and not (isinstance(scale, (int, float)) and isfinite(scale)):
        raise ValueError(f"scale: expected a finite number or None, got {scale!r}")
    factor = score.factor(q.shape[-1]) if scale is None else float(scale)
    interleaved = getattr(position, "layout", "half") == "interleaved"
    heads, head_dim = q.shape[1], q.shape[-1]
    dtype = wide(q)
    sizes = (region, heads, head_dim, dtype)

    # what does not depend on the values of q, k and v is worked out once for all calls that share the layout
    tau = _shared(layout, recipe.temperature, sizes, lambda: _temperature(recipe.temperature, layout, *sizes))
    turns = _shared(layout, position, (*sizes, rotated_keys), lambda: _turns(position, layout, *sizes, rotated_keys))
    calls = []
    for branch, query_turn, key_turn in turns:
        query = fold(q, query_turn, tau, score.normalises, interleaved)
        key = k if rotated_keys else fold(k, key_turn, None, score.normalises, interleaved)
        calls.append(Call(query, key, v, factor, branch.region, layout, branch.slopes))
    return calls


def _shared(layout: Layout, part: Any, sizes: tuple[Any, ...], make: Callable[[], T]) -> T:
    """What a part says about a layout; a part that learns, or may change otherwise, is asked every time."""
    frozen = isinstance(part, (Temperature, Position)) and not part.learns
    if not frozen or torch.compiler.is_compiling():
        return make()
    token = part.token() if isinstance(part, Position) else None
    return layout.remember((part, token, *sizes), make)


def _temperature(
    law: Any, layout: Layout, region: Region, heads: int, head_dim: int, dtype: torch.dtype
) -> Tensor | None:
    """τ of each query, (batch or 1, heads or 1, queries)."""
    if law is None:
        return None
    n = layout.count(getattr(law, "count", "visible"), region).clamp_min(1)
    # over one key, or none, the softmax is the same at any temperature: no law need be defined there
    n = torch.where(layout.count("visible", region) > 1, n, n.clamp_min(2))[:, None].to(dtype)
    tau: Tensor = law.scale(n, head_dim)
    if tau.dim() != 3 or tau.shape[1] not in (1, heads):
        raise ValueError(f"temperature: expected τ for 1 or {heads} heads, got shape {tuple(tau.shape)}")
    return tau


def _turns(
    position: Position,
    layout: Layout,
    region: Region,
    heads: int,
    head_dim: int,
    dtype: torch.dtype,
    rotated_keys: bool,
) -> list[tuple[Branch, Angles | None, Angles | None]]:
    """The branches that some visible pair falls into at this length, with the angles of their queries and keys."""
    branches = position.branches(layout.query, layout.key, heads)
    cut = [replace(branch, region=layout.simplify(branch.region & region)) for branch in branches]
    reached = [branch for branch in cut if branch.region.spans] or cut[:1]
    if not position.rotates:
        return [(branch, None, None) for branch in reached]
    # frequencies of queries and keys differ only where rows or documents have lengths of their own
    theta_q, theta_k = (position.frequencies(head_dim, n, dtype, layout.device) for n in layout.row_lengths)
    turns = []
    for branch in reached:
        query_turn = angles(branch.query, theta_q, dtype)
        key_turn = query_turn if branch.key is branch.query else angles(branch.key, theta_k, dtype)
        turns.append((branch, query_turn, None if rotated_keys else key_turn))
    return turns


def _with_dropout(dropout: Any, backend: str) -> tuple[str, Callable[[Tensor], Tensor]]:
    if backend not in ("auto", "reference", "dense"):
        raise ValueError(f"backend {backend!r} cannot compute this: it has no attention weights to drop")
    backend = "dense" if backend == "auto" else backend
    if callable(dropout):
        return backend, dropout
    if isinstance(dropout, bool) or not isinstance(dropout, (int, float)) or not 0 <= dropout < 1:
        raise ValueError(f"dropout: expected a number in [0, 1) or a function, got {dropout!r}")
    return backend, partial(F.dropout, p=float(dropout))


def _choose(backend: str, calls: list[Call]) -> str:
    if backend == "auto":
        return _automatic(calls)
    if backend not in BACKENDS:
        raise ValueError(f"backend: expected one of auto, {', '.join(BACKENDS)}, got {backend!r}")
    if (why := BACKENDS[backend].refusal(calls)) is not None:
        raise ValueError(f"backend {backend!r} cannot compute this: {why}")
    return backend


def _automatic(calls: list[Call]) -> str:
    """The fastest backend known for this call."""
    call = calls[0]
    plain = len(calls) == 1 and call.slopes is None and (call.everything or call.causal)
    decoding = call.layout.queries <= FEW_QUERIES  # a mask of that many rows is nothing
    fused = "sdpa" if not call.q.is_cuda or plain or decoding else "flex"
    for name in (fused, "dense" if _table_fits(call) else "chunked"):
        if BACKENDS[name].refusal(calls) is None:
            if not torch.compiler.is_compiling():
                _announce(name, call.q.device.type)
            return name
    raise AssertionError("neither dense nor chunked refuses anything")


def _table_fits(call: Call) -> bool:
    most = LARGEST_TABLE.get(call.q.device.type, 1 << 22)
    if torch.is_grad_enabled() and (call.q.requires_grad or call.v.requires_grad):
        most = min(most, LARGEST_KEPT)
    return call.q.shape[:3].numel() * call.layout.keys <= most


@cache
def _announce(name: str, device: str) -> None:
    """Say once which backend was chosen."""
    logger.info("attention: backend 'auto' runs %s on %s", name, device)


def _entropy(name: str, calls: list[Call], lse: Tensor) -> Tensor:
    """H = Σ_j p_j (L - s_j), branch by branch: with V := K attention returns Σ_j p_j k_j, and s is linear in k."""
    if name == "reference":
        return reference.entropy(calls)
    with torch.no_grad():
        entropy = torch.zeros_like(lse)
        anchor = torch.where(lse == -inf, 0.0, lse)
        for call in calls:
            q, k = call.q.detach(), call.k.detach()
            call = replace(call, q=q, k=k, v=k, dropout=None)
            k_mean, branch = BACKENDS[name].attend([call], True)
            score = compiled(_inner, (q, k_mean), q.shape[-1])(q, k_mean, lse.dtype)
            entropy += torch.exp(branch - anchor) * (anchor - call.scale * score)
            if call.slopes is not None:
                entropy -= _mean_bias(name, call, anchor)
        return entropy.clamp_min(0)  # rounding may put a query that sees one key a little below


def _inner(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    return (a.to(dtype) * b.to(dtype)).sum(-1)


def _mean_bias(name: str, call: Call, anchor: Tensor) -> Tensor:
    """Σ_j p_j bias_j. On each side of the query |Δ| is linear in the key's position, so its mean suffices.

    Positions cancel, all but the distance, so their mean is taken in fp64: by row chunks where the backend has none.
    """
    assert call.slopes is not None
    position = call.layout.key[:, None, :, None].double()
    v = position.expand(call.k.shape[0], call.k.shape[1], -1, 16).contiguous()
    exact = replace(call, q=call.q.double(), k=call.k.double(), v=v)
    backend = BACKENDS[name] if BACKENDS[name].refusal([exact]) is None else chunked
    total = torch.zeros_like(anchor, dtype=torch.float64)
    for sign, side in ((1, band(-inf, 1)), (-1, band(1, inf))):
        region = call.layout.simplify(call.region & side)
        if region.spans:
            at, branch = backend.attend([replace(exact, region=region)], True)
            distance = sign * (call.layout.query[:, None] - at[..., 0])
            total -= torch.exp(branch - anchor) * call.slopes[:, None] * distance
    return total.to(anchor.dtype)
