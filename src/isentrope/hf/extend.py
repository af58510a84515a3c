"""Any transformers model under a recipe: extend, restore, load."""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
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

from isentrope.attention import BACKENDS
from isentrope.hf.layer import NAME, Layer
from isentrope.hf.probe import Attending, configs, probe, unrotated
from isentrope.hf.rotary import Native, Rope, fitted, scaled, streaming
from isentrope.positions import CLEX, Position, RoPE
from isentrope.recipe import Recipe

Model = TypeVar("Model", bound=PreTrainedModel)
STATE = "_isentrope"  # on an extended model: how to undo it
SHARED = "isentrope_position"  # on an extended model: a learned position method, shared by all layers


@dataclass
class Extension:
    """What was done to a model."""

    recipe: Recipe
    model_type: str
    layers: list[Attending]
    configs: dict[int, tuple[PreTrainedConfig, PreTrainedConfig]] = field(default_factory=dict)
    handles: list[RemovableHandle] = field(default_factory=list)
    frequencies: list[tuple[Rope, Tensor, float]] = field(default_factory=list)


def extend(model: Model, recipe: Recipe | str, *, allow_untrained: bool = False, backend: str = "auto") -> Model:
    """Let a model attend under a recipe, in place. Parts that the recipe does not name stay as the model has them.

    recipe: a `Recipe` or its text. A training length that it leaves out is taken from the model's config.
    allow_untrained: take parts that a model must be trained with (cosine scores, ALiBi, NoPE, SSMax) all the same.
    backend: as in `isentrope.attention`.

    Raises ValueError, and leaves the model as it was, where the recipe or the model cannot be carried out.
    """
    inner = _inner(model)
    if inner is None:
        raise ValueError(f"model: expected a transformers model, got {type(model).__name__}")
    if (state := _state(inner)) is not None:
        raise ValueError(f"model: already extended with {str(state.recipe)!r}; call isentrope.restore(model) first")
    if any(isinstance(module, Layer) for module in model.modules()):
        raise ValueError("model: a model inside it is already extended; restore that one first")
    if backend not in ("auto", *BACKENDS):
        raise ValueError(f"backend: expected one of auto, {', '.join(BACKENDS)}, got {backend!r}")
    kind, layers = inner.config.model_type, probe(inner)
    recipe = _read(recipe, inner.config.get_text_config(), layers)
    _check(recipe, kind, layers)
    _check_trained(recipe, kind, allow_untrained)
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
    recipe = _read(recipe, model.config.get_text_config(), layers)
    _check(recipe, model.config.model_type, layers)
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
    plans = _plan(state.recipe, state.layers, config)
    try:
        _apply(model, inner, state, plans, backend)
    except BaseException:
        _undo(model, inner, state)
        raise
    setattr(inner, STATE, state)


def _read(recipe: Recipe | str, config: PreTrainedConfig, layers: list[Attending]) -> Recipe:
    """The recipe, with what it requires and leaves out taken from the model."""
    turning = {2 * layer.rope.theta.shape[-1] for layer in layers if layer.rope is not None}
    known = {
        "train_length": _train_length(config),
        "heads": layers[0].heads,
        "dim": turning.pop() if len(turning) == 1 else None,
    }
    if not isinstance(recipe, (Recipe, str)):
        raise ValueError(f"recipe: expected a Recipe or its text, got {recipe!r}")
    # what a recipe learns belongs to one model
    recipe = Recipe.parse(recipe, **known) if isinstance(recipe, str) else copy.deepcopy(recipe)
    recipe = recipe.resolved()
    if recipe.position is None:
        return recipe
    return replace(recipe, position=recipe.position.resolved(known["train_length"]))


def _train_length(config: PreTrainedConfig) -> int | None:
    """The length a config says its model was trained at."""
    rope = getattr(config, "rope_parameters", None) or {}
    found = rope.get("original_max_position_embeddings") if isinstance(rope, dict) else None
    found = found or getattr(config, "original_max_position_embeddings", None)
    return found or getattr(config, "max_position_embeddings", None)


def _check_trained(recipe: Recipe, kind: str, allow_untrained: bool) -> None:
    untrained = [part for part in (recipe.score, recipe.position, recipe.temperature) if _needs_training(part)]
    if untrained:
        what = f"{kind}: was not trained with {' and '.join(str(part) for part in untrained)}"
        if not allow_untrained:
            raise ValueError(
                f"{what}, and does not work with it before it is; to train it, or to see, pass allow_untrained=True"
            )
        warnings.warn(f"{what}: expect poor output until it is", UserWarning, stacklevel=3)


def _check(recipe: Recipe, kind: str, layers: list[Attending]) -> None:
    if recipe.position is not None and all(layer.rope is None for layer in layers):
        raise ValueError(
            f"{kind}: has no rotary embedding, so {recipe.position} cannot take its place; temperatures and masks can"
        )
    if recipe.temperature is None:
        return
    for layer in layers:
        law = recipe.for_layer(layer.index).temperature
        tau = law.scale(torch.full((1, 1, 1), 1 << 20), layer.head_dim)
        if tau.shape[-2] not in (1, layer.heads):
            raise ValueError(f"{kind}: has {layer.heads} attention heads, {law} has {tau.shape[-2]}")


def _needs_training(part: Any) -> bool:
    return getattr(part, "needs_training", False)


@dataclass
class _Plan:
    """One layer: its recipe, whose frequencies its keys arrive without, and frequencies to write into the model."""

    recipe: Recipe
    raw: Rope | None = None
    theta: Tensor | None = None


