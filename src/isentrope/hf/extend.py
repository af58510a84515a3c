"""Any transformers model under a recipe: extend, restore."""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedConfig, PreTrainedModel

from isentrope.core.compile import values_are_readable
from isentrope.dispatch import check_backend
from isentrope.hf.adapters import mark_adapters, unmark_adapters
from isentrope.hf.introspection import Attending, configs, probe, unrotated
from isentrope.hf.layer import NAME, Layer, Together
from isentrope.hf.layer_plan import Plan, check, check_trained, parts_of, planned, read
from isentrope.hf.rope import SHARED, Rope, argument_names, named_arguments
from isentrope.hf.saved_models import config_class
from isentrope.recipe import Recipe

Model = TypeVar("Model", bound=PreTrainedModel)
STATE = "_isentrope"  # on an extended model: how to undo it


@dataclass
class Extension:
    """What was done to a model."""

    recipe: Recipe
    model_type: str
    layers: list[Attending]
    configs: list[tuple[PreTrainedConfig, PreTrainedConfig, dict[str, Any]]] = field(default_factory=list)
    handles: list[RemovableHandle] = field(default_factory=list)
    frequencies: list[tuple[Rope, Tensor, float]] = field(default_factory=list)


def extend(model: Model, recipe: Recipe | str, *, allow_untrained: bool = False, backend: str = "auto") -> Model:
    """Let a model attend under a recipe, in place. Parts that the recipe does not name stay as the model has them.

    recipe: a `Recipe` or its text. A training length that it leaves out is taken from the model's config.
    allow_untrained: take parts that a model must be trained with (cosine scores, ALiBi, NoPE, SSMax) all the same.
    backend: one of `isentrope.attention`'s for all calls, those of a prompt and those of one token.

    Raises ValueError, and leaves the model as it was, where the recipe or the model cannot be carried out.
    """
    inner = _inner(model)
    if inner is None:
        raise ValueError(f"model: expected a transformers model, got {type(model).__name__}")
    if (state := _state(inner)) is not None:
        raise ValueError(f"model: already extended with {str(state.recipe)!r}; call isentrope.restore(model) first")
    if any(isinstance(module, Layer) for module in model.modules()):
        raise ValueError("model: a model inside it is already extended; restore that one first")
    check_backend(backend)
    if (outer := _outer(inner)) is not None:
        raise ValueError(
            f"model: it is part of a {type(outer).__name__}, which would be saved without it; extend that one"
        )
    return extend_checked(model, inner, recipe, backend, allow_untrained)


def extend_checked(
    model: Model, inner: PreTrainedModel, recipe: Recipe | str, backend: str, allow_untrained: bool | None = None
) -> Model:
    """Extend a model that is not. allow_untrained: None where nobody need be told what the model was trained with."""
    kind, layers = inner.config.model_type, probe(inner)
    recipe = read(recipe, inner.config.get_text_config(), layers)
    check(recipe, kind, layers)
    if allow_untrained is not None:
        check_trained(recipe, kind, allow_untrained)
    _extend(model, inner, Extension(recipe, kind, layers), backend)
    return model


def restore(model: Model) -> Model:
    """Undo `extend`: the model is what it was, bit for bit. Parameters that the recipe added are dropped."""
    inner = _inner(model)
    _undo(model, inner, extension(model))
    delattr(inner, STATE)
    return model


@contextmanager
def extended(model: Model, recipe: Recipe | str, **options: Any) -> Iterator[Model]:
    """`extend` for the length of a `with` block."""
    extend(model, recipe, **options)
    try:
        yield model
    finally:
        if _state(_inner(model)) is not None:
            restore(model)


def extension(model: nn.Module) -> Extension:
    """How a model was extended, or an error."""
    state = _state(_inner(model))
    if state is None:
        raise ValueError("model: expected a model that isentrope.extend was called on, got one that is not extended")
    return state


def _inner(model: Any) -> Any:
    """The transformers model in a wrapper such as PEFT's, or None."""
    found = model.modules() if isinstance(model, nn.Module) else ()
    return next((module for module in found if isinstance(module, PreTrainedModel)), None)


def _outer(inner: PreTrainedModel) -> PreTrainedModel | None:
    """The transformers model that a model without a head is part of, or None; modules do not know theirs."""
    if inner.base_model is not inner:
        return None
    for collect in (False, True):
        if collect:  # it may be one that nobody holds any more
            gc.collect()
        models = [x for x in gc.get_objects() if issubclass(type(x), PreTrainedModel) and "_modules" in vars(x)]
        found = next((x for x in models if x is not inner and any(part is inner for part in x.modules())), None)
        if found is None:
            return None
    return found


def _state(inner: Any) -> Extension | None:
    return None if inner is None else inner.__dict__.get(STATE)


def _extend(model: nn.Module, inner: PreTrainedModel, state: Extension, backend: str) -> None:
    config = inner.config.get_text_config()
    plans = planned(state.recipe, state.layers, config, inner)
    try:
        _apply(model, inner, state, plans, backend)
    except BaseException:
        _undo(model, inner, state)
        raise
    setattr(inner, STATE, state)


