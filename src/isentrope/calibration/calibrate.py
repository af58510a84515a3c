"""Fit a law to a user's own text, as detailed as held-out documents support.

Text needs no labels: the loss is that of the next token, beyond the training length, with the model frozen. One half of
the documents is fitted to; on the other the fitted laws are compared with those in closed form, text by text, and the
simplest that is not clearly worse than the best is chosen, and none worse there than InfoScale or the closed law.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import PreTrainedModel

from isentrope.analysis.observe import entropy_rows
from isentrope.calibration.config import CalibrationConfig, resolve_train_length
from isentrope.calibration.laws import Laws, hash_recipe, make_laws
from isentrope.calibration.optimize import FitProblem, StopFit, choose_knots, fit_law
from isentrope.calibration.passkeys import (
    RETRIEVAL_WEIGHT,
    compare_passkeys,
    compute_answer_losses,
    hide_passkeys,
    load_prompt_format,
    summarize_answers,
)
from isentrope.calibration.select import DEFAULTS, LEVELS, carries_interval, get_default, select_law, split_texts
from isentrope.evaluation.answers import score_answer
from isentrope.evaluation.loading import as_model, get_model_name, identify_model, keep_mode, read_causal_config
from isentrope.evaluation.metrics import Array, finite_perplexities, mean_interval, percent_change
from isentrope.evaluation.perplexity import check_model, measure_text
from isentrope.evaluation.prompts import Prompt, PromptFormat
from isentrope.evaluation.recipe_texts import under_recipe
from isentrope.evaluation.results import CALIBRATION, ResultsStore
from isentrope.evaluation.texts import Text, TextInput, collect_texts
from isentrope.hf.capture import get_recipe
from isentrope.hf.introspection import introspect, introspect_once
from isentrope.hf.train_length import ignore_other_lengths
from isentrope.recipe import Recipe
from isentrope.utils.files import write_atomically
from isentrope.utils.messages import truncate
from isentrope.utils.provenance import collect_provenance

SELECTING_LAWS = ("none", "infoscale", "closed", "given")  # one of several recipes is as good as its best of these


@dataclass(frozen=True)
class CalibrationResult:
    """The law that was selected.

    Args:
        recipe: with the law selected.
        chosen: its name, of LAWS or LEVELS.
        reason: why, in a sentence.
        data: the content of `calibrate.json`.
        path: of that file; None where nothing was kept.
    """

    recipe: Recipe
    chosen: str
    reason: str
    data: dict[str, Any]
    path: Path | None = None

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The laws compared, with their perplexity on held-out text by bucket and beyond the training length."""
        return list(self.data["candidates"])

    @property
    def warning(self) -> str | None:
        """A sentence where a law fitted to the loss alone answers passkeys clearly worse than the default law."""
        return (self.data["passkeys"] or {}).get("warning")


def calibrate(
    model: str | Path | PreTrainedModel,
    texts: TextInput | Sequence[TextInput],
    length: int | str,
    recipe: str = "auto",
    *,
    documents: int = 16,
    out: str | Path | None = None,
    **settings: Any,
) -> CalibrationResult:
    """Fit a law to your own texts with the model frozen; half of them are held out to select it.

    Where the position method has far keys, β and γ of far keys are fitted, and γ of near ones; elsewhere a temperature.

    Args:
        model: a loaded causal transformers model, or a folder or a name on the hub.
        texts: files, folders, globs, strings of text, or lists of token ids; two documents or more, and eleven for an
            interval.
        length: tokens read of each document, up to which the law is fitted; "4x" is four times the training length.
        recipe: what gets the law: "auto", the one chosen for the length, without `retrieve` where no law acts;
            "plain"; or any other, which may contain {window} and {factor}, and a share law to start from.
        documents: at most this many, the first that are long enough.
        out: a folder for `calibrate.json` and `recipe.txt`, from which the same call resumes; None leaves no files.
        **settings: `windows`, `factors`, `levels`, `budget`, `train_length`, `seed` and `with_retrieval` of
            `CalibrationConfig`, also as on a command line: `levels="scalar,layer"`, `budget="10m"`.

    Returns:
        The recipe with the law selected, and all laws compared.

    Raises:
        ValueError: too few texts are long enough, or the model is extended already.
    """
    model_config = read_causal_config(str(model)) if isinstance(model, str | Path) else model.config
    config = CalibrationConfig.parse_for(model_config, length, recipe, **settings)
    name = get_model_name(model)
    tokenized = collect_texts(texts, name, config.length, documents)
    split_texts(tokenized, config.length, config.seed)  # fail before a model is loaded
    prompts = load_prompt_format(name, required=config.with_retrieval)
    with keep_mode(loaded := as_model(model)):
        folder = None if out is None else Path(out)
        return fit_laws(loaded, tokenized, config, folder, Path(name).name, prompts=prompts)


