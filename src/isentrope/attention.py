"""Attention under a recipe: what is asked goes to the backend that is best at it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from isentrope.backends import chunked, dense, flex, merge, reference, sdpa
from isentrope.backends.band import backend as banded
from isentrope.backends.decode import backend as decode
from isentrope.backends.padding import blank_padding
from isentrope.builder import build_call
from isentrope.core.call import AttentionCall, FoldedBranch
from isentrope.core.compile import maybe_compile
from isentrope.core.dtypes import autocast_disabled
from isentrope.core.layout import Layout
from isentrope.core.layout_checks import PositionIds
from isentrope.core.region import band
from isentrope.masks import Mask
from isentrope.recipe import Recipe
from isentrope.utils.text import format_value

BACKENDS: dict[str, ModuleType] = {
    "reference": reference, "dense": dense, "sdpa": sdpa, "flex": flex, "chunked": chunked
}  # fmt: skip
RAW: dict[str, ModuleType] = {"decode": decode, "band": banded}  # these fold what is asked themselves
logger = logging.getLogger("isentrope")
MOST_TEXTS = 256
FEW_QUERIES = 16
# entries of q: without gradients, more are worked on a few heads at a time
AT_ONCE = 1 << 27  # of branches, whose parts are held until they are merged
COUNTED = (1 << 31) - 1  # of a biased one: beyond these FlexAttention counts in 64 bits, and takes twice as long
# weights worth having all at once, by measurement: until they leave a CPU's caches, or crowd a GPU's memory
LARGEST_TABLE = {"cpu": 1 << 22, "cuda": 1 << 29}
LARGEST_KEPT = 1 << 26  # where a backward will want them again
NOTHING = Recipe()
_texts: dict[str, Recipe] = {}
_announced: set[tuple[str, str]] = set()


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
    key of its row that is not padding, the one before it at the key before, and so on.

    causal: no query sees a key ahead of it.
    lengths: unpadded keys per row, (batch,), padding on the right.
    position_ids: positions of the keys (a query has that of the key it stands at), or of the queries alone, or a pair
        (queries, keys). Masks and distances are measured in positions.
    mask: a mask for this call, joined to the recipe's with `&`: `Padding` and `Document` belong here.
    layout: in place of lengths, position_ids, Padding and Document, where a caller has made the geometry beforehand.
    scale: replaces the score's own factor (1/√d, or α); a positive number.
    rotated_keys: k comes from a cache of keys that this recipe's position method has already rotated.
    dropout: share of attention weights set to 0, the others scaled up to match, or a function that does it. A
        regulariser for training at short lengths: it needs the weights themselves, so only "reference" and "dense" have
        it, and "auto" takes dense.
    backend: "reference", "dense", "sdpa", "flex", "chunked", "decode", "band": that one, or a ValueError that says why
        it cannot. "auto": on a CPU sdpa; on a GPU decode for one query a row, band (since Hopper, in half precision)
        for two regions and, without gradients, for windows, sdpa or flex for the rest; where those refuse, dense at
        short lengths and chunked at long ones.
    return_lse, return_entropy: return (output, `Aux`) with the log-sum-exp of the scores and the entropy of the
        attention weights. They carry gradients on the reference backend only. Entropy is as exact as the dtype of q and
        k lets the mean score be: about 1e-6 nats in fp32; in bf16 a few hundredths, more where scores are large.

    A query that sees no key gives zeros (lse -inf, entropy 0).

    Padding is never read: whatever k and v hold in slots that `lengths`, `Padding` or `layout` pads, NaN and inf
    included, changes no output, and their gradients there are 0. A padded query (as many queries as keys, and its own
    slot is padding) is computed like any other, with 0 for what is NaN or inf in it. A key that one query sees and
    another does not, as under `Document` or a window, is no padding: NaN there may reach both.
    """
    recipe = as_recipe(recipe).resolve()
    _check_shapes(q, k, v)
    with autocast_disabled(q):
        asked = build_call(q, k, v, recipe, mask, causal, lengths, position_ids, layout, scale, rotated_keys)
        biased = asked.branches[0].slopes is not None
        most = AT_ONCE if len(asked.branches) > 1 else COUNTED if biased else q.numel()
        options = (dropout, backend, return_lse, return_entropy)
        whole = q.numel() <= most or torch.is_grad_enabled() or torch.compiler.is_compiling()
        if whole or (backend in ("auto", "band") and not return_entropy and banded.alone(asked)):
            out, aux = _attended(asked, *options)
        else:
            out, aux = _by_heads(asked, most, *options)
    return (out, aux) if return_lse or return_entropy else out


def _attended(
    asked: AttentionCall, dropout: Any, backend: str, return_lse: bool, return_entropy: bool
) -> tuple[Tensor, Aux]:
    for name in RAW if backend == "auto" else [name for name in RAW if name == backend]:
        why = "it has no attention weights to drop" if dropout else RAW[name].refusal(asked)
        if why is None:
            if backend == "auto":
                _announce(name, asked.q.device.type)
            out, lse = RAW[name].attend(asked)
            with torch.no_grad():
                entropy = _entropy(name, blank_padding(asked).folded(), lse) if return_entropy else None
            return out, Aux(lse if return_lse else None, entropy, name)
        if backend == name:
            raise ValueError(f"backend {name!r} cannot compute this: {why}")
    calls = blank_padding(asked).folded()
    if dropout is not None and dropout != 0:
        backend, drop = _with_dropout(dropout, backend)
        calls = [replace(call, dropout=drop) for call in calls]
    name = _choose(backend, calls)
    out, lse = BACKENDS[name].attend(calls, return_lse or return_entropy)
    if not (return_lse or return_entropy):
        return out, Aux(None, None, name)
    lse = lse if name == "reference" else lse.detach()
    entropy = _entropy(name, calls, lse) if return_entropy else None
    return out, Aux(lse if return_lse else None, entropy, name)


