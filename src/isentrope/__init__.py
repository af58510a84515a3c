"""isentrope: attention that holds its focus at lengths a model was never trained on."""

from importlib import import_module
from types import ModuleType

from isentrope.attention import Aux, attention
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
]


def __getattr__(name: str) -> ModuleType:
    if name == "theory":  # loaded when asked for: it brings scipy
        return import_module("isentrope.theory")
    raise AttributeError(f"module 'isentrope' has no attribute {name!r}")
