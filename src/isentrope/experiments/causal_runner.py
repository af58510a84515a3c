"""Run plans for causal models: perplexity by position, and retrieval, under every recipe."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from isentrope.data.tasks import load_fillers
from isentrope.evaluation.evaluate import Comparison, compare_recipes, prepare_inputs
from isentrope.evaluation.loading import load_on_device, load_tokenizer
from isentrope.evaluation.perplexity import select_cells
from isentrope.evaluation.results import PERPLEXITY, RETRIEVAL, list_failures, read_if_whole
from isentrope.evaluation.texts import load_texts
from isentrope.experiments.causal_plan import CausalPlan


def run_causal_plan(plan: CausalPlan, out: Path, notify: Callable[[str], None] = print) -> dict[str, Any]:
    """Measure what is missing of a plan in `out`/NAME; arguments as in `run_plan`, counts of supported recipes."""
    name, gguf_file = str(plan.decoder["model"]), plan.decoder.get("gguf_file")
    texts = load_texts(
        plan.texts, name, gguf_file, plan.perplexity.length, plan.documents
    )  # before the model's weights
    model = load_on_device(name, plan.decoder.get("device", "auto"), plan.decoder.get("dtype", "auto"), gguf_file)
    comparison = Comparison(
        plan.name, plan.title, plan.perplexity, plan.retrieval, plan.skip_unsupported, plan.optional_retrieval
    )
    comparison, inputs = prepare_inputs(
        comparison,
        texts,
        lambda: load_tokenizer(name, gguf_file),
        lambda: load_fillers(plan.fillers),
        plan.decoder.get("chat"),
        notify,
    )
    used, _ = compare_recipes(model, Path(name).name, inputs, comparison, out / plan.name, notify)
    return causal_plan_status(replace(plan, perplexity=used.perplexity, retrieval=used.retrieval), out)


def causal_plan_status(plan: CausalPlan, out: Path) -> dict[str, Any]:
    """Count a plan's cells, and those done and failed in `out`, without checking which texts are long enough."""
    done, failed = 0, 0
    cells = len(plan.perplexity.recipes) * plan.documents
    path = out / plan.name / PERPLEXITY.file
    if (results := read_if_whole(path, "texts", "cells")) is not None:
        cells = len(plan.perplexity.recipes) * len(results["texts"])
        done += sum(cell["recipe"] in plan.perplexity.recipes for cell in select_cells(results))
        failed += len(list_failures(path, plan.perplexity.recipes))
    if plan.retrieval is not None:
        planned = {(recipe, *cell) for recipe in plan.retrieval.recipes for cell in plan.retrieval.cells}
        cells += len(planned)
        results = read_if_whole(out / plan.name / RETRIEVAL.file, "cells", schema=RETRIEVAL) or {"cells": []}
        measured = [cell for cell in results["cells"] if RETRIEVAL.key(cell) in planned]
        failures = sum(cell["failed"] is not None for cell in measured)
        done, failed = done + len(measured) - failures, failed + failures
    return {"plan": plan.name, "cells": cells, "done": done, "failed": failed}