def _apply(model: nn.Module, inner: PreTrainedModel, state: Extension, plans: list[Plan], backend: str) -> None:
    # attn_implementation in config.json: a class of transformers by itself does not run it, see saved_models.py
    marks = {NAME: {"recipe": state.recipe.to_dict(), "backend": backend}, "attn_implementation": NAME}
    _own_configs(model, inner, state, marks)
    if isinstance(state.recipe.position, nn.Module):
        setattr(inner, SHARED, state.recipe.position.to(inner.device).train(inner.training))
    raw: dict[nn.Module, set[str | None]] = {}
    together = Together(len(plans), parts_of(plans))
    for index, (layer, plan) in enumerate(zip(state.layers, plans, strict=True)):
        rope = plan.raw if plan.raw is not None and plan.recipe.position.rotates else None
        made = Layer(plan.recipe, layer.band, rope, backend, together, index)
        made.eager = layer.eager
        device = next(iter(layer.module.parameters())).device
        if device.type == "meta" and plan.recipe.learned:
            raise ValueError(f"{state.model_type}: {layer.name} is offloaded, so {state.recipe} has nowhere to learn")
        setattr(layer.module, NAME, made.to(device).train(layer.module.training))
        if plan.raw is not None:
            raw.setdefault(plan.raw.module, set()).add(plan.raw.layer_type)
        if plan.theta is not None and layer.rope is not None:
            _write(state, layer.rope, plan.theta)
    consecutive = not all(layer.placed for layer in state.layers)
    for module, types in raw.items():
        state.handles.append(module.register_forward_hook(_Unrotated(module, types, consecutive), with_kwargs=True))
    state.handles.append(inner.base_model.register_forward_pre_hook(_still_ours))
    state.handles.append(inner.register_state_dict_pre_hook(mark_adapters))


class _Unrotated:
    """A hook on a rotary module: queries and keys of these types of layers stay as they are.

    consecutive: the model does not hand positions on to attention, so that they must not jump.
    """

    def __init__(self, module: nn.Module, types: set[str | None], consecutive: bool) -> None:
        self.names, self.types, self.consecutive = argument_names(module), types, consecutive

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        given = named_arguments(self.names, args, kwargs)
        if None not in self.types and given.get("layer_type") not in self.types:
            return output
        positions = given["position_ids"]
        if positions.dim() > 2:
            positions = _text_positions(positions)
        if self.consecutive and values_are_readable(positions) and bool((positions.diff(dim=-1) > 1).any()):
            raise ValueError("position_ids: expected consecutive positions, this model does not show attention others")
        return unrotated(module, args, kwargs, output)


def _text_positions(positions: Tensor) -> Tensor:
    """Positions (axes, batch, tokens) of a model that also reads images; in text the axes are equal."""
    text = (positions == positions[:1]).all()
    if not values_are_readable(text):
        torch._assert_async(
            text, "position_ids that differ by axis (images) are not supported where keys are cached raw"
        )
    elif not bool(text):
        raise ValueError(
            "position_ids: expected those of text where keys are cached raw, got some that differ by axis (images); "
            "take a recipe without a position method, 'pi', 'ntk' or 'yarn'"
        )
    return positions[0]


def _still_ours(module: nn.Module, args: Any) -> None:
    """A hook on an extended model."""
    if module.config._attn_implementation != NAME:  # type: ignore[union-attr]
        raise RuntimeError("the attention implementation was changed: call isentrope.restore(model) before that")


def _write(state: Extension, rope: Rope, theta: Tensor) -> None:
    if any(known.same(rope) for known, _, _ in state.frequencies):
        return
    state.frequencies.append((rope, rope.theta, rope.scaling))
    rope.write(theta, rope.scaling)


def _own_configs(model: nn.Module, inner: PreTrainedModel, state: Extension, marks: dict[str, Any]) -> None:
    """Give the model config objects of its own, the outermost marked: others may share those it has."""
    old = configs(model)
    state.configs = []
    for before, after in zip(old, copy.deepcopy(old), strict=True):
        after._attn_implementation = NAME
        if before is inner.config:
            after.__class__ = config_class(type(after))
            for name, value in marks.items():
                setattr(after, name, value)
        state.configs.append((before, after, copy.deepcopy(after.__dict__)))
    _point(model, {id(before): after for before, after, _ in state.configs})


def _point(model: nn.Module, to: dict[int, PreTrainedConfig]) -> None:
    for module in model.modules():
        given = module.__dict__.get("config")
        if id(given) in to:
            module.config = to[id(given)]  # type: ignore[assignment]


def _undo(model: nn.Module, inner: PreTrainedModel, state: Extension) -> None:
    for handle in state.handles:
        handle.remove()
    unmark_adapters(inner)
    for rope, theta, scaling in state.frequencies:
        rope.write(theta.to(rope.theta.dtype), scaling)  # as the model has been moved since
    for layer in state.layers:
        if hasattr(layer.module, NAME):
            delattr(layer.module, NAME)
    if hasattr(inner, SHARED):
        delattr(inner, SHARED)
    for before, after, then in state.configs:
        for name, value in after.__dict__.items():
            # what was changed meanwhile stays changed; sub-configs are objects of their own
            if not isinstance(value, PreTrainedConfig) and (name not in then or then[name] != value):
                setattr(before, name, value)
    _point(model, {id(after): before for before, after, _ in state.configs})
