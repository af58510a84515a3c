"""isentrope: attention that holds its focus at lengths a model was never trained on."""

from importlib import import_module
from typing import Any

from isentrope.attention import Aux, attention
from isentrope.core.caching import clear_caches
from isentrope.deprecated import register_deprecated_modules
from isentrope.masks import Causal, Document, Full, Lambda, Padding, Sink, Window
from isentrope.positions import CLEX, NTK, PI, ALiBi, LeakyReRoPE, NoPE, PoSE, ReRoPE, RoPE, SelfExtend, YaRN
from isentrope.recipe import Recipe
from isentrope.scores import Cosine, Dot
from isentrope.temperatures import (
    Constant,
    Fitted,
    InfoScale,
    InfoScaleExact,
    Llama4,
    LogLength,
    LogN,
    SoftmaxPlus,
    SSMax,
    YaRNTemperature,
)
from isentrope.utils.extras import name_missing_extras
from isentrope.utils.imports import after_import

__version__ = "0.1.0"
__all__ = [
    "CLEX",
    "NTK",
    "PI",
    "ALiBi",
    "Aux",
    "Causal",
    "Constant",
    "Cosine",
    "Document",
    "Dot",
    "Fitted",
    "Full",
    "InfoScale",
    "InfoScaleExact",
    "Lambda",
    "LeakyReRoPE",
    "Llama4",
    "LogLength",
    "LogN",
    "NoPE",
    "Padding",
    "PoSE",
    "ReRoPE",
    "Recipe",
    "RoPE",
    "SSMax",
    "SelfExtend",
    "Sink",
    "SoftmaxPlus",
    "Window",
    "YaRN",
    "YaRNTemperature",
    "attention",
    "clear_caches",
]


# loaded when asked for: they bring scipy, or transformers
_LATER = {"theory": "isentrope.theory", "PoSECollator": "isentrope.data.collate"} | dict.fromkeys(
    ("StreamingCache", "describe", "export", "extend", "extended", "load", "restore"), "isentrope.hf"
)


__all__ += sorted(_LATER)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module 'isentrope' has no attribute {name!r}")
    with name_missing_extras():
        module = import_module(_LATER[name])
    return module if module.__name__ == f"isentrope.{name}" else getattr(module, name)


# folders of extended models have a model type of their own, which transformers knows from here on
after_import("transformers.models.auto.configuration_auto", lambda: import_module("isentrope.saved_config"))
register_deprecated_modules()