def _by_heads(asked: AttentionCall, most: int, *options: Any) -> tuple[Tensor, Aux]:
    """A few heads after the others: what is folded, and the branches before they are merged, take that much less."""
    q, v, shares = asked.q, asked.v, list(asked.split_heads(most))
    if len(shares) == 1:
        return _attended(asked, *options)
    out = q.new_empty(*q.shape[:-1], v.shape[-1])
    told = []
    for heads, share in shares:
        out[:, heads], aux = _attended(share, *options)
        told.append(aux)
    lse, entropy = (
        None if getattr(told[0], name) is None else torch.cat([getattr(aux, name) for aux in told], 1)
        for name in ("lse", "entropy")
    )
    return out, Aux(lse, entropy, told[0].backend)


def as_recipe(recipe: Recipe | str | None) -> Recipe:
    if isinstance(recipe, str):
        return _texts[recipe] if recipe in _texts else _parse(recipe)
    if recipe is None:
        return NOTHING
    if not isinstance(recipe, Recipe):
        raise ValueError(f"recipe: expected a Recipe, its text or None, got {format_value(recipe)}")
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


def _with_dropout(dropout: Any, backend: str) -> tuple[str, Callable[[Tensor], Tensor]]:
    if backend not in ("auto", "reference", "dense"):
        raise ValueError(f"backend {backend!r} cannot compute this: it has no attention weights to drop")
    backend = "dense" if backend == "auto" else backend
    if callable(dropout):
        return backend, dropout
    if isinstance(dropout, bool) or not isinstance(dropout, (int, float)) or not 0 <= dropout < 1:
        raise ValueError(f"dropout: expected a number in [0, 1) or a function, got {format_value(dropout)}")
    return backend, partial(F.dropout, p=float(dropout))


def _choose(backend: str, calls: list[FoldedBranch]) -> str:
    if backend == "auto":
        return _automatic(calls)
    if backend not in BACKENDS:
        raise ValueError(f"backend: expected one of auto, {', '.join((*BACKENDS, *RAW))}, got {format_value(backend)}")
    if (why := BACKENDS[backend].refusal(calls)) is not None:
        raise ValueError(f"backend {backend!r} cannot compute this: {why}")
    return backend


def _automatic(calls: list[FoldedBranch]) -> str:
    """The fastest backend known for this call."""
    for name in (_fastest(calls), "dense" if _table_fits(calls[0]) else "chunked"):
        if BACKENDS[name].refusal(calls) is None:
            _announce(name, calls[0].q.device.type)
            return name
    raise AssertionError("neither dense nor chunked refuses anything")


def _fastest(calls: list[FoldedBranch]) -> str:
    """The fused backend to ask."""
    call = calls[0]
    plain = len(calls) == 1 and call.slopes is None and (call.everything or call.causal)
    if not call.q.is_cuda or plain or call.layout.queries <= FEW_QUERIES:  # a mask of that many rows is nothing
        return "sdpa"
    if torch.compiler.is_compiling() or not all(sdpa.fused(call) for call in calls):
        return "flex"
    # its triangles are that much the faster that its bands may be the slower
    return "sdpa" if any(sdpa.triangular(call) for call in calls) else "flex"


def _table_fits(call: FoldedBranch) -> bool:
    most = LARGEST_TABLE.get(call.q.device.type, 1 << 22)
    if torch.is_grad_enabled() and (call.q.requires_grad or call.v.requires_grad):
        most = min(most, LARGEST_KEPT)
    return call.q.shape[:3].numel() * call.layout.keys <= most


def _announce(name: str, device: str) -> None:
    """Say once which backend was chosen."""
    if not torch.compiler.is_compiling() and (name, device) not in _announced:
        _announced.add((name, device))
        logger.info("attention: backend 'auto' runs %s on %s", name, device)


def _entropy(name: str, calls: list[FoldedBranch], lse: Tensor) -> Tensor:
    """H = Σ_j p_j (L - s_j), branch by branch: with V := K attention returns Σ_j p_j k_j, and s is linear in k."""
    if name == "reference":
        return reference.entropy(calls)
    with torch.no_grad():
        entropy = torch.zeros_like(lse)
        anchor = torch.where(lse == -inf, 0.0, lse)
        for call in calls:
            q, k = call.q.detach(), call.k.detach()
            call = replace(call, q=q, k=k, v=k, dropout=None)
            k_mean, branch = _branch(name, call)
            score = maybe_compile(_inner, (q, k_mean), q.shape[-1])(q, k_mean, lse.dtype)
            entropy += torch.exp(branch - anchor) * (anchor - call.scale * score)
            if call.slopes is not None:
                entropy -= _mean_bias(name, call, anchor)
        return entropy.clamp_min(0)  # rounding may put a query that sees one key a little below


def _branch(name: str, call: FoldedBranch) -> tuple[Tensor, Tensor]:
    if name in BACKENDS:
        return BACKENDS[name].attend([call], True)
    asked = call.unfolded
    return merge.attend(sdpa.KERNEL, [call]) if RAW[name].refusal(asked) else RAW[name].attend(asked)


def _inner(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    return (a.to(dtype) * b.to(dtype)).sum(-1)


def _mean_bias(name: str, call: FoldedBranch, anchor: Tensor) -> Tensor:
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
