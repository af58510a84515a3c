"""Any transformers model under a recipe: extend, restore, load."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
import transformers
from safetensors import safe_open
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from transformers.utils.hub import cached_file

from isentrope.attention import BACKENDS, RAW
from isentrope.hf.layer import NAME, Layer, Together
from isentrope.hf.plan import Plan, check, check_trained, parts_of, planned, read
from isentrope.hf.probe import Attending, configs, probe, unrotated
from isentrope.hf.rotary import SHARED, Rope, argument_names, named_arguments
from isentrope.precision import readable
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
    if backend not in ("auto", *BACKENDS, *RAW):
        raise ValueError(f"backend: expected one of auto, {', '.join((*BACKENDS, *RAW))}, got {backend!r}")
    kind, layers = inner.config.model_type, probe(inner)
    recipe = read(recipe, inner.config.get_text_config(), layers)
    check(recipe, kind, layers)
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


def load(folder: str | Path, **options: Any) -> PreTrainedModel:
    """A model saved by `save_pretrained` after `extend`, extended again; a folder or a name on the hub.

    options go to `from_pretrained`. Raises ValueError where there is no recipe, or its learned parameters are missing.
    """
    config = copy.deepcopy(options.pop("config", None)) or AutoConfig.from_pretrained(folder, **_hub(options))
    saved = getattr(config, NAME, None)
    if not isinstance(saved, dict) or "recipe" not in saved:
        raise ValueError(f"{folder}: expected a config.json with an isentrope recipe, got none; was it extended?")
    for each in (config, *(getattr(config, name) for name in config.sub_configs)):
        _unmark(each)
    kind = getattr(transformers, (config.architectures or ["?"])[0], None)
    if kind is None:
        raise ValueError(f"{folder}: expected an architecture of transformers, got {config.architectures}")
    recipe = Recipe.from_dict(saved["recipe"])
    options.setdefault("attn_implementation", "sdpa" if kind._supports_sdpa else "eager")
    model: PreTrainedModel = kind.from_pretrained(folder, config=config, **options)
    layers = probe(model)
    recipe = read(recipe, model.config.get_text_config(), layers)
    check(recipe, model.config.model_type, layers)
    state = Extension(recipe, model.config.model_type, layers)
    _extend(model, model, state, saved.get("backend", "auto"))
    if recipe.learned:
        _load_learned(model, folder, _hub(options))
    return model


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
    # attn_implementation in config.json: loading without the recipe fails, instead of running without it
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
        if self.consecutive and readable(positions) and bool((positions.diff(dim=-1) > 1).any()):
            raise ValueError("position_ids: expected consecutive positions, this model does not show attention others")
        return unrotated(module, args, kwargs, output)


def _text_positions(positions: Tensor) -> Tensor:
    """Positions (axes, batch, tokens) of a model that also reads images; in text the axes are equal."""
    text = (positions == positions[:1]).all()
    if not readable(text):
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
        for name, value in marks.items() if before is inner.config else ():
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


def _unmark(config: PreTrainedConfig) -> None:
    for name in (NAME, "attn_implementation"):
        if name in config.__dict__:
            delattr(config, name)
    config._attn_implementation = None


def _hub(options: dict[str, Any]) -> dict[str, Any]:
    return {
        key: options[key]
        for key in ("revision", "token", "cache_dir", "local_files_only", "subfolder")
        if key in options
    }


def _load_learned(model: nn.Module, folder: str | Path, hub: dict[str, Any]) -> None:
    """Parameters of the recipe, which transformers does not know."""
    wanted = {name: x for name, x in model.named_parameters() if f"{NAME}." in name or name.startswith(SHARED)}
    found: dict[str, Tensor] = {}
    for path in _weights(folder, hub):
        with safe_open(path, "pt") as file:
            found |= {name: file.get_tensor(name) for name in set(file.keys()) & set(wanted)}
    for name, x in wanted.items():
        if name not in found:
            raise ValueError(f"{folder}: expected the recipe's parameter {name} among its weights, got none")
        if found[name].shape != x.shape:
            raise ValueError(f"{folder}: expected {name} of shape {tuple(x.shape)}, got {tuple(found[name].shape)}")
        x.data = found[name].to(x.device)


def _weights(folder: str | Path, hub: dict[str, Any]) -> list[str]:
    """The files of a model's weights, in a folder or on the hub."""
    options = hub | {"_raise_exceptions_for_missing_entries": False}
    # an index may have stayed behind when a model was saved anew in one file
    if (single := cached_file(folder, SAFE_WEIGHTS_NAME, **options)) is not None:
        return [single]
    if (index := cached_file(folder, SAFE_WEIGHTS_INDEX_NAME, **options)) is None:
        raise ValueError(f"{folder}: expected weights as safetensors, got none")
    names = sorted(set(json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"].values()))
    return [str(cached_file(folder, name, **hub)) for name in names]
