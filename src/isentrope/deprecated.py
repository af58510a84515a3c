"""Module paths of the previous release, which import with a DeprecationWarning; removed in the next one."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

# old module → new module, both below `isentrope`
MODULES = {
    "compiled": "core.compile",
    "dtypes": "core.dtypes",
    "extras": "utils.extras",
    "files": "utils.files",
    "hf.geometry": "hf.mask",
    "hf.observe": "hf.capture",
    "hf.plan": "hf.layer_plan",
    "hf.probe": "hf.introspection",
    "hf.rotary": "hf.rope",
    "hf.tempered": "hf.learned_temperature",
    "layout": "core.layout",
    "models.config": "models.gau.config",
    "models.dropout": "models.gau.dropout",
    "region": "core.region",
    "study": "experiments",
    "study.causal": "evaluation",
    "study.causal.calibrate": "calibration.calibrate",
    "study.causal.choice": "calibration.select",
    "study.causal.descent": "calibration.optimize",
    "study.causal.harness": "evaluation.lm_eval",
    "study.causal.perplexity": "evaluation.perplexity",
    "study.causal.plan": "experiments.causal_plan",
    "study.causal.retrieval": "evaluation.retrieval",
    "study.cells": "evaluation.results",
    "study.checkpoint": "training.checkpoint",
    "study.evaluate": "evaluation.masked_lm",
    "study.features": "data.features",
    "study.fit": "calibration.masked_lm",
    "study.inspect": "analysis.inspect",
    "study.laws": "analysis.entropy_laws",
    "study.looks": "experiments.paper.figures",
    "study.place": "evaluation.loading",
    "study.plan": "experiments.plan",
    "study.prepare": "data.prepare",
    "study.progress": "utils.progress",
    "study.provenance": "utils.provenance",
    "study.regimen": "training.config",
    "study.run": "experiments.runner",
    "study.step": "training.step",
    "study.train": "training.trainer",
    "study.weights": "analysis.attention_statistics",
}
# old module → {old name: new name, or "module:name" where it moved to another one}
NAMES: dict[str, dict[str, str]] = {}


class _Finder(MetaPathFinder):
    """Resolves the old paths after every other finder has failed to."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        root, _, old = fullname.partition(".")
        if root != "isentrope" or old not in MODULES:
            return None
        return ModuleSpec(fullname, _Loader(), is_package=any(name.startswith(f"{old}.") for name in MODULES))


class _Loader(Loader):
    """Fills the old module with a lookup in the new one."""

    def exec_module(self, module: ModuleType) -> None:
        old = module.__name__.partition(".")[2]
        new = f"isentrope.{MODULES[old]}"
        renamed = NAMES.get(old, {})
        if not hasattr(module, "__path__"):  # a package is only on the way to its modules, which warn
            message = f"{module.__name__} is now {new}; the old path goes away in the next release"
            warnings.warn(message, DeprecationWarning, stacklevel=2)

        def find_name(name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")
            where, _, found = renamed.get(name, name).rpartition(":")
            return getattr(import_module(f"isentrope.{where}" if where else new), found)

        module.__getattr__ = find_name  # type: ignore[method-assign]


def register_deprecated_modules() -> None:
    """Make `import isentrope.study` and the other old paths work."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())
