"""Load models that were saved with a recipe."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import Any

import transformers
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedModel

from isentrope.core.dtypes import choose_load_dtype
from isentrope.hf.extend import check_whole, extend_checked, restore
from isentrope.hf.extension import find_extension, get_model
from isentrope.hf.names import LAYER, SHARED_POSITION
from isentrope.hf.peft_adapters import get_adapters, read_adapter
from isentrope.hf.saved_models import ExtendedConfig, copy_plain_config, read_recipe
from isentrope.pretrained import (
    HUB_OPTIONS,
    check_weights,
    load_pretrained,
    open_tensors,
    read_config,
    resolve_model_name,
    saved_dtype,
)
from isentrope.recipe import Recipe
from isentrope.utils.messages import truncate

# of a saved model that is loading: it is still plain when transformers adds an adapter to it
_recipe_to_come: ContextVar[Recipe | None] = ContextVar("_recipe_to_come", default=None)


def load(folder: str | Path, **options: Any) -> PreTrainedModel:
    """Load a model saved by `save_pretrained` after `extend`, and extend it again.

    An adapter of PEFT that was saved over an extended model comes back on its base model, extended likewise.

    Args:
        folder: a folder, or a name on the hub.
        **options: passed to `from_pretrained`. On a CPU, weights in half precision are loaded in float32 unless `dtype`
            says otherwise ("auto" keeps them), since many processors are far slower in half precision.

    Returns:
        The extended model.

    Raises:
        ValueError: there is no such folder or no recipe, or weights are missing, broken, pickled or not finite.
    """
    folder, hub = resolve_model_name(str(folder)), _get_hub_options(options)
    if "config" not in options:
        if (adapter := read_adapter(folder, hub)) is not None:
            return _load_adapter(folder, *adapter, options)
        read_config(folder, **hub)  # its errors name the file, or the model on the hub
    config = options.pop("config", None) or AutoConfig.from_pretrained(folder, **hub)
    read_recipe(config, folder)
    plain = copy_plain_config(config)
    kind = getattr(transformers, (plain.architectures or ["?"])[0], None)
    if kind is None:
        raise ValueError(f"{folder}: expected an architecture of transformers, got {plain.architectures}")
    options["dtype"] = _choose_dtype(folder, config, options, hub)
    return load_and_extend(partial(load_pretrained, kind), folder, config=config, **options)


def _choose_dtype(folder: str | Path, config: Any, options: dict[str, Any], hub: dict[str, Any]) -> Any:
    requested = options.pop("torch_dtype", None)  # the older name, which transformers still takes
    requested, device = options.get("dtype", requested), options.get("device_map")
    dtype = saved_dtype(folder, getattr(config, "dtype", None), **hub)
    return choose_load_dtype(dtype, requested, device if isinstance(device, str) else None)


def load_and_extend(make: Callable[..., Any], folder: str | Path, *args: Any, config: Any, **options: Any) -> Any:
    """Load a saved model with `make(folder, …)`, and extend it as its config specifies; returns what `make` does."""
    saved = read_recipe(config, folder)
    options.setdefault("attn_implementation", _choose_implementation(config))
    token = _recipe_to_come.set(Recipe.from_dict(saved["recipe"]))  # `make` may add an adapter of the same recipe
    try:
        loaded = make(folder, *args, config=copy_plain_config(config), **options)
    finally:
        _recipe_to_come.reset(token)
    model = loaded[0] if isinstance(loaded, tuple) else loaded
    extend_as_saved(model, saved)
    _load_learned(model, folder, _get_hub_options(options))
    return loaded


def _choose_implementation(config: Any) -> str:
    """Choose what the plain model attends with."""
    kind = getattr(transformers, (copy_plain_config(config).architectures or ["?"])[0], None)
    return "sdpa" if getattr(kind, "_supports_sdpa", False) else "eager"


def _load_adapter(folder: str | Path, plain: dict[str, Any], saved: dict[str, Any], options: dict[str, Any]) -> Any:
    """Load an adapter on the model it was trained on, under the recipe it was trained under."""
    try:
        from peft import PeftConfig, PeftModel
    except ImportError:
        raise ValueError(f"{folder}: an adapter needs PEFT; install it with pip install peft") from None
    adapter = PeftConfig.from_peft_type(**plain)
    base, kind = adapter.base_model_name_or_path, getattr(transformers, str(saved.get("architecture")), None)
    if not base or kind is None:
        raise ValueError(
            f"{folder}: expected an adapter that names its base model and its class, got {base} and {kind}"
        )
    base_hub = {"revision": adapter.revision}
    base_options = {key: value for key, value in options.items() if key not in HUB_OPTIONS} | base_hub
    config, hub = AutoConfig.from_pretrained(base, **base_hub), _get_hub_options(options)
    if isinstance(config, ExtendedConfig):
        model = load(base, config=config, **base_options)
    else:
        _check_not_learned(folder, Recipe.from_dict(saved["recipe"]))
        base_options["dtype"] = _choose_dtype(base, config, base_options, base_hub)
        model = load_pretrained(kind, base, **base_options)
    with extended_for_adapter(model, folder, "default", hub):
        return PeftModel.from_pretrained(model, folder, config=adapter, **hub)


@contextmanager
def extended_for_adapter(model: Any, folder: str | Path, name: str, hub: dict[str, Any]) -> Iterator[None]:
    """Put a plain model under the recipe of an adapter that is added to it in a `with` block, unless that fails.

    Args:
        model: a transformers model, or a wrapper around one such as PEFT's.
        folder: of the adapter, or its name on the hub.
        name: what the adapter is called on the model.
        hub: how to look it up; other options are ignored.

    Raises:
        ValueError: the model is under another recipe, or has adapters that would come under this one.
    """
    hub = {key: value for key, value in _get_hub_options(hub).items() if value is not None}
    try:
        adapter = read_adapter(folder, hub)
    except OSError:
        yield  # whoever loads it needs the same file, and says in its own words what is wrong
        raise  # it was found after all, so its recipe is unknown
    if adapter is None or not _needs_extension(model, folder, name, Recipe.from_dict(adapter[1]["recipe"])):
        yield
        return
    extend_as_saved(model, adapter[1])
    try:
        yield
    except BaseException:
        restore(model)
        raise


def _needs_extension(model: Any, folder: str | Path, name: str, recipe: Recipe) -> bool:
    """Check that a model may be put under the recipe of an adapter; False where it is or will be."""
    extension = find_extension(model)
    current = _recipe_to_come.get() if extension is None else extension.recipe
    if current is not None:
        if current.to_dict() != recipe.to_dict():
            raise ValueError(
                f"{folder}: expected a plain model or one under {truncate(str(recipe))!r}, as this adapter was saved, "
                f"got one under {truncate(str(current))!r}; call isentrope.restore on the base model before you load it"
            )
        return False
    _check_not_learned(folder, recipe)
    if others := get_adapters(model).keys() - {name}:
        raise ValueError(
            f"{folder}: expected a model under {truncate(str(recipe))!r}, as this adapter was saved, got a plain one "
            f"with the adapters {sorted(others)}; call isentrope.extend first, or load it on a model of its own"
        )
    check_whole(get_model(model))
    return True


def _check_not_learned(folder: str | Path, recipe: Recipe) -> None:
    if recipe.learned:
        raise ValueError(
            f"{folder}: an adapter does not hold what {recipe} has learned; save the whole model instead, or where "
            "modules_to_save names it, call isentrope.extend on the base model first"
        )


def extend_as_saved(model: Any, saved: dict[str, Any]) -> Any:
    """Apply the recipe of a config.json, without the warnings that whoever saved it has seen."""
    keys = ("reasons", "base", "measured", "warning")
    notes: dict[str, Any] = {key: saved[key] for key in keys if key in saved}
    inner = get_model(model)
    return extend_checked(model, inner, Recipe.from_dict(saved["recipe"]), saved.get("backend", "auto"), saved=notes)


def _get_hub_options(options: dict[str, Any]) -> dict[str, Any]:
    return {key: options[key] for key in HUB_OPTIONS if key in options}


def _load_learned(model: nn.Module, folder: str | Path, hub: dict[str, Any]) -> None:
    """Load the parameters of the recipe, which transformers does not load."""
    parameters = {
        name: x for name, x in model.named_parameters() if f"{LAYER}." in name or name.startswith(SHARED_POSITION)
    }
    if not parameters:
        return
    saved_weights: dict[str, Tensor] = {}
    for path in check_weights(folder, **hub):
        with open_tensors(path) as file:
            saved_weights |= {name: file.get_tensor(name) for name in set(file.keys()) & set(parameters)}
    for name, x in parameters.items():
        if name not in saved_weights:
            raise ValueError(f"{folder}: expected the recipe's parameter {name} among its weights, got none")
        if saved_weights[name].shape != x.shape:
            raise ValueError(
                f"{folder}: expected {name} of shape {tuple(x.shape)}, got {tuple(saved_weights[name].shape)}"
            )
        x.data = saved_weights[name].to(x.device)