@introspect_once()
@ignore_other_lengths()
def fit_laws(
    model: PreTrainedModel,
    texts: Sequence[Text],
    config: CalibrationConfig,
    out: Path | None = None,
    name: str = "",
    notify: Callable[[str], None] = lambda line: None,
    prompts: PromptFormat | None = None,
) -> CalibrationResult:
    """Fit laws to one half of the texts and select one by the other.

    Args:
        model: a causal model that is not extended.
        texts: documents of `config.length` tokens or more.
        config: what is fitted.
        out: a folder for `calibrate.json` and `recipe.txt`, from which an interrupted run resumes.
        name: what the results call the model.
        notify: called with each message.
        prompts: how passkeys are put to the model. Without `config.with_retrieval` they decide nothing: answers under
            the law selected are compared with those under the default law.
    """
    if (own := get_recipe(model)) != Recipe():
        raise ValueError(
            f"model: already extended with {truncate(str(own))!r}; calibrate the one that it was made from"
        )
    if config.with_retrieval and prompts is None:
        raise ValueError("prompts: expected a PromptFormat where with_retrieval, got None")
    model.eval()
    return _Calibration(model, texts, config, out, name, notify).run(prompts)


class _Calibration:
    def __init__(
        self,
        model: PreTrainedModel,
        texts: Sequence[Text],
        config: CalibrationConfig,
        out: Path | None,
        name: str,
        notify: Callable[[str], None],
    ) -> None:
        trained = resolve_train_length(config.train_length, model.config)
        if config.length <= trained:
            raise ValueError(f"length: expected more than {trained}, the training length, got {config.length}")
        self.model, self.config, self.out, self.notify, self.trained = model, config, out, notify, trained
        self.fitting, self.held_out = split_texts(texts, config.length, config.seed)
        self.knots = choose_knots(trained, config.length)
        self.layers = introspect(model)
        self.passkeys: dict[str, Prompt] = {}
        self.start_time = time.monotonic()
        self.provenance = collect_provenance() | {"transformers": transformers.__version__}
        self.data = self._open_store(name)
        self.seconds_before = self.data["seconds"]

    def run(self, prompts: PromptFormat | None = None) -> CalibrationResult:
        check_model(self.model, [*self.held_out, *self.fitting])
        self.notify(f"{len(self.fitting)} documents to fit to, {len(self.held_out)} held out")
        if prompts is not None and self.config.with_retrieval:
            texts = [*self.fitting, *self.held_out]
            self.passkeys = hide_passkeys(texts, prompts, self.config.length, self.config.seed)
        laws = self.select_laws()
        recipes = laws.build_closed()
        for recipe in recipes.values():
            self.measure_objective(recipe, self.held_out)
        recipes |= self.fit_levels(laws)
        objectives = {name: self.measure_objective(recipe, self.held_out) for name, recipe in recipes.items()}
        chosen, reason = select_law(objectives, self.config.seed)
        passkeys = None
        if prompts is not None and chosen in LEVELS and not self.passkeys:
            compared = {name: recipes[name] for name in (get_default(recipes), chosen)}
            passkeys = compare_passkeys(self.model, compared, self.held_out, prompts, self.config, self.notify)
        self.data |= {
            "recipe": str(laws.base),
            "retrieval_weight": RETRIEVAL_WEIGHT if self.passkeys else None,
            "candidates": self.build_rows(laws, recipes),
            "chosen": chosen,
            "reason": reason,
            "passkeys": passkeys,
            "entropy": self.measure_entropy(laws.base, recipes[chosen]),
        }
        self.save()
        if self.out is not None:
            with write_atomically(self.out / "recipe.txt") as partial:
                partial.write_text(f"{recipes[chosen]}\n", encoding="utf-8")
        return CalibrationResult(recipes[chosen], chosen, reason, self.data, self.store.path)

    def select_laws(self) -> Laws:
        """Return the laws of the recipe that is best on the texts to fit to, under a closed law."""
        depth = 1 + max(layer.index for layer in self.layers)
        laws = {text: make_laws(text, self.knots, depth, self.layers[0].head_dim) for text in self.config.recipes}
        tried = {}
        for text in laws if len(laws) > 1 else ():
            closed = [recipe for name, recipe in laws[text].build_closed().items() if name in SELECTING_LAWS]
            tried[text] = min(map(self.measure_fitting, closed))
        best = min(laws, key=lambda text: tried.get(text, inf))
        if tried:
            self.notify(f"{best} is the best of {len(tried)} recipes")
        self.data["tried"] = [{"recipe": text, "loss": loss} for text, loss in tried.items()]
        return laws[best]

    def fit_levels(self, laws: Laws) -> dict[str, Recipe]:
        """Fit each level that there is time for, starting from the one before; return the recipe under each."""
        start = laws.choose_start(self.measure_fitting)
        levels = [level for level in LEVELS if level in self.config.levels and self.has_level(level, laws)]
        fitted: dict[str, Recipe] = {}
        for index, level in enumerate(levels):
            if level == "near":
                means = {name: self.measure_objective(fitted[name], self.held_out).mean() for name in fitted}
                if means:
                    best = min(means, key=lambda name: means[name])
                    start = np.array(self.data["fits"][best]["values"])
                start = laws.add_near(start)
            else:
                start = np.broadcast_to(start, (*self.table_shape(level), start.shape[-1])).copy()
            fit = self.fit_level(level, laws, start, self.deadline(len(levels) - index))
            if fit["values"] is None:
                self.notify(f"{level}: not fitted ({fit['ended']})")
                break
            start = np.array(fit["values"])
            fitted[level] = laws.build(start)
            self.measure_objective(fitted[level], self.held_out)
            if fit["ended"] == "out of memory":
                break
        return fitted

    def has_level(self, level: str, laws: Laws) -> bool:
        """Return whether a level differs from the one before."""
        if level == "near":
            return laws.has_near
        heads = {layer.heads for layer in self.layers}
        return {
            "scalar": True,
            "layer": self.table_shape("layer") != (1, 1),
            "head": len(heads) == 1 and heads != {1},
        }[level]

    def table_shape(self, level: str) -> tuple[int, int]:
        """Return the layers and heads in the table of a level."""
        layers = 1 + max(layer.index for layer in self.layers)
        return {"scalar": (1, 1), "layer": (layers, 1), "head": (layers, self.layers[0].heads)}[level]

    def fit_level(self, level: str, laws: Laws, start: Array, deadline: float) -> dict[str, Any]:
        """Fit one level, or continue a fit that a budget or the memory ended."""
        fits = self.data["fits"]
        if level not in fits or fits[level]["start"] != start.tolist():  # the level before may have changed since
            fits[level] = {"ended": "budget", "start": start.tolist(), "history": [], "losses": [], "values": None}
        fit = fits[level]
        if fit["ended"] not in ("budget", "out of memory"):
            return dict(fit)
        fit["ended"] = "budget"  # until it has ended otherwise
        history = fit["history"]

        def on_evaluation() -> None:
            last = history[-1]
            passkeys = f", answers {last['retrieval']:.4f}" if self.passkeys else ""
            self.notify(f"{level}: evaluation {len(history)}, loss {last['loss']:.5f}{passkeys}")
            self.save()
            if self.spent > deadline:
                raise StopFit("budget")

        if self.spent <= deadline:
            texts = [torch.tensor(text.tokens[: self.config.length]) for text in self.fitting]
            passkeys = [self.passkeys[text.sha256] for text in self.fitting] if self.passkeys else []
            fit["ended"] = fit_law(FitProblem(self.model, laws, texts, start, passkeys), history, on_evaluation)
        if history:
            best = min(history, key=lambda row: row["objective"])
            fit |= {"values": best["values"], "losses": [row["loss"] for row in history]}
        if fit["ended"] in ("converged", "evaluations"):
            fit["history"] = []  # nothing resumes from there
        self.save()
        return dict(fit)

    @property
    def spent(self) -> float:
        """Seconds of this run and of earlier ones in the folder."""
        return self.seconds_before + time.monotonic() - self.start_time

    def deadline(self, left: int) -> float:
        """Compute when a level must end, so that those left get equal shares and held-out texts can be measured."""
        if self.config.budget is None:
            return inf
        measuring = len(self.held_out) * float(np.mean([row["seconds"] for row in self.data["cells"]]))
        return self.spent + (self.config.budget - self.spent) / left - measuring

    def measure(self, recipe: Recipe, text: Text) -> dict[str, Any]:
        """Measure a text under a recipe, and the passkey hidden in it, unless that is done already."""
        key = hash_recipe(recipe)
        known = {(row["key"], row["text"]): row for row in self.data["cells"]}
        if (row := known.get((key, text.sha256))) is None:
            row = {"key": key, "text": text.sha256} | measure_text(self.model, recipe, text, (0, *self.knots))
            if self.passkeys:
                start = time.perf_counter()
                with under_recipe(self.model, recipe), torch.no_grad():
                    row["passkey"] = score_answer(self.model, self.passkeys[text.sha256])
                row["seconds"] += time.perf_counter() - start
            self.data["cells"].append(row)
            self.save()
        return row

    def measure_losses(self, recipe: Recipe, texts: Sequence[Text]) -> Array:
        """Measure the mean loss in every bucket of every text, and last their mean beyond the training length."""
        counts = np.array([b - max(a, 1) for a, b in pairwise((0, *self.knots))])
        means = np.array([self.measure(recipe, text)["loss"] for text in texts]) / counts
        return np.concatenate((means, means[:, 1:].mean(1, keepdims=True)), 1)

    def measure_answers(self, recipe: Recipe, texts: Sequence[Text]) -> Array:
        """Measure -ln p for a token of each text's passkey, (texts,); 0 where none is hidden."""
        if not self.passkeys:
            return np.zeros(len(texts))
        return compute_answer_losses([self.measure(recipe, text)["passkey"] for text in texts])

    def measure_objective(self, recipe: Recipe, texts: Sequence[Text]) -> Array:
        """Measure what decides, (texts,): the loss beyond the training length, and that of answers with a weight."""
        beyond = self.measure_losses(recipe, texts)[:, -1]
        return beyond + RETRIEVAL_WEIGHT * self.measure_answers(recipe, texts)

    def measure_fitting(self, recipe: Recipe) -> float:
        """Measure the mean objective of the texts to fit to."""
        return float(self.measure_objective(recipe, self.fitting).mean())

    def build_rows(self, laws: Laws, recipes: dict[str, Recipe]) -> list[dict[str, Any]]:
        """Build the rows of all candidates: the law, held-out perplexity by bucket and beyond, change from others."""
        losses = {name: self.measure_losses(recipe, self.held_out) for name, recipe in recipes.items()}
        rows = []
        for name, recipe in recipes.items():
            row = {"name": name, "key": hash_recipe(recipe), "recipe": recipe.to_dict(), **laws.sample_curves(recipe)}
            row |= self._summarize("perplexity", losses[name], finite_perplexities)
            row["against"] = {
                other: self._summarize("percent", losses[name] - losses[other], percent_change)
                for other in ("none", *DEFAULTS)
                if other in losses
            }
            if self.passkeys:
                row["retrieval"] = summarize_answers([self.measure(recipe, text)["passkey"] for text in self.held_out])
            rows.append(row)
        return rows

    def _summarize(self, name: str, losses: Array, convert: Callable[[Any], Any]) -> dict[str, Any]:
        """Average over texts, and add a 95 % interval where there are enough of them."""
        mean, *ends = mean_interval(losses, self.config.seed)
        low, high = (convert(end) if carries_interval(len(losses)) else None for end in ends)
        return {name: convert(mean), "low": low, "high": high}

    def measure_entropy(self, base: Recipe, chosen: Recipe) -> dict[str, Any]:
        """Measure entropies on a held-out text: at the training length, and at full length before and after."""
        text = self.held_out[0]
        ids = torch.tensor(text.tokens[: self.config.length])[None]
        settings = {"trained": (base, ids[:, : self.trained]), "before": (base, ids), "after": (chosen, ids)}
        entropies: dict[str, Any] = {"text": text.name}
        for when, (recipe, tokens) in settings.items():
            with under_recipe(self.model, recipe):
                entropies[when] = entropy_rows(self.model, tokens, exact=False)
        return entropies

    def _open_store(self, name: str) -> dict[str, Any]:
        """Open the results of an earlier run of the same, or start new ones."""
        config = asdict(self.config)
        parts = (("fitting", self.fitting), ("held-out", self.held_out))
        head = {
            "model": identify_model(self.model, name),
            "config": {key: value for key, value in config.items() if key not in ("budget", "levels")},
            "train_length": self.trained,
            "knots": self.knots,
            "texts": [{"name": t.name, "sha256": t.sha256, "part": part} for part, texts in parts for t in texts],
        }
        self.store = ResultsStore(self.out, CALIBRATION, head)
        head = self.store.head
        return self.store.earlier | head if self.store.earlier else head | {"cells": [], "fits": {}, "seconds": 0.0}

    def save(self) -> None:
        self.data |= {"seconds": self.spent, "budget": self.config.budget, "run": self.provenance}
        self.store.write(self.data)
