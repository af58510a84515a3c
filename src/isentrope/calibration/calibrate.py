"""Fit a temperature law to a user's own text, as detailed as held-out documents support.

Text needs no labels: the loss is that of the next token, beyond the training length, with the model frozen. One half of
the documents is fitted to; on the other the fitted laws are compared with none, InfoScale and LogN, text by text, and
the simplest that is not clearly worse than the best is chosen. None is worse than InfoScale there.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import PreTrainedModel

from isentrope.analysis.observe import entropy_rows
from isentrope.calibration.config import CalibrationConfig
from isentrope.calibration.optimize import FitProblem, StopFit, choose_knots, fit_law
from isentrope.calibration.select import LAWS, LEVELS, select_law, split_texts
from isentrope.evaluation.loading import as_model, get_model_name, identify_model, keep_mode
from isentrope.evaluation.metrics import Array, finite_perplexities, mean_interval, percent_change
from isentrope.evaluation.perplexity import check_logits, measure_text
from isentrope.evaluation.recipe_texts import PLAIN, parse_recipe, under_recipe
from isentrope.evaluation.results import CALIBRATION, ResultsStore
from isentrope.evaluation.texts import Text, TextInput, collect_texts
from isentrope.hf.capture import get_recipe
from isentrope.hf.introspection import introspect
from isentrope.hf.layer_plan import read_train_length
from isentrope.recipe import Recipe
from isentrope.temperatures import Fitted, InfoScale, LogN
from isentrope.utils.files import write_atomically
from isentrope.utils.provenance import collect_provenance

TAU_DIGITS = 4  # of a fitted τ
CURVE_POINTS = 33  # of a law in closed form


@dataclass(frozen=True)
class CalibrationResult:
    """The law that was selected.

    Args:
        recipe: with the temperature selected.
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
        """The laws compared: τ, and perplexity on held-out text by bucket and beyond the training length."""
        return list(self.data["candidates"])


def calibrate(
    model: str | Path | PreTrainedModel,
    texts: TextInput | Sequence[TextInput],
    length: int,
    recipe: str = PLAIN,
    *,
    documents: int = 16,
    out: str | Path | None = None,
    **settings: Any,
) -> CalibrationResult:
    """Fit a temperature law to your own texts with the model frozen; half of them are held out to select it.

    Args:
        model: a loaded causal transformers model, or a folder or a name on the hub.
        texts: files, folders, globs, strings of text, or lists of token ids; two documents or more.
        length: tokens read of each document; the law is fitted up to there.
        recipe: what gets the temperature; it may contain {window} and {factor}.
        documents: at most this many, the first that are long enough.
        out: a folder for `calibrate.json` and `recipe.txt`, from which the same call resumes; by default nothing is
            left on disk.
        **settings: `windows`, `factors`, `levels`, `budget`, `train_length` and `seed` of `CalibrationConfig`.

    Returns:
        The recipe with the law selected, and all laws compared.

    Raises:
        ValueError: too few texts are long enough, or the model is extended already.
    """
    config = CalibrationConfig(length, recipe, **settings)
    name = get_model_name(model)
    tokenized = collect_texts(texts, name, length, documents)
    split_texts(tokenized, length, config.seed)  # fail before a model is loaded
    with keep_mode(loaded := as_model(model)):
        return fit_temperature(loaded, tokenized, config, None if out is None else Path(out), Path(name).name)


