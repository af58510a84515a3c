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

# old module → new module, both below `isentrope`: those that the documentation named, and what the commands called
MODULES = {
    "data.needles": "data.tasks",
    "hf.observe": "hf.capture",
    "layout": "core.layout",
    "models.config": "models.gau.config",
    "report.inspect": "report.figures.inspect",
    "study": "experiments",
    "study.causal": "evaluation",
    "study.causal.calibrate": "calibration.calibrate",
    "study.causal.harness": "evaluation.lm_eval",
    "study.causal.perplexity": "evaluation.perplexity",
    "study.causal.plan": "experiments.causal_plan",
    "study.causal.retrieval": "evaluation.retrieval",
    "study.evaluate": "evaluation.masked_lm",
    "study.inspect": "analysis.inspect",
    "study.laws": "analysis.entropy_laws",
    "study.plan": "experiments.plan",
    "study.prepare": "data.prepare",
    "study.regimen": "training.config",
    "study.run": "experiments.runner",
    "study.train": "training.trainer",
}
# old module → {old name: new name, or "module:name" where it moved to another one}
NAMES: dict[str, dict[str, str]] = {
    "hf.observe": {"Seen": "CapturedAttention", "observed": "capture_attention", "recipe_of": "get_recipe"},
    "layout": {"layout_of": "get_layout"},
    "models.config": {"gau_recipe": "build_gau_recipe"},
    "report.inspect": {
        "attention_at": "draw_attention",
        "before_and_after_rope": "draw_scores_before_and_after_rope",
        "cosscale_panels": "draw_cosscale_panels",
        "draw": "draw_inspection",
        "peak_angles": "draw_peak_angles",
    },
    "study.causal.calibrate": {
        "Config": "calibration.config:CalibrationConfig",
        "Result": "CalibrationResult",
        "calibrate": "fit_laws",
    },
    "study.causal.perplexity": {
        "Config": "PerplexityConfig",
        "Text": "evaluation.texts:Text",
        "load": "evaluation.loading:load_on_device",
        "load_tokenizer": "evaluation.loading:load_tokenizer",
        "read": "evaluation.texts:load_texts",
        "run": "measure_perplexity",
    },
    "study.causal.plan": {"Plan": "CausalPlan"},
    "study.causal.retrieval": {
        "Config": "RetrievalConfig",
        "Prompts": "evaluation.prompts:PromptFormat",
        "read": "data.tasks:load_haystack",
        "run": "measure_retrieval",
    },
    "study.evaluate": {
        "Protocol": "MaskingProtocol",
        "Score": "DocumentScore",
        "evaluate": "score_documents",
        "summary": "summarize_scores",
    },
    "study.inspect": {
        "Config": "InspectConfig",
        "entropies": "analysis.observe:head_entropies",
        "layer_entropies": "analysis.observe:layer_entropies",
        "load": "load_model",
        "measure": "measure_attention",
        "read": "load_text",
    },
    "study.laws": {"Config": "EntropyLawsConfig", "laws": "build_laws", "run": "measure_laws"},
    "study.plan": {"Plan": "experiments.masked_plan:MaskedPlan", "load": "load_plan", "names": "plan_names"},
    "study.prepare": {"Options": "PrepareOptions"},
    "study.regimen": {"Config": "TrainingConfig", "configured": "build_config"},
    "study.run": {"run": "run_plan", "status": "plan_status"},
    "study.train": {"build": "training.builders:build_model"},
}


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
            message = f"{module.__name__} is now {new}; the old path will be removed in the next release"
            warnings.warn(message, DeprecationWarning, stacklevel=2)

        def find_name(name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")
            where, _, new_name = renamed.get(name, name).rpartition(":")
            return getattr(import_module(f"isentrope.{where}" if where else new), new_name)

        module.__getattr__ = find_name  # type: ignore[method-assign]


def register_deprecated_modules() -> None:
    """Make `import isentrope.study` and the other old paths work."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())
