"""Load plans of either kind, by name or from a YAML file."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from isentrope.experiments.causal_plan import CausalPlan, parse_causal_plan
from isentrope.experiments.masked_plan import Checkpoint, MaskedPlan, parse_checkpoint, parse_masked_plan
from isentrope.utils.messages import suggest

PLANS = files("isentrope.experiments") / "plans"
CHECKPOINT_LIBRARY = "checkpoints"  # the file of the checkpoints that all plans may name
# studies without cells, which have commands of their own
PLANS_WITHOUT_CELLS = {
    "laws": {"label": "table1", "title": "The temperature laws: formulas, and what each does to attention entropy"},
    "dataset": {"label": "table 9.1.1", "title": "A corpus' partition: statistics, and a figure"},
}


def plan_names() -> list[str]:
    """List the plans that ship."""
    names = (Path(str(path)).stem for path in PLANS.iterdir() if str(path).endswith(".yaml"))
    return sorted(name for name in names if name != CHECKPOINT_LIBRARY)


def load_plan(name_or_path: str | Path) -> MaskedPlan | CausalPlan:
    """Load a plan.

    Args:
        name_or_path: The name of a plan that ships, or a YAML file.

    Raises:
        ValueError: There is no such plan, or it has an unknown key or a wrong value.
    """
    path = Path(name_or_path)
    if path.suffix in (".yaml", ".yml"):
        if not path.is_file():
            raise ValueError(f"{path}: expected a file with a plan")
        return parse_plan(path.stem, path.read_text(encoding="utf-8"), path.parent)
    if (name := str(name_or_path)) not in plan_names():
        raise ValueError(f"plan: unknown {name!r}{suggest(name, plan_names())}")
    return parse_plan(name, (PLANS / f"{name}.yaml").read_text(encoding="utf-8"))


def parse_plan(name: str, text: str, folder: Path = Path()) -> MaskedPlan | CausalPlan:
    """Parse a plan: one with a `decoder` is for a causal model, any other for masked models.

    One for masked models may extend a plan that ships (`extends: main`): it has all that the other has but for the keys
    and checkpoints of its own.

    Args:
        name: Of the plan.
        text: YAML.
        folder: Where a causal plan's files are looked for.
    """
    try:
        data = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"plan {name}: expected YAML, got {error}") from None
    if not isinstance(data, dict):
        raise ValueError(f"plan {name}: expected keys and values, got {type(data).__name__}")
    if "decoder" in data:
        return parse_causal_plan(name, data, folder)
    if "extends" in data:
        data = _extend(name, data)
    return parse_masked_plan(name, data, _load_library())


def _extend(name: str, data: dict[str, Any]) -> dict[str, Any]:
    """Add what a plan has from the one that it names as `extends`; its own keys and checkpoints replace those."""
    if (start := str(data["extends"])) not in plan_names():
        raise ValueError(f"plan {name}: extends: unknown {start!r}{suggest(start, plan_names())}")
    base = yaml.safe_load((PLANS / f"{start}.yaml").read_text(encoding="utf-8"))
    if "extends" in base:
        raise ValueError(f"plan {name}: extends: expected a plan that extends none, got {start!r}")
    checkpoints = (base.get("checkpoints") or {}) | (data.get("checkpoints") or {})
    return base | {key: value for key, value in data.items() if key != "extends"} | {"checkpoints": checkpoints}


def describe_plan(name: str) -> dict[str, Any]:
    """Return the line of a list of plans: name, label, title, cells and trainings."""
    if name in PLANS_WITHOUT_CELLS:
        return {"name": name, "cells": 0, "trainings": 0} | PLANS_WITHOUT_CELLS[name]
    plan = load_plan(name)
    if isinstance(plan, CausalPlan):
        raise ValueError(f"plan {name}: expected one for masked models, which ship")
    trainings = sum(checkpoint.train is not None for checkpoint in plan.required_checkpoints())
    return {"name": name, "label": plan.label, "title": plan.title, "cells": plan.num_cells, "trainings": trainings}


@cache
def _load_library() -> dict[str, Checkpoint]:
    data = yaml.safe_load((PLANS / f"{CHECKPOINT_LIBRARY}.yaml").read_text(encoding="utf-8"))
    return {name: parse_checkpoint(name, fields) for name, fields in data.items()}