def fit_temperature(
    model: PreTrainedModel,
    texts: Sequence[Text],
    config: CalibrationConfig,
    out: Path | None = None,
    name: str = "",
    notify: Callable[[str], None] = lambda line: None,
) -> CalibrationResult:
    """Fit temperatures to one half of the texts and select one by the other.

    Args:
        model: a causal model that is not extended.
        texts: documents of `config.length` tokens or more.
        config: what is fitted.
        out: a folder for `calibrate.json` and `recipe.txt`, from which an interrupted run resumes.
        name: what the results call the model.
        notify: called with each message.
    """
    if (own := get_recipe(model)) != Recipe():
        raise ValueError(f"model: already extended with {str(own)!r}; calibrate the one that it was made from")
    model.eval()
    return _Calibration(model, texts, config, out, name, notify).run()


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
        trained = config.train_length or read_train_length(model.config.get_text_config())
        if trained is None:
            raise ValueError("train_length: expected a number, since this model's config has none")
        if config.length <= trained:
            raise ValueError(f"length: expected more than {trained}, the training length, got {config.length}")
        self.model, self.config, self.out, self.notify, self.trained = model, config, out, notify, trained
        self.fitting, self.held_out = split_texts(texts, config.length, config.seed)
        self.knots = choose_knots(trained, config.length)
        self.layers = introspect(model)
        self.start_time = time.monotonic()
        self.provenance = collect_provenance() | {"transformers": transformers.__version__}
        self.data = self._open_store(name)
        self.seconds_before = self.data["seconds"]

    def run(self) -> CalibrationResult:
        check_logits(self.model, torch.tensor(self.held_out[0].tokens[:32]))
        self.notify(f"{len(self.fitting)} documents to fit to, {len(self.held_out)} held out")
        base, laws = self.select_base()
        for law in laws.values():
            self.measure_losses(law, self.held_out)
        laws |= self.fit_levels(base, laws)
        losses = {name: self.measure_losses(law, self.held_out) for name, law in laws.items()}
        chosen, reason = select_law({name: values[:, -1] for name, values in losses.items()}, self.config.seed)
        self.data |= {
            "recipe": str(base),
            "candidates": [self.build_row(name, law, losses) for name, law in laws.items()],
            "chosen": chosen,
            "reason": reason,
            "entropy": self.measure_entropy(base, laws[chosen]),
        }
        self.save()
        if self.out is not None:
            with write_atomically(self.out / "recipe.txt") as partial:
                partial.write_text(f"{laws[chosen]}\n", encoding="utf-8")
        return CalibrationResult(laws[chosen], chosen, reason, self.data, self.store.path)

    def select_base(self) -> tuple[Recipe, dict[str, Recipe]]:
        """Select the recipe that is best on the texts to fit to, bare or with InfoScale; return it and its laws."""
        tried = {}
        for text in self.config.recipes:
            laws = self.build_closed_laws(text)
            tried[text] = min(float(self.measure_losses(laws[name], self.fitting)[:, -1].mean()) for name in LAWS[:2])
        best = min(tried, key=lambda text: tried[text])
        if len(tried) > 1:
            self.notify(f"{best} is the best of {len(tried)} recipes")
        self.data["tried"] = [{"recipe": text, "loss": loss} for text, loss in tried.items()]
        laws = self.build_closed_laws(best)
        return laws["none"], laws

    def build_closed_laws(self, text: str) -> dict[str, Recipe]:
        """Build a recipe without a temperature, with InfoScale and with LogN."""
        base = parse_recipe(text, train_length=self.trained)
        if base.position is not None:
            base = replace(base, position=base.position.resolve(self.trained))
        known = (None, InfoScale(self.trained), LogN(self.trained))
        return {name: replace(base, temperature=law) for name, law in zip(LAWS, known, strict=True)}

    def fit_levels(self, base: Recipe, laws: dict[str, Recipe]) -> dict[str, Recipe]:
        """Fit each level that there is time for, starting from the one before; return the recipe under each."""
        start = self.choose_start(laws)
        levels = [level for level in LEVELS if level in self.config.levels and self.table_shape(level) is not None]
        fitted = {}
        for index, level in enumerate(levels):
            start = np.broadcast_to(start, (*(self.table_shape(level) or ()), start.shape[-1])).copy()
            fit = self.fit_level(level, base, start, self.deadline(len(levels) - index))
            if fit["table"] is None:
                self.notify(f"{level}: not fitted ({fit['ended']})")
                break
            start = np.array(fit["logs"])
            # constant past the last length: a slope that continued would reach any τ, below 0 too
            fitted[level] = replace(base, temperature=Fitted((*self.knots, 2 * self.knots[-1]), fit["table"]))
            self.measure_losses(fitted[level], self.held_out)
            if fit["ended"] == "out of memory":
                break
        return fitted

    def choose_start(self, laws: dict[str, Recipe]) -> Array:
        """Take ln τ at the knots from the closed law that is best on the texts to fit to, (1, 1, knots - 1)."""
        means = {name: self.measure_losses(law, self.fitting)[:, -1].mean() for name, law in laws.items()}
        law = laws[min(means, key=lambda name: means[name])].temperature
        if law is None:
            return np.zeros((1, 1, len(self.knots) - 1))
        tau = law.scale(torch.tensor(self.knots[1:], dtype=torch.float64), self.layers[0].head_dim)
        return tau.log().numpy()[None, None]

    def table_shape(self, level: str) -> tuple[int, int] | None:
        """Return the layers and heads in the table of a level; None where it would be the level before."""
        layers = 1 + max(layer.index for layer in self.layers)
        heads = {layer.heads for layer in self.layers}
        if level == "scalar":
            return 1, 1
        if level == "layer":
            return (layers, 1) if layers > 1 else None
        return (layers, heads.pop()) if len(heads) == 1 and heads != {1} else None

    def fit_level(self, level: str, base: Recipe, start: Array, deadline: float) -> dict[str, Any]:
        """Fit one level, or continue a fit that a budget or the memory ended."""
        fit = self.data["fits"].setdefault(level, {"ended": "budget", "history": [], "losses": [], "table": None})
        if fit["ended"] not in ("budget", "out of memory"):
            return fit
        fit["ended"] = "budget"  # until it has ended otherwise
        history = fit["history"]
        if history and history[0]["logs"] != start.tolist():
            history.clear()  # the level before has changed since, and with it the origin of those points

        def on_evaluation() -> None:
            self.notify(f"{level}: evaluation {len(history)}, loss {history[-1]['loss']:.5f}")
            self.save()
            if self.spent > deadline:
                raise StopFit("budget")

        if self.spent <= deadline:
            texts = [torch.tensor(text.tokens[: self.config.length]) for text in self.fitting]
            problem = FitProblem(self.model, base, texts, self.knots, start)
            fit["ended"] = fit_law(problem, history, on_evaluation)
        if history:
            best = min(history, key=lambda row: row["objective"])
            tau = np.round(np.exp(best["logs"]), TAU_DIGITS)
            table = np.concatenate((np.ones_like(tau[..., :1]), tau, tau[..., -1:]), -1)
            fit |= {
                "table": (table[0, 0] if level == "scalar" else table).tolist(),
                "logs": best["logs"],
                "losses": [row["loss"] for row in history],
            }
        if fit["ended"] in ("converged", "evaluations"):
            fit["history"] = []  # nothing resumes from there
        self.save()
        return fit

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

    def measure_losses(self, recipe: Recipe, texts: Sequence[Text]) -> Array:
        """Measure the mean loss in every bucket of every text, and last their mean beyond the training length."""
        key, edges = _key(recipe), (0, *self.knots)
        known = {(row["key"], row["text"]): row for row in self.data["cells"]}
        counts = np.array([b - max(a, 1) for a, b in pairwise(edges)])
        losses = []
        for text in texts:
            if (row := known.get((key, text.sha256))) is None:
                row = {"key": key, "text": text.sha256} | measure_text(self.model, recipe, text, edges)
                self.data["cells"].append(row)
                self.save()
            means = np.array(row["loss"]) / counts
            losses.append([*means, means[1:].mean()])
        return np.array(losses)

    def build_row(self, name: str, recipe: Recipe, losses: dict[str, Array]) -> dict[str, Any]:
        """Build a candidate's row: τ, held-out perplexity by bucket and beyond, and its change from others."""
        mean, low, high = (finite_perplexities(x) for x in mean_interval(losses[name], self.config.seed))
        against = {}
        for other in ("none", "infoscale"):
            change = mean_interval(losses[name] - losses[other], self.config.seed)
            percent = [percent_change(x) for x in change]
            against[other] = dict(zip(("percent", "low", "high"), percent, strict=True))
        law = {"name": name, "key": _key(recipe), "recipe": recipe.to_dict(), "tau": self.sample_curve(recipe)}
        return law | {"perplexity": mean, "low": low, "high": high, "against": against}

    def sample_curve(self, recipe: Recipe) -> dict[str, Any]:
        """Sample τ against n: one row for all layers, for each, or for each of their heads."""
        law, n = recipe.temperature, list(self.knots)
        if law is None:
            return {"n": n, "rows": [[1.0] * len(n)]}
        if isinstance(law, Fitted):
            return {"n": n, "rows": np.array(law.table).reshape(-1, len(law.lengths))[:, : len(n)].tolist()}
        n = np.geomspace(n[0], n[-1], CURVE_POINTS).tolist()
        tau = law.scale(torch.tensor(n, dtype=torch.float64), self.layers[0].head_dim)
        return {"n": n, "rows": [tau.tolist()]}

    def measure_entropy(self, base: Recipe, chosen: Recipe) -> dict[str, Any]:
        """Measure entropies on a held-out text: at the training length, and at full length before and after."""
        text = self.held_out[0]
        ids = torch.tensor(text.tokens[: self.config.length])[None]
        settings = {"trained": (base, ids[:, : self.trained]), "before": (base, ids), "after": (chosen, ids)}
        entropies: dict[str, Any] = {"text": text.name}
        for when, (recipe, tokens) in settings.items():
            with under_recipe(self.model, recipe):
                entropies[when] = entropy_rows(self.model, tokens)
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


def _key(recipe: Recipe) -> str:
    return hashlib.sha256(str(recipe).encode()).hexdigest()[:16]
