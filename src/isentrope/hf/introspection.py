"""How a model attends, found by watching it: which layers, under which mask, rotated by which frequencies.

Two passes over six tokens, with attention outputs set to zero so that both see the same hidden states: one with the
model's own rotation at known positions, one with none. What turns the second's queries into the first's is the model's
rotation, whatever its code looks like. Each set of frequencies is given the positions in an order of its own, so that
two sets of the same values are told apart by the layers that they reach.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from itertools import permutations
from math import inf
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel

from isentrope.core.region import Region, band
from isentrope.hf.rope import BY_LENGTH, ROUNDINGS, Rope, argument_names, doubling, named_arguments, ropes
from isentrope.hf.sharding import Heads, check_unsharded, heads_here

NAME = "isentrope_probe"
POSITIONS = (0, 1, 5, 11, 23, 47)  # short enough for any model
FAR = 256  # positions at which cosines are compared to the last bit
# arguments of transformers' attention functions that change scores in ways a recipe cannot carry
UNKNOWN_ARGUMENTS = {
    "softcap": "a soft cap on attention scores, which no temperature passes through (it can be set to None)",
    "position_bias": "a learned position bias on attention scores",
}


UNREACHED = "its attention does not go through transformers' AttentionInterface, so queries and keys are out of reach"


class UnsupportedModelError(ValueError):
    """A model that cannot be extended, and why."""


@dataclass(frozen=True)
class Attending:
    """One attention layer as it was seen."""

    name: str
    module: nn.Module
    index: int
    band: Region
    heads: int
    head_dim: int
    rope: Rope | None
    here: Heads  # those of its heads that are in this process
    placed: bool  # whether it is told the positions of its queries
    eager: Callable[..., tuple[Tensor, Any]] | None  # its model's own function, where there is no SDPA


@dataclass
class _Recorder:
    """What a pass saw: per attention module its query, key, mask and arguments; per rotary module its own answers."""

    bands: dict[int, Region | str] = field(default_factory=dict)
    masks: list[Tensor] = field(default_factory=list)  # kept alive, so that no two share an id
    seen: dict[nn.Module, tuple[Tensor, Tensor, Region | str | None, dict[str, Any]]] = field(default_factory=dict)
    rotary: dict[tuple[nn.Module, str | None], dict[str, Any]] = field(default_factory=dict)


_recorder: ContextVar[_Recorder] = ContextVar("recorder")


def _watch_mask(batch_size: int, q_length: int, device: Any = "cpu", **arguments: Any) -> Tensor:
    recorder = _recorder.get()
    mask = torch.zeros(batch_size, 1, q_length, 3, dtype=torch.int64, device=device)
    recorder.masks.append(mask)
    recorder.bands[id(mask)] = _band(arguments, device)
    return mask


def _watch_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **arguments: Any
) -> tuple[Tensor, None]:
    recorder = _recorder.get()
    recorder.seen[module] = query, key, recorder.bands.get(id(attention_mask)), arguments
    return value.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[-1]), None


AttentionInterface.register(NAME, _watch_attention)
AttentionMaskInterface.register(NAME, _watch_mask)


def _band(arguments: dict[str, Any], device: Any) -> Region | str:
    """Which keys a mask function shows, as distances; or what is wrong with it."""
    if arguments.get("use_vmap"):
        return "a mask of its own making"
    function, size = arguments["mask_function"], arguments.get("local_size") or 8
    far = torch.arange(-size - 1, size + 2, device=device)
    zero = torch.zeros((), dtype=torch.int64, device=device)
    patterns = [
        torch.as_tensor(function(zero, zero, zero + at, zero + at + far)).expand_as(far).tolist()
        for at in (1 << 20, (1 << 20) + 1, (1 << 20) + 777)
    ]
    pattern = patterns[0]
    first, count = pattern.index(True) if True in pattern else 0, sum(pattern)
    if any(other != pattern for other in patterns) or not count or not all(pattern[first : first + count]):
        return "a mask that is not a window over distances (chunked attention, for one)"
    low, high = far[first].item(), far[first + count - 1].item() + 1
    return band(-inf if low == far[0] else low, inf if high > far[-1] else high)


def probe(model: PreTrainedModel) -> list[Attending]:
    """Every attention layer of a model, in order; raises where one was not reached or not understood."""
    kind = model.config.model_type
    if model.config.is_encoder_decoder:
        raise UnsupportedModelError(f"{kind}: attention across an encoder and a decoder is not supported")
    if model.device.type == "meta":
        raise UnsupportedModelError(f"{kind}: has no data (meta device); load the weights before extending")
    check_unsharded(model, kind)
    found = _with_positions(ropes(model))
    eager = set() if model._supports_sdpa else {module for module in model.modules() if _runs_eager(module)}
    with torch.no_grad(), _at_rest(model), _implementation(model, NAME):
        turned = _watch(model, found, rotating=True)
        raw = _watch(model, found, rotating=False)
    expected = {name: module for name, module in model.named_modules() if _attends(module)}
    missed = [name for name, module in expected.items() if module not in turned.seen]
    if missed or not turned.seen:
        which = f" ({', '.join(missed[:3])}{', …' if len(missed) > 3 else ''})" if missed else ""
        raise UnsupportedModelError(f"{kind}: {UNREACHED}{which}")
    names = {module: name for name, module in model.named_modules()}
    layers = []
    for order, (module, (query, key, mask, arguments)) in enumerate(turned.seen.items()):
        where = f"{kind}: {names[module]} has"
        for argument, what in UNKNOWN_ARGUMENTS.items():
            if arguments.get(argument) is not None:
                raise UnsupportedModelError(f"{where} {what}")
        if not isinstance(mask, Region):
            raise UnsupportedModelError(f"{where} {mask or 'a mask that was not made by AttentionMaskInterface'}")
        rope = _rotation(raw.seen[module][:2], (query, key), _near(module, found), where)
        if rope is not None:
            rope = replace(rope, **turned.rotary[rope.module, rope.layer_type])
        here = heads_here(model, module, query.shape[1])
        index = getattr(module, "layer_idx", None)
        layers.append(
            Attending(
                name=names[module],
                module=module,
                index=order if index is None else int(index),
                band=mask,
                heads=here.total,
                head_dim=query.shape[-1],
                rope=rope,
                here=here,
                placed=arguments.get("position_ids") is not None,
                eager=_eager_function(module) if module in eager else None,
            )
        )
    return layers


Placed = dict[Rope, tuple[int, ...]]  # each set of frequencies with the positions that it is watched at


def _with_positions(found: Iterable[Rope]) -> Placed:
    """Every set with an order of POSITIONS that no other has."""
    orders = list(permutations(POSITIONS))
    # 241 and the number of orders have no common factor: neighbours in the list differ little, these much
    return {rope: orders[241 * index % len(orders)] for index, rope in zip(range(len(orders)), found, strict=False)}


def _near(module: nn.Module, found: Placed) -> list[Placed]:
    """The sets that an attention module holds itself, and the others."""
    own = set(module.modules())
    held = {rope: positions for rope, positions in found.items() if rope.module in own}
    return [held, {rope: positions for rope, positions in found.items() if rope not in held}]


def _runs_eager(module: nn.Module) -> bool:
    return getattr(getattr(module, "config", None), "_attn_implementation", None) == "eager"


def _eager_function(module: nn.Module) -> Any:
    """The attention function in the file of a transformers model, which `attn_implementation="eager"` stands for."""
    return getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)


def _attends(module: nn.Module) -> bool:
    """Whether a module looks like attention and holds nothing that does."""
    named = [child for child in module.modules() if "Attention" in type(child).__name__]
    return named == [module]


def _watch(model: PreTrainedModel, found: Placed, rotating: bool) -> _Recorder:
    recorder = _Recorder()
    token = _recorder.set(recorder)
    with ExitStack() as stack:
        stack.callback(_recorder.reset, token)
        for module in {rope.module for rope in found}:
            own = [(rope, positions) for rope, positions in found.items() if rope.module is module]
            handle = module.register_forward_hook(_AtPositions(own) if rotating else unrotated, with_kwargs=True)
            stack.callback(handle.remove)
        for norm in {part for attending in model.modules() if _attends(attending) for part in attending.modules()}:
            if "norm" in type(norm).__name__.lower():
                stack.callback(norm.register_forward_hook(_uneven).remove)
        size = model.config.get_text_config().vocab_size
        ids = torch.arange(1, len(POSITIONS) + 1, device=model.device)[None] % size
        options = {"use_cache": False} if hasattr(model.config, "use_cache") else {}
        try:
            model.base_model(input_ids=ids, **options)
        except UnsupportedModelError:
            raise
        except Exception as error:
            kind = model.config.model_type
            if not recorder.seen:
                raise UnsupportedModelError(f"{kind}: {UNREACHED}") from error
            raise UnsupportedModelError(f"{kind}: attention could not be followed: {error}") from error
    return recorder


class _AtPositions:
    """A hook on a rotary module: its answer for known positions, by the type of layer that it is asked for."""

    def __init__(self, sets: list[tuple[Rope, tuple[int, ...]]]) -> None:
        self.sets = {rope.layer_type: (rope, positions) for rope, positions in sets}

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        options = named_arguments(argument_names(module), args, kwargs)
        known = self.sets.get(options.get("layer_type"), self.sets.get(None))
        if known is None:
            return output
        rope, positions = known
        given = options["position_ids"]
        options["position_ids"] = torch.tensor(positions, device=given.device).expand_as(given)
        answer = type(module).forward(module, **options)
        if not isinstance(answer, tuple) or len(answer) != 2:
            kind = getattr(getattr(module, "config", None), "model_type", type(module).__name__)
            raise UnsupportedModelError(
                f"{kind}: rotates by complex numbers, in place of cosines and sines, which no recipe can change yet"
            )
        _recorder.get().rotary[module, rope.layer_type] = _habits(rope, options)
        return answer


def _habits(rope: Rope, options: dict[str, Any]) -> dict[str, Any]:
    """How a rotary module comes to its answers, as fields of its `Rope`, by asking it for others."""
    forward, theta, scaling = type(rope.module).forward, rope.theta, rope.scaling
    rope.write(torch.zeros_like(theta), scaling)
    sine = forward(rope.module, **options)[1]
    rope.write(theta, scaling)
    habits: dict[str, Any] = {"follows": not bool(sine.any())}
    if rope.kind not in BY_LENGTH:  # those would remember having been asked for a long text
        given = options["position_ids"]
        far = torch.arange(FAR, device=given.device)
        options = options | {"position_ids": far.expand(*given.shape[:-1], FAR)}
        habits["doubled"] = doubling(rope, far[None], forward(rope.module, **options))
    return habits


def _uneven(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    """A hook on a norm in an attention module: its answer as after training, not all entries alike.

    A norm after the rotation (HunYuan) does not matter to it while its weights are equal, and would later.
    """
    if not isinstance(output, Tensor):
        return output
    return output * torch.linspace(0.5, 1.5, output.shape[-1], device=output.device, dtype=output.dtype)


def unrotated(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    """A rotary module's answer that leaves queries and keys as they are: cos 1, sin 0."""
    return torch.ones_like(output[0]), torch.zeros_like(output[1])


