"""Any transformers model under a recipe: extend, restore, load."""

from __future__ import annotations

import copy
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
    if not isinstance(model, nn.Module) or not any(isinstance(m, PreTrainedModel) for m in model.modules()):
        raise ValueError(f"model: expected a transformers model, got {type(model).__name__}")
    if (state := getattr(model, STATE, None)) is not None:
        raise ValueError(f"model: already extended with {str(state.recipe)!r}; call isentrope.restore(model) first")
    if any(isinstance(module, Layer) for module in model.modules()):
        raise ValueError("model: a model inside it is already extended; restore that one first")
    inner = next(module for module in model.modules() if isinstance(module, PreTrainedModel))
    config = inner.config.get_text_config()
    layers = probe(inner)
    recipe = _read(recipe, config, layers)
    _check(recipe, inner.config.model_type, layers, allow_untrained)
    plans = _plan(recipe, layers, _train_length(config), config.model_type)
    state = Extension(recipe, inner.config.model_type, layers)
    try:
        _apply(model, state, plans, backend)
    except BaseException:
        _undo(model, state)
        raise
    setattr(model, STATE, state)
    return model


def restore(model: Model) -> Model:
    """Undo `extend`: the model is what it was, bit for bit. Parameters that the recipe added are dropped."""
    _undo(model, extension(model))
    delattr(model, STATE)
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
    config = options.pop("config", None) or AutoConfig.from_pretrained(folder, **_hub(options))
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
    with warnings.catch_warnings():
        model = kind.from_pretrained(folder, config=config, **options)
    extend(model, recipe, allow_untrained=True, backend=saved.get("backend", "auto"))
    if recipe.learned:
        _load_learned(model, Path(folder))
    return model


def extension(model: nn.Module) -> Extension:
    """How a model was extended, or an error."""
    state = getattr(model, STATE, None)
    if state is None:
        raise ValueError("model: expected a model that isentrope.extend was called on, got one that is not extended")
    return state


def _read(recipe: Recipe | str, config: PreTrainedConfig, layers: list[Attending]) -> Recipe:
    """The recipe, with what it requires and leaves out taken from the model."""
    turning = {2 * layer.rope.theta.shape[-1] for layer in layers if layer.rope is not None}
    known = {
        "train_length": _train_length(config),
        "heads": layers[0].heads,
        "dim": turning.pop() if len(turning) == 1 else None,
    }
    if isinstance(recipe, str):
        return Recipe.parse(recipe, **known)
    if not isinstance(recipe, Recipe):
        raise ValueError(f"recipe: expected a Recipe or its text, got {recipe!r}")
    return copy.deepcopy(recipe)  # what it learns belongs to this model


def _train_length(config: PreTrainedConfig) -> int | None:
    """The length a config says its model was trained at."""
    rope = getattr(config, "rope_parameters", None) or {}
    found = rope.get("original_max_position_embeddings") if isinstance(rope, dict) else None
    found = found or getattr(config, "original_max_position_embeddings", None)
    return found or getattr(config, "max_position_embeddings", None)


def _check(recipe: Recipe, kind: str, layers: list[Attending], allow_untrained: bool) -> None:
    untrained = [part for part in (recipe.score, recipe.position, recipe.temperature) if _needs_training(part)]
    if untrained:
        what = f"{kind}: was not trained with {' and '.join(str(part) for part in untrained)}"
        if not allow_untrained:
            raise ValueError(
                f"{what}, and does not work with it before it is; to train it, or to see, pass allow_untrained=True"
            )
        warnings.warn(f"{what}: expect poor output until it is", UserWarning, stacklevel=3)
    if recipe.position is not None and all(layer.rope is None for layer in layers):
        raise ValueError(
            f"{kind}: has no rotary embedding, so {recipe.position} cannot take its place; temperatures and masks can"
        )
    heads = getattr(recipe.temperature, "heads", None)
    if heads is not None and any(layer.heads != heads for layer in layers):
        raise ValueError(f"{kind}: has {layers[0].heads} attention heads, {recipe.temperature} {heads}")


def _needs_training(part: Any) -> bool:
    return getattr(part, "needs_training", False)


@dataclass
class _Plan:
    """One layer: its recipe, whose frequencies its keys arrive without, and frequencies to write into the model."""

    recipe: Recipe
    raw: Rope | None = None
    theta: Tensor | None = None


def _plan(recipe: Recipe, layers: list[Attending], train_length: int | None, kind: str) -> list[_Plan]:
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
            shared[key] = _position(recipe, rope, layer.head_dim, train_length, stream, kind)
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
    return not (windowed and own and any(other.rope is not layer.rope for other in layers))


def _position(
    recipe: Recipe, rope: Rope, head_dim: int, train_length: int | None, stream: tuple[int, int] | None, kind: str
) -> Position:
    known = getattr(recipe.temperature, "train_length", None) or train_length
    position = fitted(recipe.position or RoPE(), rope, head_dim, known, kind)
    if rope.scaling != 1 and 2 * rope.theta.shape[-1] != head_dim:
        raise ValueError(f"{kind}: rotates part of a head and scales it, which {position} cannot be joined to")
    if not position.rotates:
        return position
    sinks, size = stream or (0, None)
    return Native(position, rope, sinks, size)


def _apply(model: nn.Module, state: Extension, plans: list[_Plan], backend: str) -> None:
    _own_configs(model, state)
    for _, new in state.configs.values():
        new._attn_implementation = NAME
    top: Any = model.config
    setattr(top, NAME, {"recipe": state.recipe.to_dict(), "backend": backend})
    top.attn_implementation = NAME  # in config.json: loading without the recipe fails instead of running without it
    if isinstance(state.recipe.position, CLEX):
        device = next(iter(model.parameters())).device
        setattr(model, SHARED, state.recipe.position.to(device).train(model.training))
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


def _undo(model: nn.Module, state: Extension) -> None:
    for handle in state.handles:
        handle.remove()
    for rope, theta, scaling in state.frequencies:
        rope.write(theta, scaling)
    for layer in state.layers:
        if hasattr(layer.module, NAME):
            delattr(layer.module, NAME)
    if hasattr(model, SHARED):
        delattr(model, SHARED)
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


def _load_learned(model: nn.Module, folder: Path) -> None:
    """Parameters of the recipe, which transformers does not know."""
    wanted = {name: x for name, x in model.named_parameters() if f"{NAME}." in name or name.startswith(SHARED)}
    found: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            found |= {name: file.get_tensor(name) for name in set(file.keys()) & set(wanted)}
    missing = sorted(set(wanted) - set(found))
    if missing:
        raise ValueError(f"{folder}: expected the recipe's parameters among its weights, {missing[:3]} are missing")
    with torch.no_grad():
        for name, x in wanted.items():
            x.copy_(found[name])
