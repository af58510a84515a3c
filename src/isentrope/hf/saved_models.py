"""Saved models: a config.json that only isentrope reads, and classes through which transformers loads it.

In memory an extended model keeps its class, and its config the model type it had. In config.json the model type is
`isentrope`, architectures are called `Isentrope…`, and every rope type is `isentrope`: a program without
isentrope finds an unknown type, whichever of them it reads, and cannot run the plain model instead.
"""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import transformers
from transformers import AutoConfig, PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.auto import modeling_auto
from transformers.models.auto.auto_factory import _BaseAutoModelClass
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING
from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING

from isentrope.hf.card import write_card
from isentrope.hf.names import CONFIG_KEY, IMPLEMENTATION

MODEL_TYPE = "isentrope"
PREFIX = "Isentrope"
ROPE_TYPE = "rope_type"
BASE_ROPE_TYPE = "isentrope_rope_type"
# not "model_type": transformers looks for that in inner dictionaries, and would take this one for the model's config
BASE_MODEL_TYPE = "base_model_type"
AUTO_MODULE = "isentrope_auto"  # the module beside config.json of a model saved for trust_remote_code
TO_LOAD = "load it with isentrope.load(folder), or with an Auto class after `import isentrope`"


class ExtendedConfig:
    """A mixin for the config of an extended model: marked in config.json, as it was in memory."""

    def to_json_string(self, *args: Any, **options: Any) -> str:
        plain = json.loads(super().to_json_string(*args, **options))  # type: ignore[misc]
        return json.dumps(add_marks(plain), indent=2, sort_keys=True) + "\n"

    def save_pretrained(self, save_directory: str | Path, *args: Any, **options: Any) -> None:
        super().save_pretrained(save_directory, *args, **options)  # type: ignore[misc]
        write_card(Path(save_directory), self)

    @classmethod
    def from_pretrained(cls, *args: Any, **options: Any) -> Any:
        return AutoConfig.from_pretrained(*args, **options)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **options: Any) -> Any:
        return build_config(config_dict, **options)


class ExtendedModel:
    """A mixin for the class that transformers finds for such a config: it makes the plain model, and extends it.

    The result is of the model's own class, since pipelines, trainers and adapters check it.
    """

    @classmethod
    def from_pretrained(cls, folder: Any, *args: Any, config: Any = None, **options: Any) -> Any:
        from isentrope.hf.loading import load_and_extend

        if config is None:
            config = AutoConfig.from_pretrained(folder)
        base: Any = _get_base(cls)
        return load_and_extend(base.from_pretrained, folder, *args, config=config, **options)

    @classmethod
    def _from_config(cls, config: Any, **options: Any) -> Any:
        from isentrope.hf.loading import extend_as_saved

        _check_implementation(options.pop("attn_implementation", None))
        saved = read_recipe(config, "config")
        model = _get_base(cls)._from_config(copy_plain_config(config), **options)  # type: ignore[attr-defined]
        return extend_as_saved(model, saved)


def drop_gguf_quantizer(model: Any) -> dict[str, Any]:
    """Drop the quantizer of a model whose GGUF blocks were unpacked into floats, with which it could not be saved.

    Call it on a model with a config of its own, which loses its quantization_config.

    Returns:
        The attributes that were removed or changed, for `model.__dict__.update`.
    """
    quantizer = vars(model).get("hf_quantizer")
    method = getattr(getattr(quantizer, "quantization_config", None), "quant_method", None)
    if method != "gguf" or not all(x.is_floating_point() for x in model.parameters()):
        return {}
    names = ("hf_quantizer", "quantization_method", "is_quantized")
    attributes = {name: vars(model)[name] for name in names if name in vars(model)}
    quantizer.remove_quantization_config(model)
    return attributes


def add_marks(config: dict[str, Any]) -> dict[str, Any]:
    """Return a plain config.json with types that only isentrope registers, so that other programs refuse it."""
    marked = _map_rope(config, lambda rope: rope | {ROPE_TYPE: MODEL_TYPE, BASE_ROPE_TYPE: rope[ROPE_TYPE]})
    marked[CONFIG_KEY] = config[CONFIG_KEY] | {BASE_MODEL_TYPE: config["model_type"]}
    marked["model_type"] = MODEL_TYPE
    marked["architectures"] = [PREFIX + name for name in config.get("architectures") or []]
    return marked


def remove_marks(config: dict[str, Any]) -> dict[str, Any]:
    """Return the config.json of the model before it was extended; one without marks as it is."""
    if config.get("model_type") != MODEL_TYPE:
        return config
    saved = config.get(CONFIG_KEY)
    if not isinstance(saved, dict) or not isinstance(saved.get(BASE_MODEL_TYPE), str):
        raise ValueError(f"config.json: expected an isentrope recipe and its {BASE_MODEL_TYPE}, got {saved!r:.200}")

    def unmark(rope: dict[str, Any]) -> dict[str, Any]:
        plain_rope = rope | {ROPE_TYPE: rope.get(BASE_ROPE_TYPE, rope[ROPE_TYPE])}
        plain_rope.pop(BASE_ROPE_TYPE, None)
        return plain_rope

    plain = _map_rope(config, unmark)
    plain["model_type"] = saved[BASE_MODEL_TYPE]
    plain["architectures"] = [name.removeprefix(PREFIX) for name in config.get("architectures") or []]
    plain.pop("attn_implementation", None)
    if AUTO_MODULE in str(plain.get("auto_map")):
        plain.pop("auto_map")
    return plain