def _rotation(
    raw: tuple[Tensor, Tensor], turned: tuple[Tensor, Tensor], found: list[Placed], where: str
) -> Rope | None:
    """The frequencies that turn the raw queries and keys into the others; None if nothing turns."""
    if all(torch.equal(a, b) for a, b in zip(raw, turned, strict=True)):
        return None
    tolerance = 1e-4 if raw[0].dtype in (torch.float32, torch.float64) else 3e-2
    for sets in found:
        errors: dict[Rope, float] = {}
        for rope, positions in sets.items():
            if 2 * rope.theta.shape[-1] <= raw[0].shape[-1]:
                for interleaved in (False, True):
                    alike = replace(rope, interleaved=interleaved)
                    errors[alike] = _error(alike, raw, turned, positions)
        if errors and (least := min(errors.values())) <= tolerance:
            best = next(rope for rope, error in errors.items() if error == least)
            known = next(positions for rope, positions in sets.items() if rope.same(best))
            return _to_the_bit(best, raw, turned, _tensor(known, raw[0].device))
    raise UnsupportedModelError(f"{where} a rotation in neither of the two known layouts, or not at its frequencies")


def _error(rope: Rope, raw: tuple[Tensor, Tensor], turned: tuple[Tensor, Tensor], positions: tuple[int, ...]) -> float:
    """How far a rotation at these positions is from what a model did, as a share of the largest entry."""
    pairs = [(rope.rotated(x, _tensor(positions, x.device)), y) for x, y in zip(raw, turned, strict=True)]
    return max(((a.float() - b.float()).abs().max() / b.float().abs().max()).item() for a, b in pairs)