def _plan(recipe: Recipe, layers: list[Attending], config: PreTrainedConfig) -> list[_Plan]:
    shared: dict[tuple[int, str | None], Position] = {}
    plans = []
    for layer in layers:
        own = recipe.for_layer(layer.index)
        if isinstance(own.temperature, nn.Module):
            own = replace(own, temperature=copy.deepcopy(own.temperature))
        causal = all(span.high <= 1 for span in layer.band.spans)
        rope = layer.rope
        stream = streaming(recipe.mask, recipe.position) if causal else None
        if rope is None or not (recipe.position or stream) or not _reached(layer, layers):
            plans.append(_Plan(replace(own, position=None)))
            continue
        key = (id(rope.module), rope.layer_type)
        if key not in shared:
            shared[key] = _position(recipe, rope, layer.head_dim, stream, config.model_type)
        position = shared[key]
        if isinstance(position, Native) and position.size is None and position.inner.keys_cacheable:
            # one angle a position: the model's own rotary module rotates, and its cache holds rotated keys
            plans.append(_Plan(replace(own, position=None), theta=scaled(position.inner, rope, layer.head_dim)))
        else:
            plans.append(_Plan(replace(own, position=position), raw=rope))
    return plans


def _reached(layer: Attending, layers: list[Attending]) -> bool:
    """Whether a position method applies to a layer.

    Where a model keeps frequencies of their own for its windowed layers, those never meet a distance they have not
    seen, and stay as they are.
    """
    windowed = any(span.low > float("-inf") for span in layer.band.spans)
    own = layer.rope is not None and layer.rope.layer_type is not None
    return not (
        windowed and own and any(other.rope is not None and not other.rope.same(layer.rope) for other in layers)
    )


def _position(recipe: Recipe, rope: Rope, head_dim: int, stream: tuple[int, int] | None, kind: str) -> Position:
    position = fitted(recipe.position or RoPE(), rope, kind)
    if rope.scaling != 1 and 2 * rope.theta.shape[-1] != head_dim:
        raise ValueError(f"{kind}: rotates part of a head and scales it, which {position} cannot be joined to")
    if not position.rotates:
        return position
    sinks, size = stream or (0, None)
    return Native(position, rope, sinks, size)


def _apply(model: nn.Module, inner: PreTrainedModel, state: Extension, plans: list[_Plan], backend: str) -> None:
    _own_configs(model, state)
    for _, new in state.configs.values():
        new._attn_implementation = NAME
    top: Any = inner.config
    setattr(top, NAME, {"recipe": state.recipe.to_dict(), "backend": backend})
    top.attn_implementation = NAME  # in config.json: loading without the recipe fails instead of running without it
    if isinstance(state.recipe.position, CLEX):
        setattr(inner, SHARED, state.recipe.position.to(inner.device).train(inner.training))
    raw: dict[nn.Module, set[str | None]] = {}
    for layer, plan in zip(state.layers, plans, strict=True):
        rope = plan.raw if plan.raw is not None and plan.recipe.position.rotates else None
        made = Layer(plan.recipe, layer.band, rope, backend)
        device = next(iter(layer.module.parameters())).device
        setattr(layer.module, NAME, made.to(device).train(layer.module.training))
        if plan.raw is not None:
            raw.setdefault(plan.raw.module, set()).add(plan.raw.layer_type)
        if plan.theta is not None and layer.rope is not None:
            _write(state, layer.rope, plan.theta)
    for module, types in raw.items():
        state.handles.append(module.register_forward_hook(_only(types), with_kwargs=True))


def _only(types: set[str | None]) -> Any:
    """A hook that leaves queries and keys unrotated in layers of these types."""

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        if module.config._attn_implementation != NAME:  # type: ignore[union-attr]
            raise RuntimeError("the attention implementation was changed: call isentrope.restore(model) before that")
        layer_type = kwargs.get("layer_type", args[2] if len(args) > 2 else None)
        return unrotated(module, args, kwargs, output) if types == {None} or layer_type in types else output

    return hook


def _write(state: Extension, rope: Rope, theta: Tensor) -> None:
    if any(known.same(rope) for known, _, _ in state.frequencies):
        return
    state.frequencies.append((rope, rope.theta, rope.scaling))
    rope.write(theta, rope.scaling)


def _own_configs(model: nn.Module, state: Extension) -> None:
    """Give the model config objects of its own: others may share those it has."""
    new = copy.deepcopy({id(config): config for config in configs(model)})
    old = {id(config): config for config in configs(model)}
    state.configs = {key: (old[key], new[key]) for key in old}
    for module in model.modules():
        given = module.__dict__.get("config")
        if id(given) in state.configs:
            module.config = state.configs[id(given)][1]  # type: ignore[assignment]


def _undo(model: nn.Module, inner: PreTrainedModel, state: Extension) -> None:
    for handle in state.handles:
        handle.remove()
    for rope, theta, scaling in state.frequencies:
        rope.write(theta, scaling)
    for layer in state.layers:
        if hasattr(layer.module, NAME):
            delattr(layer.module, NAME)
    if hasattr(inner, SHARED):
        delattr(inner, SHARED)
    back = {id(new): old for old, new in state.configs.values()}
    for module in model.modules():
        given = module.__dict__.get("config")
        if id(given) in back:
            module.config = back[id(given)]  # type: ignore[assignment]


def _unmark(config: PreTrainedConfig) -> None:
    for name in (NAME, "attn_implementation"):
        if name in config.__dict__:
            delattr(config, name)
    config._attn_implementation = None


def _hub(options: dict[str, Any]) -> dict[str, Any]:
    return {key: options[key] for key in ("revision", "token", "cache_dir", "local_files_only") if key in options}


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
