"""Find out how a model attends by running it: which layers, under which mask, rotated by which frequencies.

Two passes over six tokens, with attention outputs set to zero so that both see the same hidden states: one with the
model's own rotation at known positions, one without rotation. What turns the second's queries into the first's is the
model's rotation, whatever its code. Each set of frequencies gets the positions in an order of its own, so
that two sets of equal values can be distinguished.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from itertools import permutations, product
from math import inf
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel

from isentrope.core.region import Region, band
from isentrope.hf.configs import in_eval_mode, with_implementation
from isentrope.hf.rope import (
    LENGTH_DEPENDENT_ROPE_TYPES,
    ROUNDING_MODES,
    ModelRope,
    bind_arguments,
    detect_angle_order,
    find_ropes,
    list_arguments,
    split_angles,
)
from isentrope.hf.sharding import check_unsharded, find_local_heads
from isentrope.parallel.heads import LocalHeads

RECORDING = "isentrope_probe"  # the attention implementation that records
POSITIONS = (0, 1, 5, 11, 23, 47)  # short enough for any model
COMPARED_POSITIONS = 256  # at which cosines are compared to the last bit
FAR_QUERIES = (1 << 20, (1 << 20) + 1, (1 << 20) + 777)  # at which a mask function is evaluated
# arguments of transformers' attention functions that change scores in ways a recipe cannot carry
UNSUPPORTED_ARGUMENTS = {
    "softcap": "a soft cap on attention scores, which no recipe can change; without it (attn_logit_softcapping=None) "
    "the model is another, which measurements must show to work",
    "position_bias": "a learned position bias on attention scores",
}
BESIDE_TEXT = "has attention beside its text's, as of images; extend its text model alone (see the FAQ)"
UNREACHED = "its attention does not go through transformers' AttentionInterface, so queries and keys are out of reach"

QueryAndKey = tuple[Tensor, Tensor]
RopePositions = dict[ModelRope, tuple[int, ...]]  # each set of frequencies and the positions of its recorded pass


class UnsupportedModelError(ValueError):
    """A model that cannot be extended, and why."""


@dataclass(frozen=True)
class LayerInfo:
    """One attention layer of a model."""

    name: str
    module: nn.Module
    index: int
    region: Region  # the keys that its own mask shows, by distance
    heads: int
    head_dim: int
    rope: ModelRope | None
    local_heads: LocalHeads  # those of its heads that are in this process
    receives_positions: bool  # whether the model passes position ids to attention
    eager_attention: Callable[..., tuple[Tensor, Any]] | None  # its model's own function, where there is no SDPA

    @property
    def causal(self) -> bool:
        """Whether no query sees ahead."""
        return all(span.high <= 1 for span in self.region.spans)


@dataclass
class _Recorder:
    """One recorded pass: the calls of attention modules, how rotary modules compute angles, and the hidden states."""

    regions: dict[int, Region | str] = field(default_factory=dict)  # by id of the mask
    masks: list[Tensor] = field(default_factory=list)  # kept alive, so that no two share an id
    calls: dict[nn.Module, tuple[Tensor, Tensor, Region | str | None, dict[str, Any]]] = field(default_factory=dict)
    rope_fields: dict[tuple[nn.Module, str | None], dict[str, Any]] = field(default_factory=dict)
    output: Tensor = field(default_factory=lambda: torch.empty(0))


_recorder: ContextVar[_Recorder] = ContextVar("recorder")
_known_layers: ContextVar[dict[PreTrainedModel, list[LayerInfo]] | None] = ContextVar("known_layers", default=None)


def _record_mask(batch_size: int, q_length: int, device: Any = "cpu", **arguments: Any) -> Tensor:
    recorder = _recorder.get()
    mask = torch.zeros(batch_size, 1, q_length, 3, dtype=torch.int64, device=device)
    recorder.masks.append(mask)
    recorder.regions[id(mask)] = _find_region(arguments, device)
    return mask


def _record_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **arguments: Any
) -> tuple[Tensor, None]:
    recorder = _recorder.get()
    recorder.calls[module] = query, key, recorder.regions.get(id(attention_mask)), arguments
    return value.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[-1]), None


AttentionInterface.register(RECORDING, _record_attention)
AttentionMaskInterface.register(RECORDING, _record_mask)


def _find_region(arguments: dict[str, Any], device: Any) -> Region | str:
    """Find the distances of visible keys from a mask function; return a text where they do not describe it."""
    if arguments.get("use_vmap"):
        return "a mask of its own making"
    function, size = arguments["mask_function"], arguments.get("local_size") or 8
    distances = torch.arange(-size - 1, size + 2, device=device)
    zero = torch.zeros((), dtype=torch.int64, device=device)
    patterns = [
        torch.as_tensor(function(zero, zero, zero + at, zero + at + distances)).expand_as(distances).tolist()
        for at in FAR_QUERIES
    ]
    pattern = patterns[0]
    first, count = pattern.index(True) if True in pattern else 0, sum(pattern)
    if any(other != pattern for other in patterns) or not count or not all(pattern[first : first + count]):
        return "a mask that is not a window over distances (chunked attention, for one)"
    low, high = distances[first].item(), distances[first + count - 1].item() + 1
    return band(-inf if low == distances[0] else low, inf if high > distances[-1] else high)


@contextmanager
def introspect_once() -> Iterator[None]:
    """Introspect every model at most once while the block lasts; inside, `extend` and `restore` alone may change it.

    Introspection takes two passes and many small copies to the host, which outweigh a forward pass on a busy GPU.
    """
    token = _known_layers.set({} if (known := _known_layers.get()) is None else known)
    try:
        yield
    finally:
        _known_layers.reset(token)


def introspect(model: PreTrainedModel) -> list[LayerInfo]:
    """Describe every attention layer of a model, in the order in which they run.

    Raises:
        UnsupportedModelError: a layer was not reached, or computes what no recipe can carry.
    """
    known = _known_layers.get()
    if known is None:
        return _introspect(model)
    if model not in known:
        known[model] = _introspect(model)
    return list(known[model])


def _introspect(model: PreTrainedModel) -> list[LayerInfo]:
    kind = model.config.model_type
    if model.config.is_encoder_decoder:
        raise UnsupportedModelError(f"{kind}: attention across an encoder and a decoder is not supported")
    if model.device.type == "meta":
        raise UnsupportedModelError(f"{kind}: has no data (meta device); load the weights before extending")
    check_unsharded(model, kind)
    ropes = _assign_positions(find_ropes(model))
    eager = set() if model._supports_sdpa else {module for module in model.modules() if _runs_eager(module)}
    expected = {name: module for name, module in model.named_modules() if _is_attention(module)}
    norms = {part for module in expected.values() for part in module.modules() if _is_learned_norm(part)}
    with torch.no_grad(), in_eval_mode(model), with_implementation(model, RECORDING):
        rotated = _record_pass(model, ropes, norms, rotating=True)
        raw = _record_pass(model, ropes, norms, rotating=False)
    missed = [
        name for name, module in expected.items() if module not in rotated.calls and not _is_linear(model.config, name)
    ]
    if missed or not rotated.calls:
        which = f" ({', '.join(missed[:3])}{', …' if len(missed) > 3 else ''})" if missed else ""
        text_layers = set(model.get_decoder().modules())
        beside_text = rotated.calls and not any(expected[name] in text_layers for name in missed)
        raise UnsupportedModelError(f"{kind}: {BESIDE_TEXT if beside_text else UNREACHED}{which}")
    if _compare(rotated.output, raw.output) > _get_tolerance(raw.output):
        raise UnsupportedModelError(f"{kind}: rotates elsewhere than in attention, which no recipe can follow")
    names = {module: name for name, module in model.named_modules()}
    layers: list[LayerInfo] = []
    for order, (module, (query, key, region, arguments)) in enumerate(rotated.calls.items()):
        where = f"{kind}: {names[module]} has"
        for argument, what in UNSUPPORTED_ARGUMENTS.items():
            if arguments.get(argument) is not None:
                raise UnsupportedModelError(f"{where} {what}")
        if not isinstance(region, Region):
            raise UnsupportedModelError(f"{where} {region or 'a mask that was not made by AttentionMaskInterface'}")
        likely = layers[-1].rope if layers else None  # layers mostly rotate alike
        rope = _find_rotation(raw.calls[module][:2], (query, key), _split_by_owner(module, ropes), likely, where)
        if rope is not None:
            rope = replace(rope, **rotated.rope_fields[rope.module, rope.layer_type])
        local_heads = find_local_heads(model, module, query.shape[1])
        index = getattr(module, "layer_idx", None)
        layers.append(
            LayerInfo(
                name=names[module],
                module=module,
                index=order if index is None else int(index),
                region=region,
                heads=local_heads.total,
                head_dim=query.shape[-1],
                rope=rope,
                local_heads=local_heads,
                receives_positions=arguments.get("position_ids") is not None,
                eager_attention=_get_eager_function(module) if module in eager else None,
            )
        )
    return layers


def _assign_positions(ropes: Iterable[ModelRope]) -> RopePositions:
    """Give every set of frequencies an order of POSITIONS that no other has."""
    orders = list(permutations(POSITIONS))
    # 241 is coprime to the number of orders; neighbours in the list differ little, orders 241 apart differ much
    return {rope: orders[241 * index % len(orders)] for index, rope in zip(range(len(orders)), ropes, strict=False)}


def _split_by_owner(module: nn.Module, ropes: RopePositions) -> list[RopePositions]:
    """Return the sets of frequencies inside an attention module, and the others."""
    inside = set(module.modules())
    own = {rope: positions for rope, positions in ropes.items() if rope.module in inside}
    return [own, {rope: positions for rope, positions in ropes.items() if rope not in own}]


def _runs_eager(module: nn.Module) -> bool:
    return getattr(getattr(module, "config", None), "_attn_implementation", None) == "eager"


def _get_eager_function(module: nn.Module) -> Any:
    """Return the function in the file of a transformers model that `attn_implementation="eager"` stands for."""
    return getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)


def _is_attention(module: nn.Module) -> bool:
    """Return whether a module is attention by its name and contains no other that is."""
    named = [child for child in module.modules() if "Attention" in type(child).__name__]
    return named == [module]


def _is_learned_norm(module: nn.Module) -> bool:
    """Return whether a norm has weights, which training makes unequal."""
    return "norm" in type(module).__name__.lower() and any(True for _ in module.parameters())


def _is_linear(config: PreTrainedConfig, name: str) -> bool:
    """Return whether a layer has linear attention, without weights over keys, so that no recipe concerns it."""
    types, index = getattr(config.get_text_config(), "layer_types", None) or (), re.search(r"\.(\d+)(\.|$)", name)
    return index is not None and dict(enumerate(types)).get(int(index[1])) == "linear_attention"


def _record_pass(model: PreTrainedModel, ropes: RopePositions, norms: set[nn.Module], rotating: bool) -> _Recorder:
    recorder = _Recorder()
    token = _recorder.set(recorder)
    with ExitStack() as stack:
        stack.callback(_recorder.reset, token)
        for module in {rope.module for rope in ropes}:
            own = [(rope, positions) for rope, positions in ropes.items() if rope.module is module]
            hook = _RotateAtPositions(own) if rotating else skip_rotation
            stack.callback(module.register_forward_hook(hook, with_kwargs=True).remove)
        for norm in norms:
            stack.callback(norm.register_forward_hook(_scale_unevenly).remove)
        size = getattr(model.config.get_text_config(), "vocab_size", None)
        if size is None:
            raise UnsupportedModelError(f"{model.config.model_type}: reads no tokens, so no text is too long for it")
        ids = torch.arange(1, len(POSITIONS) + 1, device=model.device)[None] % size
        options = {"use_cache": False} if hasattr(model.config, "use_cache") else {}
        try:
            recorder.output = model.base_model(input_ids=ids, **options)[0]
        except UnsupportedModelError:
            raise
        except Exception as error:
            kind = model.config.model_type
            if not recorder.calls:
                raise UnsupportedModelError(f"{kind}: {UNREACHED}") from error
            raise UnsupportedModelError(f"{kind}: attention could not be followed: {error}") from error
    return recorder


class _RotateAtPositions:
    """A hook on a rotary module that returns cos and sin of known positions, by the type of layer in the call."""

    def __init__(self, ropes: list[tuple[ModelRope, tuple[int, ...]]]) -> None:
        self.ropes = {rope.layer_type: (rope, positions) for rope, positions in ropes}

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        options = bind_arguments(list_arguments(module), args, kwargs)
        entry = self.ropes.get(options.get("layer_type"), self.ropes.get(None))
        if entry is None:
            return output
        rope, positions = entry
        position_ids = options["position_ids"]
        options["position_ids"] = torch.tensor(positions, device=position_ids.device).expand_as(position_ids)
        angles = type(module).forward(module, **options)
        if split_angles(angles) is None:
            kind = getattr(getattr(module, "config", None), "model_type", type(module).__name__)
            raise UnsupportedModelError(f"{kind}: rotates by other than cosines and sines, which no recipe can change")
        _recorder.get().rope_fields[module, rope.layer_type] = _detect_rope_fields(rope, options)
        return angles


def _detect_rope_fields(rope: ModelRope, options: dict[str, Any]) -> dict[str, Any]:
    """Find fields of a `ModelRope` by calling its module with other frequencies and positions."""
    forward, theta, scaling = type(rope.module).forward, rope.theta, rope.scaling
    rope.write(torch.zeros_like(theta), scaling)
    angles: Any = forward(rope.module, **options)
    rope.write(theta, scaling)
    _, sine = split_angles(angles) or angles
    fields: dict[str, Any] = {"reads_buffer": not bool(sine.any())}
    if isinstance(angles, Tensor):
        fields["angle_order"] = "complex"
    elif rope.kind not in LENGTH_DEPENDENT_ROPE_TYPES:  # those would keep the frequencies of a long text
        position_ids = options["position_ids"]
        positions = torch.arange(COMPARED_POSITIONS, device=position_ids.device)
        options = options | {"position_ids": positions.expand(*position_ids.shape[:-1], COMPARED_POSITIONS)}
        fields["angle_order"] = detect_angle_order(rope, positions[None], forward(rope.module, **options))
    return fields


def _scale_unevenly(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    """A hook on a norm in an attention module: scale entries unequally, as after training.

    A norm after the rotation (HunYuan) commutes with it only while its weights are equal, as in a new model.
    """
    if not isinstance(output, Tensor):
        return output
    return output * torch.linspace(0.5, 1.5, output.shape[-1], device=output.device, dtype=output.dtype)


def skip_rotation(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    """A hook on a rotary module: leave queries and keys as they are, with cos 1 and sin 0."""
    if isinstance(output, Tensor):
        return torch.ones_like(output)
    return torch.ones_like(output[0]), torch.zeros_like(output[1])


def _find_rotation(
    raw: QueryAndKey, rotated: QueryAndKey, candidates: list[RopePositions], likely: ModelRope | None, where: str
) -> ModelRope | None:
    """Find what rotates the raw queries and keys into the others: `likely` if it is exact; None if nothing rotates."""
    if all(torch.equal(a, b) for a, b in zip(raw, rotated, strict=True)):
        return None
    tolerance = max(map(_get_tolerance, raw))  # under autocast they differ
    for ropes, unusual in product(candidates, (False, True)):
        matches: list[tuple[float, ModelRope, tuple[int, ...]]] = []
        for rope, positions in ropes.items():
            if 2 * rope.theta.shape[-1] > raw[0].shape[-1]:
                continue
            if likely is not None and likely.same(rope) and _find_exact([likely], raw, rotated, positions):
                return likely
            for candidate in _arrange(rope, raw[0].shape[-1], unusual):
                matches.append((_rotation_error(candidate, raw, rotated, positions), candidate, positions))
        if matches and (least := min(matches, key=lambda match: match[0]))[0] <= tolerance:
            _, best, positions = least
            roundings = [replace(best, rounds_angles=a, multiplies_in_fp32=b) for a, b in ROUNDING_MODES]
            return _find_exact(roundings, raw, rotated, positions) or best
    raise UnsupportedModelError(f"{where} a rotation {ModelRope.describe_unknown(raw[0], rotated[0])}")


def _arrange(rope: ModelRope, head_dim: int, unusual: bool) -> list[ModelRope]:
    """Return a rotation in the two layouts of pairs; of the last entries of a head, or backwards, where `unusual`."""
    size = 2 * rope.theta.shape[-1]
    roll = 0 if not unusual else size if size < head_dim else size // 2
    layouts = (False,) if unusual and size == head_dim else (False, True)
    return [replace(rope, interleaved=interleaved, roll=roll) for interleaved in layouts]


def _rotation_error(rope: ModelRope, raw: QueryAndKey, rotated: QueryAndKey, positions: tuple[int, ...]) -> float:
    """Return how far a rotation is from the model's own, as a share of the largest entry."""
    pairs = [(rope.rotate(x, _to_tensor(positions, x.device)), y) for x, y in zip(raw, rotated, strict=True)]
    return max(_compare(a, b) for a, b in pairs)


def _compare(a: Tensor, b: Tensor) -> float:
    """Return the largest difference, as a share of the largest entry."""
    return ((a.float() - b.float()).abs().max() / b.float().abs().max()).item()


def _get_tolerance(x: Tensor) -> float:
    return 1e-4 if x.dtype in (torch.float32, torch.float64) else 3e-2


def _to_tensor(positions: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(positions, device=device)[None]


def _find_exact(
    ropes: list[ModelRope], raw: QueryAndKey, rotated: QueryAndKey, positions: tuple[int, ...]
) -> ModelRope | None:
    """Return the first rotation that gives the model's numbers to the bit, where one does."""
    at = _to_tensor(positions, raw[0].device)
    pairs = tuple(zip(raw, rotated, strict=True))
    return next((rope for rope in ropes if all(torch.equal(rope.rotate(x, at), y) for x, y in pairs)), None)
