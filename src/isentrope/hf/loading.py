"""Load models that were saved with a recipe."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import transformers
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from transformers.utils.hub import cached_file

from isentrope.hf.adapters import read_adapter
from isentrope.hf.extend import extend_checked
from isentrope.hf.layer import NAME
from isentrope.hf.rotary import SHARED
from isentrope.hf.saved_models import ExtendedConfig, read_recipe, without_marks
from isentrope.recipe import Recipe

HUB = ("revision", "token", "cache_dir", "local_files_only", "subfolder")


def load(folder: str | Path, **options: Any) -> PreTrainedModel:
    """A model saved by `save_pretrained` after `extend`, extended again; a folder or a name on the hub.

    An adapter of PEFT that was saved over an extended model comes back on its base model, extended likewise.
    options go to `from_pretrained`. Raises ValueError where there is no recipe, or its learned parameters are missing.
    """
    if "config" not in options and (adapter := read_adapter(folder, _hub(options))) is not None:
        return _load_adapter(folder, *adapter, options)
    config = options.pop("config", None) or AutoConfig.from_pretrained(folder, **_hub(options))
    read_recipe(config, folder)
    plain = without_marks(config)
    kind = getattr(transformers, (plain.architectures or ["?"])[0], None)
    if kind is None:
        raise ValueError(f"{folder}: expected an architecture of transformers, got {plain.architectures}")
    return load_as(kind, folder, config=config, **options)


def load_as(kind: Any, folder: str | Path, *args: Any, config: Any, **options: Any) -> Any:
    """A saved model of a class of transformers, extended as its config says; with loading info where that is asked."""
    saved = read_recipe(config, folder)
    options.setdefault("attn_implementation", "sdpa" if kind._supports_sdpa else "eager")
    loaded = kind.from_pretrained(folder, *args, config=without_marks(config), **options)
    model = loaded[0] if isinstance(loaded, tuple) else loaded
    extend_as_saved(model, saved)
    _load_learned(model, folder, _hub(options))
    return loaded


def _load_adapter(folder: str | Path, adapter: Any, saved: dict[str, Any], options: dict[str, Any]) -> Any:
    """An adapter on the model it was trained on, under the recipe it was trained under."""
    from peft import PeftModel

    base, kind = adapter.base_model_name_or_path, getattr(transformers, str(saved.get("architecture")), None)
    if not base or kind is None:
        raise ValueError(
            f"{folder}: expected an adapter that names its base model and its class, got {base} and {kind}"
        )
    recipe = Recipe.from_dict(saved["recipe"])
    if recipe.learned:
        raise ValueError(f"{folder}: an adapter does not hold what {recipe} has learned; save the whole model instead")
    own = {key: value for key, value in options.items() if key not in HUB} | {"revision": adapter.revision}
    config = AutoConfig.from_pretrained(base, revision=adapter.revision)
    if isinstance(config, ExtendedConfig):
        model = load_as(kind, base, config=config, **own)
    else:
        model = extend_as_saved(kind.from_pretrained(base, **own), saved)
    return PeftModel.from_pretrained(model, folder, config=adapter, **_hub(options))


def extend_as_saved(model: PreTrainedModel, saved: dict[str, Any]) -> PreTrainedModel:
    """Apply the recipe of a config.json; its owner has trained the model with it, or knows."""
    return extend_checked(model, model, Recipe.from_dict(saved["recipe"]), saved.get("backend", "auto"))


def _hub(options: dict[str, Any]) -> dict[str, Any]:
    return {key: options[key] for key in HUB if key in options}


def _load_learned(model: nn.Module, folder: str | Path, hub: dict[str, Any]) -> None:
    """Parameters of the recipe, which transformers does not know."""
    wanted = {name: x for name, x in model.named_parameters() if f"{NAME}." in name or name.startswith(SHARED)}
    if not wanted:
        return
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
