"""Load models that were saved with a recipe."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import transformers
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedModel

from isentrope.core.dtypes import choose_load_dtype
from isentrope.hf.extend import extend_checked
from isentrope.hf.names import LAYER, SHARED_POSITION
from isentrope.hf.peft_adapters import read_adapter
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
    requested = options.pop("torch_dtype", None)  # the older name, which transformers still takes
    requested = options.pop("dtype", requested)
    dtype = saved_dtype(folder, getattr(config, "dtype", None), **hub)
    device = options.get("device_map")
    options["dtype"] = choose_load_dtype(dtype, requested, device if isinstance(device, str) else None)
    return load_and_extend(partial(load_pretrained, kind), folder, config=config, **options)


def load_and_extend(make: Callable[..., Any], folder: str | Path, *args: Any, config: Any, **options: Any) -> Any:
    """Load a saved model with `make(folder, …)`, and extend it as its config specifies; returns what `make` does."""
    saved = read_recipe(config, folder)
    options.setdefault("attn_implementation", _choose_implementation(config))
    loaded = make(folder, *args, config=copy_plain_config(config), **options)
    model = loaded[0] if isinstance(loaded, tuple) else loaded
    extend_as_saved(model, saved)
    _load_learned(model, folder, _get_hub_options(options))
    return loaded


def _choose_implementation(config: Any) -> str:
    """Choose what the plain model attends with."""
    kind = getattr(transformers, (copy_plain_config(config).architectures or ["?"])[0], None)
    return "sdpa" if getattr(kind, "_supports_sdpa", False) else "eager"


def _load_adapter(folder: str | Path, adapter: Any, saved: dict[str, Any], options: dict[str, Any]) -> Any:
    """Load an adapter on the model it was trained on, under the recipe it was trained under."""
    from peft import PeftModel

    base, kind = adapter.base_model_name_or_path, getattr(transformers, str(saved.get("architecture")), None)
    if not base or kind is None:
        raise ValueError(
            f"{folder}: expected an adapter that names its base model and its class, got {base} and {kind}"
        )
    recipe = Recipe.from_dict(saved["recipe"])
    if recipe.learned:
        raise ValueError(f"{folder}: an adapter does not hold what {recipe} has learned; save the whole model instead")
    base_options = {key: value for key, value in options.items() if key not in HUB_OPTIONS} | {
        "revision": adapter.revision
    }
    config = AutoConfig.from_pretrained(base, revision=adapter.revision)
    if isinstance(config, ExtendedConfig):
        model = load(base, config=config, **base_options)
    else:
        model = extend_as_saved(load_pretrained(kind, base, **base_options), saved)
    return PeftModel.from_pretrained(model, folder, config=adapter, **_get_hub_options(options))


def extend_as_saved(model: PreTrainedModel, saved: dict[str, Any]) -> PreTrainedModel:
    """Apply the recipe of a config.json, without the warnings that whoever saved it has seen."""
    keys = ("reasons", "base", "measured", "warning")
    notes: dict[str, Any] = {key: saved[key] for key in keys if key in saved}
    return extend_checked(model, model, Recipe.from_dict(saved["recipe"]), saved.get("backend", "auto"), saved=notes)


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
