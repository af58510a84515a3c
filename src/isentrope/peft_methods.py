"""Methods of PEFT and transformers that save and load adapters, wrapped so that the recipe of the base model stays.

adapter_config.json keeps the recipe in a key that both packages ignore, and neither has a hook between reading that
file and adding the adapter. `import isentrope` therefore wraps the methods in `METHODS`, each once, when the program
imports its module; `unwrap_methods` takes the wrappers off. Auto classes, `AutoPeftModel…` and `pipeline` call these
methods. Adapters without a recipe are saved and loaded as ever.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial, wraps
from importlib import import_module
from typing import Any

from isentrope.utils.import_hooks import after_import

Method = Callable[..., Any]


def _extend_first(load: Method) -> Method:
    """Put the model under the recipe of the adapter that is loaded."""
    signature = inspect.signature(load)

    @wraps(load)
    def load_under_recipe(*args: Any, **options: Any) -> Any:
        call = signature.bind(*args, **options).arguments
        folder = call.get("model_id", call.get("peft_model_id"))
        if folder is None:  # the adapter is passed as tensors
            return load(*args, **options)
        from isentrope.hf.loading import extended_for_adapter

        model, name = call.get("model", call.get("self")), call.get("adapter_name") or "default"
        with extended_for_adapter(model, folder, name, _collect_hub_options(call)):
            return load(*args, **options)

    return load_under_recipe


def _collect_hub_options(call: dict[str, Any]) -> dict[str, Any]:
    """Return how an adapter is looked up on the hub, from the arguments of its loader."""
    general = getattr(call.get("load_config"), "download_kwargs", None) or {}
    return {**general, **call.get("kwargs", {}), **(call.get("adapter_kwargs") or {})}


def _mark_first(save: Method) -> Method:
    """Put the recipe of the model into the configs that are saved."""

    @wraps(save)
    def save_with_recipe(model: Any, *args: Any, **options: Any) -> Any:
        from isentrope.hf.extension import find_extension, find_model
        from isentrope.hf.peft_adapters import mark_configs, unmark_configs

        if find_extension(model) is None:
            unmark_configs(model)
        else:
            mark_configs(model, find_model(model))
        return save(model, *args, **options)

    return save_with_recipe


# of each module its class and methods
METHODS: dict[str, tuple[str, dict[str, Callable[[Method], Method]]]] = {
    "peft.peft_model": (
        "PeftModel",
        {"from_pretrained": _extend_first, "load_adapter": _extend_first, "save_pretrained": _mark_first},
    ),
    "peft.mixed_model": ("PeftMixedModel", {"from_pretrained": _extend_first}),  # calls PeftModel.load_adapter
    "transformers.integrations.peft": ("PeftAdapterMixin", {"load_adapter": _extend_first}),
}
_originals: dict[tuple[type, str], Any] = {}


def wrap_methods_after_import() -> None:
    """Wrap the methods of each module as soon as it is imported."""
    for module in METHODS:
        after_import(module, partial(wrap_methods, module))


def wrap_methods(module: str) -> None:
    """Wrap the methods of an imported module, unless they are wrapped already."""
    class_name, methods = METHODS[module]
    owner = getattr(import_module(module), class_name)
    for name, wrap in methods.items():
        if (owner, name) not in _originals:
            original = _originals[owner, name] = vars(owner)[name]
            is_class_method = isinstance(original, classmethod)
            setattr(owner, name, classmethod(wrap(original.__func__)) if is_class_method else wrap(original))


def unwrap_methods() -> None:
    """Undo `wrap_methods`: PEFT and transformers drop recipes, as they do by themselves."""
    for (owner, name), original in _originals.items():
        setattr(owner, name, original)
    _originals.clear()