def _map_rope(config: Any, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    """Copy nested dictionaries and change every one that names a rope type; recipes name none."""
    if not isinstance(config, dict):
        return copy.deepcopy(config)
    inner = {key: _map_rope(value, change) for key, value in config.items()}
    return change(inner) if isinstance(inner.get(ROPE_TYPE), str) else inner


def build_config(config_dict: dict[str, Any], **options: Any) -> Any:
    """Build the config of an extended model from config.json, for `AutoConfig`."""
    _check_implementation(options.pop("attn_implementation", None))
    plain = remove_marks(config_dict)
    if plain["model_type"] not in CONFIG_MAPPING:
        raise ValueError(f"config.json: the model that was extended is a {plain['model_type']!r}, unknown here")
    built = CONFIG_MAPPING[plain["model_type"]].from_dict(plain, **options)
    config = built[0] if isinstance(built, tuple) else built
    config.__class__ = make_config_class(type(config))
    # programs that look a class up by its name in transformers find the one that extends
    config.architectures = [PREFIX + name for name in config.architectures or []]
    return built


def read_recipe(config: PreTrainedConfig, where: str | Path) -> dict[str, Any]:
    """Return the recipe, backend and measurements of a saved config; raise ValueError where it has none."""
    saved = getattr(config, CONFIG_KEY, None)
    if not isinstance(saved, dict) or "recipe" not in saved:
        raise ValueError(
            f"{where}: expected a config.json with an isentrope recipe, got none; load it with from_pretrained, then "
            "isentrope.extend"
        )
    return saved


def copy_plain_config(config: PreTrainedConfig) -> Any:
    """Copy a config as the model had it before it was extended."""
    config = copy.deepcopy(config)
    if isinstance(config, ExtendedConfig):
        config.__class__ = _get_base(type(config))
        config.architectures = [name.removeprefix(PREFIX) for name in config.architectures or []]
    inner = (getattr(config, name) for name in config.sub_configs)
    for each in (config, *(one for one in inner if one is not None)):
        for name in (CONFIG_KEY, "attn_implementation"):
            if name in each.__dict__:
                delattr(each, name)
        each._attn_implementation = None
    return config


def _check_implementation(name: str | dict[str, str] | None) -> None:
    if name not in (None, IMPLEMENTATION):
        raise ValueError(
            f"attn_implementation: expected none, since this model was saved with a recipe that {name!r} would drop; "
            "leave it out, or load it with isentrope.load and take the recipe off with isentrope.restore"
        )


def _get_base(extended: type) -> type:
    """Return the class of transformers that a class made here extends."""
    return extended.__mro__[2]


def make_config_class(base: Any) -> Any:
    """Derive a config class with marks in config.json, registered with every Auto class that has `base`."""
    return _make_config_class(base)


@cache  # not for speed: a class is the same object every time
def _make_config_class(base: Any) -> Any:
    # with its own __init__: transformers would make one for a class without
    body = {"__init__": base.__init__, "__module__": __name__}
    derived: Any = type(PREFIX + base.__name__, (ExtendedConfig, base), body)
    autos: Any = [x for x in vars(modeling_auto).values() if isinstance(x, type) and issubclass(x, _BaseAutoModelClass)]
    for auto in autos:
        if auto._model_mapping is not None and base in auto._model_mapping:
            auto.register(derived, _make_model_classes(auto._model_mapping[base], derived), exist_ok=True)
    for mapping in (TOKENIZER_MAPPING, PROCESSOR_MAPPING):
        if base in mapping:
            mapping.register(derived, mapping[base], exist_ok=True)
    return derived


def _make_model_classes(base: Any, config: Any) -> Any:
    if isinstance(base, (tuple, list)):
        return tuple(_make_model_class(one, config) for one in base)
    return _make_model_class(base, config)


@cache  # likewise
def _make_model_class(base: Any, config: Any) -> Any:
    body = {"config_class": config, "__module__": __name__}
    derived: Any = type(PREFIX + base.__name__, (ExtendedModel, base), body)
    # transformers may have imported itself anew since
    for module in (transformers, sys.modules["transformers"]):
        setattr(module, derived.__name__, derived)
    return derived


def __getattr__(name: str) -> Any:
    """Return classes made here by name: a pickled config may be read in another process."""
    base = getattr(transformers, name.removeprefix(PREFIX), None) if name.startswith(PREFIX) else None
    if isinstance(base, type) and issubclass(base, PreTrainedConfig):
        return make_config_class(base)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _refuse_rope(*args: Any, **options: Any) -> NoReturn:
    raise ValueError(f"this model was saved with an isentrope recipe, which its class alone does not apply: {TO_LOAD}")


ROPE_INIT_FUNCTIONS[MODEL_TYPE] = _refuse_rope
