"""isentrope: read texts longer than a model was trained on.

attention, Recipe, LayerRecipes, Aux           one function for every method
extend, extended, restore, describe            transformers models under a recipe
load, export, StreamingCache, PoSECollator     saved, generating and training ones
ContextParallel, Ulysses                       sequences that several processes share
evaluate, calibrate, inspect                   what the commands of these names do
clear_caches                                   free the memory that calls share
positions, temperatures, masks, scores, theory the methods, whose classes are here too: `ReRoPE`, `InfoScale` …
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from isentrope.deprecated import register_deprecated_modules
from isentrope.peft_methods import wrap_methods_after_import
from isentrope.utils.extras import name_missing_extras
from isentrope.utils.import_hooks import after_import
from isentrope.version import __version__ as __version__

if TYPE_CHECKING:
    from isentrope import masks, positions, scores, temperatures, theory
    from isentrope.analysis.inspect import inspect
    from isentrope.calibration.calibrate import calibrate
    from isentrope.core.caching import clear_caches
    from isentrope.data.collate import PoSECollator
    from isentrope.evaluation.evaluate import evaluate
    from isentrope.functional import Aux, attention
    from isentrope.hf.describe import describe
    from isentrope.hf.export import export
    from isentrope.hf.extend import extend, extended, restore
    from isentrope.hf.loading import load
    from isentrope.hf.streaming_cache import StreamingCache
    from isentrope.masks import Causal, Document, Full, Lambda, Padding, Sink, Window
    from isentrope.parallel import ContextParallel, Ulysses
    from isentrope.positions import (
        CLEX,
        DPE,
        NTK,
        PI,
        STRING,
        ALiBi,
        CoPE,
        DualChunk,
        JetLong,
        LaMPE,
        LeakyReRoPE,
        LongRoPE,
        NoPE,
        PoSE,
        ReRoPE,
        Resonance,
        RoPE,
        SelfExtend,
        YaRN,
    )
    from isentrope.recipe import LayerRecipes, Recipe
    from isentrope.retrieve import Retrieve
    from isentrope.scores import Cosine, Dot
    from isentrope.share import Share
    from isentrope.temperatures import (
        Adaptive,
        Constant,
        Fitted,
        InfoScale,
        InfoScaleExact,
        Llama4,
        LogLength,
        LogN,
        Power,
        ScaleInvariant,
        SoftmaxPlus,
        SSMax,
        YaRNTemperature,
    )

# fmt: off
__all__ = [  # noqa: RUF022  # by topic, as above
    "attention", "Recipe", "LayerRecipes", "Aux", "extend", "extended", "restore", "describe", "load", "export",
    "StreamingCache", "PoSECollator", "ContextParallel", "Ulysses", "evaluate", "calibrate", "inspect", "clear_caches",
    "positions", "temperatures", "masks", "scores", "theory",
    "RoPE", "PI", "NTK", "YaRN", "ReRoPE", "LeakyReRoPE", "SelfExtend", "JetLong", "LaMPE", "DualChunk", "STRING",
    "ALiBi", "CLEX", "PoSE",
    "NoPE", "DPE", "LongRoPE", "CoPE", "Resonance",
    "InfoScale", "InfoScaleExact", "LogN", "Power", "LogLength", "SoftmaxPlus", "YaRNTemperature", "Llama4", "SSMax",
    "Fitted", "Adaptive", "ScaleInvariant", "Constant", "Share", "Retrieve",
    "Full", "Causal", "Window", "Sink", "Lambda", "Padding", "Document", "Dot", "Cosine",
]
# fmt: on

# the module of each name, imported at first use: PyTorch takes seconds, which `isentrope --help` has no need of
_MODULES: dict[str, tuple[str, ...]] = {
    "functional": ("attention", "Aux"),
    "recipe": ("Recipe", "LayerRecipes"),
    "core.caching": ("clear_caches",),
    "positions": (
        "RoPE", "PI", "NTK", "YaRN", "ReRoPE", "LeakyReRoPE", "SelfExtend", "JetLong", "LaMPE", "DualChunk", "STRING",
        "ALiBi", "CLEX", "PoSE", "NoPE", "DPE", "LongRoPE", "CoPE", "Resonance",
    ),
    "temperatures": (
        "InfoScale", "InfoScaleExact", "LogN", "Power", "LogLength", "SoftmaxPlus", "YaRNTemperature", "Llama4",
        "SSMax", "Fitted", "Adaptive", "ScaleInvariant", "Constant",
    ),
    "share": ("Share",),
    "retrieve": ("Retrieve",),
    "masks": ("Full", "Causal", "Window", "Sink", "Lambda", "Padding", "Document"),
    "scores": ("Dot", "Cosine"),
    "hf": ("extend", "extended", "restore", "describe", "load", "export", "StreamingCache"),
    "parallel": ("ContextParallel", "Ulysses"),
    "data.collate": ("PoSECollator",),
    "evaluation.evaluate": ("evaluate",),
    "calibration.calibrate": ("calibrate",),
    "analysis.inspect": ("inspect",),
}  # fmt: skip
_LAZY = {name: f"isentrope.{module}" for module, names in _MODULES.items() for name in names}
_NAMESPACES = ("positions", "temperatures", "masks", "scores", "theory")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    if name in _NAMESPACES:
        return import_module(f"isentrope.{name}")  # which sets the attribute
    if name not in _LAZY:
        raise AttributeError(f"module 'isentrope' has no attribute {name!r}")
    with name_missing_extras():
        value = getattr(import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


# folders of extended models have a model type of their own, which is registered with transformers here
after_import("transformers.models.auto.configuration_auto", lambda: import_module("isentrope.saved_config"))
wrap_methods_after_import()
register_deprecated_modules()
