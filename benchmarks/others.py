"""What users would run instead, in the same process on the same inputs, each written out from its formula.

- transformers' own YaRN (`rope_parameters`), its attention on sdpa and on flex_attention: a model of two layers,
  against the same weights under our recipe.
- x-transformers' cosine similarity attention (`qk_norm`) with interpolated rotary positions: plain PyTorch and SDPA.
- SelfExtend as LongLM describes it, and ReRoPE as its author's blog does: two matrices of scores, merged with where().

The results of both sides are compared first; the ratio is ours to theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from inputs import AWAY, Inputs, rope
from measure import Call, Job, Row, Sizes, compared, shorten
from methods import Method, branched
from torch import Tensor
from torch.nn import functional as F

import isentrope as ise
from isentrope.core.caching import clear_caches

QK_NORM_SCALE, FACTOR = 10.0, 4.0  # x-transformers' default; of interpolation, and of YaRN
GROUP, BASE = 8, 1e4
LAYERS = 2


def others(size: Sizes, inputs: Inputs) -> Iterator[Job]:
    """Ours against each, from the shortest length on; a matrix of scores may not fit at the longest."""
    rerope, _, selfextend = branched(size.windows[0])
    cosine = Method("cosine + PI", f"pi:factor={FACTOR:g}+cosine:alpha={QK_NORM_SCALE:g}")
    window = size.windows[0]
    planned: list[tuple[Method, str, Callable[[Inputs], Tensor]]] = [
        (cosine, "x-transformers' way", qk_norm_attention),
        (rerope, "two score matrices", partial(rerope_attention, window=window)),
        (selfextend, "LongLM's way", partial(self_extend_attention, window=window, group=GROUP)),
    ]
    for n in (size.short // 4, size.short // 2, size.short):
        for method, name, formula in planned:
            work = partial(_compare_attention, size, inputs, method, name, formula, n)
            yield Job("others", f"{method.name} against {name}", n, work)
    inputs.free()
    for implementation in ("sdpa", "flex_attention") if size.device == "cuda" else ("sdpa",):
        lengths = (size.short // 4, size.short // 2, size.short)
        for n in lengths if implementation == "sdpa" else lengths[::2]:  # FlexAttention compiles for new lengths
            name = f"YaRN against transformers' own, {implementation}"
            yield Job("others", name, n, partial(_compare_yarn, size, implementation, n))


def _compare_attention(
    size: Sizes, inputs: Inputs, method: Method, name: str, formula: Callable[[Inputs], Tensor], n: int
) -> Row:
    at = inputs.at(n)
    call = at.call(method)

    def theirs() -> Tensor:
        with torch.no_grad():
            return formula(at)

    note = check_close(call, theirs)
    return compared(shorten(size), call, theirs, name, flops=method.flops(n, size)) | {"note": note}


def check_close(ours: Call, theirs: Call) -> str:
    """Return how far two results are apart, relative to their size; more than bf16 accounts for is an error."""
    x, y = (call().float() for call in (ours, theirs))  # type: ignore[attr-defined]
    found = float((x - y).norm() / y.norm())
    if not found < AWAY:
        raise AssertionError(f"{found:.1%} apart: not the same method")
    return f"{found:.1%} apart"


def qk_norm_attention(at: Inputs) -> Tensor:
    """Unit queries and keys, rotated at positions divided by a factor, scores times a fixed scale."""
    angle = _list_positions(at) / FACTOR * _list_frequencies(at)
    q, k = (rope(F.normalize(x, dim=-1), angle.cos(), angle.sin()) for x in (at.q, at.k))
    return F.scaled_dot_product_attention(q, k, at.v, is_causal=True, scale=QK_NORM_SCALE)


def rerope_attention(at: Inputs, window: int) -> Tensor:
    """Scores of rotated queries and keys, and of queries at position w and keys at 0 from distance w on."""
    position, frequencies = _list_positions(at), _list_frequencies(at)
    near = _score(at, position * frequencies, position * frequencies)
    far = _score(at, (0 * position + window) * frequencies, None)
    return _merge(at, near, far, window)


def self_extend_attention(at: Inputs, window: int, group: int) -> Tensor:
    """Scores at the positions, and at positions divided by a group, queries moved up, from distance w on."""
    position, frequencies = _list_positions(at), _list_frequencies(at)
    near = _score(at, position * frequencies, position * frequencies)
    grouped = position // group
    far = _score(at, (grouped + window - window // group) * frequencies, grouped * frequencies)
    return _merge(at, near, far, window)


def _list_positions(at: Inputs) -> Tensor:
    return torch.arange(at.n, device=at.q.device)[:, None]


def _list_frequencies(at: Inputs) -> Tensor:
    d = at.q.shape[-1]
    return BASE ** (-torch.arange(0, d, 2, device=at.q.device) / d)


def _score(at: Inputs, query_angle: Tensor, key_angle: Tensor | None) -> Tensor:
    q = rope(at.q, query_angle.cos(), query_angle.sin())
    k = at.k if key_angle is None else rope(at.k, key_angle.cos(), key_angle.sin())
    return (q @ k.mT).mul_(q.shape[-1] ** -0.5)


def _merge(at: Inputs, near: Tensor, far: Tensor, window: int) -> Tensor:
    position = _list_positions(at)
    distance = position - position.T
    scores = torch.where(distance < window, near, far).masked_fill_(distance < 0, -torch.inf)
    return scores.softmax(-1, dtype=torch.float32).to(at.v.dtype) @ at.v


def _compare_yarn(size: Sizes, implementation: str, n: int) -> Row:
    """A forward pass of both models, without a cache."""
    trained = size.short // 4
    yarn = {"rope_type": "yarn", "factor": FACTOR, "original_max_position_embeddings": trained}
    theirs = make_model(size, implementation, {**yarn, "rope_theta": BASE})
    ours = make_model(size, "sdpa", {"rope_type": "default", "rope_theta": BASE})
    ours.load_state_dict(theirs.state_dict())
    ise.extend(ours, f"yarn:factor={FACTOR:g},original_length={trained}+yarntemperature:factor={FACTOR:g}")
    ids = torch.randint(10, 100, (1, n), device=size.device)

    def run(model: Any) -> Tensor:
        with torch.no_grad():
            return model(input_ids=ids, use_cache=False).last_hidden_state

    note = check_close(partial(run, ours), partial(run, theirs))
    row = compared(shorten(size), partial(run, ours), partial(run, theirs), f"transformers, {implementation}")
    clear_caches(keep_compiled=True)
    return row | {"note": f"{LAYERS} layers; {note}"}


def make_model(size: Sizes, implementation: str, rope_parameters: dict[str, Any]) -> Any:
    """A Llama of few layers whose time is mostly attention."""
    from transformers import AutoModel, LlamaConfig

    hidden = size.heads * size.size
    shape = {"hidden_size": hidden, "intermediate_size": hidden, "vocab_size": 128, "num_hidden_layers": LAYERS}
    heads = {"num_attention_heads": size.heads, "num_key_value_heads": size.heads}
    config = LlamaConfig(**shape, **heads, max_position_embeddings=size.short, rope_parameters=rope_parameters)
    torch.manual_seed(0)
    # a model cast to bf16 afterwards would have frequencies in bf16
    model = AutoModel.from_config(config, dtype=size.dtype, attn_implementation=implementation)
    return model.to(size.device).eval()
