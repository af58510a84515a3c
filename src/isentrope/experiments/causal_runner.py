"""Run plans for causal models: perplexity by position, and retrieval, under every recipe."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from isentrope.evaluation import perplexity, retrieval
from isentrope.evaluation.perplexity import OPEN, PLAIN, read_held
from isentrope.experiments.causal_plan import CausalPlan
from isentrope.recipe import Recipe
from isentrope.utils.files import write_json


def run_causal_plan(plan: CausalPlan, out: Path, notify: Callable[[str], None] = print) -> dict[str, Any]:
    """Measure what is missing of a plan in the folder `out`/NAME.

    Args:
        plan: The plan.
        out: The folder that plans share.
        notify: Receives why recipes were left out and why cells failed.

    Returns:
        The counts of `causal_plan_status`, of the recipes that the model takes.
    """
    folder = out / plan.name
    name, gguf = str(plan.decoder["model"]), plan.decoder.get("gguf_file")
    texts = perplexity.read(
        plan.texts, name, gguf, plan.perplexity.length, plan.documents
    )  # before the model's weights
    model = perplexity.load(name, plan.decoder.get("device", "auto"), plan.decoder.get("dtype", "auto"), gguf)
    check_learned_positions(model, plan.perplexity.length)
    plan = keep_supported(plan, model, notify)
    short_name = Path(name).name
    if plan.retrieval is not None:  # check before anything is measured
        prompts = retrieval.Prompts.of(perplexity.load_tokenizer(name, gguf), plan.decoder.get("chat"))
        haystack = retrieval.read(plan.haystack)
        retrieval.check(model, prompts, haystack, plan.retrieval)
    results = perplexity.run(model, short_name, texts, plan.perplexity, folder)
    for line in dict.fromkeys(perplexity.failures(results, plan.perplexity.recipes)):
        notify(line)
    if plan.retrieval is not None:
        results = retrieval.run(model, short_name, prompts, haystack, plan.retrieval, folder)
        for line in dict.fromkeys(retrieval.failures(results, plan.retrieval)):
            notify(line)
    recipes = list(plan.perplexity.recipes)
    description = {"name": plan.name, "title": plan.title, "model": short_name, "recipes": recipes}
    write_json(folder / "decoder.json", description | {"forgetful": [r for r in recipes if forgets(r)]})
    return causal_plan_status(plan, out)


def causal_plan_status(plan: CausalPlan, out: Path) -> dict[str, Any]:
    """Count a plan's cells, and those done and failed in `out`, without checking which texts are long enough."""
    done, failed = 0, 0
    cells = len(plan.perplexity.recipes) * plan.documents
    results = out / plan.name / "perplexity.json"
    if (data := read_held(results, "texts", "cells")) is not None:
        cells = len(plan.perplexity.recipes) * len(data["texts"])
        done += sum(cell["recipe"] in plan.perplexity.recipes for cell in perplexity.asked(data))
        failed += len(perplexity.failures(results, plan.perplexity.recipes))
    if plan.retrieval is not None:
        planned = {(recipe, *cell) for recipe in plan.retrieval.recipes for cell in plan.retrieval.cells}
        cells += len(planned)
        data = read_held(out / plan.name / "retrieval.json", "cells") or {"cells": []}
        found = [cell for cell in data["cells"] if tuple(cell[key] for key in retrieval.KEY) in planned]
        failures = sum(cell["failed"] is not None for cell in found)
        done, failed = done + len(found) - failures, failed + failures
    return {"plan": plan.name, "cells": cells, "done": done, "failed": failed}


def forgets(recipe: str) -> bool:
    """Whether a recipe lets attention see only a part of the text."""
    return Recipe.parse(recipe, **OPEN).mask is not None


def check_learned_positions(model: PreTrainedModel, length: int) -> None:
    """Raise a ValueError for a model with fewer learned position embeddings than `length`."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and re.search("pos|wpe", name) and module.num_embeddings < length:
            most, kind = module.num_embeddings, model.config.model_type
            raise ValueError(f"{kind}: expected a model that can read {length} tokens, got {most} learned positions")


def keep_supported(plan: CausalPlan, model: PreTrainedModel, notify: Callable[[str], None]) -> CausalPlan:
    """Keep the recipes that the model can be extended with; the first refusal is raised unless those are skipped."""
    kept, skipped, error = list[str](), list[str](), None
    for recipe in plan.perplexity.recipes:
        try:
            with perplexity.under(model, recipe):
                kept.append(recipe)
        except ValueError as refusal:
            if not plan.skip_unsupported:
                raise
            error = refusal
            skipped.append(f"left out {recipe}: {refusal}")
    if error is not None and kept == [PLAIN]:
        raise error
    for line in skipped:
        notify(line)
    config, questions = replace(plan.perplexity, recipes=tuple(kept)), plan.retrieval
    if questions is not None:
        questions = replace(questions, recipes=tuple(recipe for recipe in questions.recipes if recipe in kept))
    return replace(plan, perplexity=config, retrieval=questions)
