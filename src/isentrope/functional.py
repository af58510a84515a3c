"""Attention under a recipe: validate, build the call, dispatch it to a backend, return its output."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from isentrope.backends.protocol import GraphPlan, Launch
from isentrope.builder import Inputs, build_call
from isentrope.core.call import AttentionCall
from isentrope.core.dtypes import autocast_disabled
from isentrope.core.layout import Layout
from isentrope.core.layout_checks import PositionIds
from isentrope.dispatch import dispatch, plan_in_graph, prepare
from isentrope.masks import Mask
from isentrope.recipe import Recipe, as_recipe
from isentrope.utils.messages import format_value


@dataclass(frozen=True)
class Aux:
    """What attention returns besides its output, in nats, (batch, heads, queries); and the backend that ran."""

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
    """Compute softmax(τ(n) · s(q, k) + bias) v under a recipe.

    With fewer queries than keys the last query is at the last key of its row that is not padding, the one before it
    at the key before, and so on. A query that sees no key gives zeros (lse -inf, entropy 0).

    Padding is never read: whatever k and v hold in slots that `lengths`, `Padding` or `layout` pads, NaN and inf
    included, changes no output, and their gradients there are 0. A padded query (as many queries as keys, and its own
    slot is padding) is computed like any other, with 0 for what is NaN or inf in it, and on a CPU for 1e15 and more. A
    key that one query sees and another does not, as under `Document` or a window, is no padding: NaN there may reach
    both.

    Args:
        q: queries, (batch, heads, queries, d), as in `torch.nn.functional.scaled_dot_product_attention`.
        k: keys, (batch, kv_heads, keys, d).
        v: values, (batch, kv_heads, keys, dv).
        recipe: a `Recipe`, its text, or None for plain attention.
        causal: no query sees a key ahead of it, at a higher position.
        lengths: unpadded keys per row, (batch,), padding on the right.
        position_ids: positions of the keys (a query has that of its own key), or of the queries alone, or a
            pair (queries, keys). Masks and distances are measured in positions.
        mask: a mask for this call, joined to the recipe's with `&`: `Padding` and `Document` belong here.
        layout: in place of lengths, position_ids, Padding and Document, where a caller has computed the geometry.
        scale: replaces the score's own factor (1/√d, or α); a positive number.
        rotated_keys: k comes from a cache of keys that this recipe's position method has already rotated.
        dropout: share of attention weights set to 0, the others scaled up to match, or a function that does it. A
            regulariser for training at short lengths: it needs the weights themselves, so only "reference" and "dense"
            have it, and "auto" takes dense.
        backend: "reference", "dense", "sdpa", "flex", "chunked", "decode", "band", "blocks": that one, or an error.
            "auto": on a CPU sdpa; on a GPU decode for one query a row, band (since Hopper, in half precision) for two
            regions, windows, padded rows, both directions and entropy, with gradients on Hopper, and for two regions
            elsewhere too; sdpa or flex for the rest; where those refuse, dense at short lengths and chunked at long
            ones; blocks where far keys are chosen (`Retrieve`).
        return_lse: return the log-sum-exp of the scores too; over a single key a temperature is that of two, since its
            law need not be defined at one.
        return_entropy: return the entropy of the attention weights too. It is as exact as the dtype of q and k lets the
            mean score be: about 1e-6 nats in fp32; in bf16 a few hundredths, more where scores are large.

    Returns:
        The output (batch, heads, queries, dv); with return_lse or return_entropy a pair of output and `Aux`, whose
        tensors carry gradients on the reference backend only.

    Raises:
        ValueError: an argument is not as described, or the backend cannot compute this call.
    """
    recipe = as_recipe(recipe).resolve()
    _check_tensors(q, k, v)
    drop = _make_dropout(dropout)
    with autocast_disabled(q):
        inputs = Inputs(q, k, v, mask, causal, lengths, position_ids, layout, scale, rotated_keys, drop)
        result = dispatch(build_call(inputs, recipe), backend, return_lse, return_entropy)
    if not (return_lse or return_entropy):
        return result.out
    return result.out, Aux(result.lse, result.entropy, result.backend)


def build_attention(inputs: Inputs, recipe: Recipe) -> AttentionCall:
    """Return the call that `attention` passes to a backend, for `run_attention`."""
    _check_tensors(inputs.q, inputs.k, inputs.v)
    with autocast_disabled(inputs.q):
        return build_call(inputs, recipe.resolve())


def plan_attention(call: AttentionCall, backend: str) -> GraphPlan | None:
    """Return what computes a call in a graph, and those like it with other tensors; None where nothing does."""
    with autocast_disabled(call.q):
        return plan_in_graph(call, backend)


def run_plan(plan: GraphPlan, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return the output of `attention` by a plan."""
    with autocast_disabled(q):
        return plan.run(q, k, v)


def run_attention(call: AttentionCall, backend: str) -> Tensor:
    """Return the output of `attention`, for a call that was built, or one like it with other tensors."""
    with autocast_disabled(call.q):
        return dispatch(call, backend, need_lse=False, need_entropy=False).out


def prepare_attention(inputs: Inputs, recipe: Recipe, backend: str) -> Launch | None:
    """Return what computes `attention` for tensors laid out like these, as often as needed; None where nothing does.

    Gradients, autocast and torch.func are to be off whenever the launch runs.
    """
    recipe = recipe.resolve()
    _check_tensors(inputs.q, inputs.k, inputs.v)
    return prepare(build_call(inputs, recipe), backend)


def _check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    if not _tensors_fit(q, k, v):
        _explain_tensors(q, k, v)


def _tensors_fit(q: Any, k: Any, v: Any) -> bool:
    """Return whether `_explain_tensors` has nothing to say, with as few calls as that takes."""
    if not (isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor)):
        return False
    shapes = q.shape, k.shape, v.shape
    if not len(shapes[0]) == len(shapes[1]) == len(shapes[2]) == 4:
        return False
    (batch, heads, queries, size), (key_batch, key_heads, keys, key_size), (*like_keys, value_size) = shapes
    if like_keys != [batch, key_heads, keys] or key_batch != batch or key_size != size:
        return False
    if not (heads and key_heads and queries and keys and size and value_size) or heads % key_heads:
        return False
    dtype, device = q.dtype, q.device
    return dtype.is_floating_point and k.dtype == v.dtype == dtype and k.device == v.device == device


def _explain_tensors(q: Any, k: Any, v: Any) -> None:
    """Raise ValueError for the first thing that is wrong with the tensors."""
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


def _make_dropout(dropout: Any) -> Callable[[Tensor], Tensor] | None:
    """Return the function that drops attention weights, or None for none."""
    if dropout is None or callable(dropout):
        return dropout
    if isinstance(dropout, bool) or not isinstance(dropout, (int, float)) or not 0 <= dropout < 1:
        raise ValueError(f"dropout: expected a number in [0, 1) or a function, got {format_value(dropout)}")
    return partial(F.dropout, p=float(dropout)) if dropout else None