def _tensor(positions: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(positions, device=device)[None]


def _to_the_bit(rope: Rope, raw: tuple[Tensor, Tensor], turned: tuple[Tensor, Tensor], positions: Tensor) -> Rope:
    """The rounding by which the model comes to exactly its numbers, where it is one of those known."""
    for rounded, widened in ROUNDINGS:
        alike = replace(rope, rounded=rounded, widened=widened)
        if all(torch.equal(alike.rotated(x, positions), y) for x, y in zip(raw, turned, strict=True)):
            return alike
    return rope


def configs(model: nn.Module) -> list[PreTrainedConfig]:
    """Every config object in a model, the inner ones last."""
    found: dict[int, PreTrainedConfig] = {}

    def add(config: Any) -> None:
        if isinstance(config, PreTrainedConfig) and id(config) not in found:
            found[id(config)] = config
            for name in config.sub_configs:
                add(getattr(config, name, None))

    for module in model.modules():
        add(getattr(module, "config", None))
    return list(found.values())


@contextmanager
def _at_rest(model: nn.Module) -> Iterator[None]:
    """Without dropout."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def _implementation(model: PreTrainedModel, name: str) -> Iterator[None]:
    before = [(config, config._attn_implementation) for config in configs(model)]
    try:
        for config, _ in before:
            config._attn_implementation = name
        yield
    finally:
        for config, given in before:
            config._attn_implementation = given
