"""Temperatures fitted to a user's own text: a law over n, as detailed as held-out documents ask for.

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

from isentrope.analysis.inspect import told_entropies
from isentrope.calibration.optimize import EndError, descend, knots
from isentrope.calibration.select import LAWS, LEVELS, choose, halves
from isentrope.evaluation.loading import identify_model
from isentrope.evaluation.metrics import Array, finite_perplexities, mean_interval, percent_change
from isentrope.evaluation.perplexity import check_logits, measure_text
from isentrope.evaluation.recipes import PLAIN, parse_recipe, under_recipe
from isentrope.evaluation.results import CALIBRATION, ResultsStore
from isentrope.evaluation.texts import Text
from isentrope.hf.capture import get_recipe
from isentrope.hf.introspection import introspect
from isentrope.hf.layer_plan import read_train_length
from isentrope.recipe import Recipe
from isentrope.temperatures import Fitted, InfoScale, LogN
from isentrope.utils.files import write_atomically
from isentrope.utils.provenance import collect_provenance

DIGITS = 4  # of a fitted τ
POINTS = 33  # of a law in closed form, for its curve
UNITS = {"s": 1, "m": 60, "h": 3600}


@dataclass(frozen=True)
class Config:
    """length: tokens read of each document. recipe: what gets the temperature; windows and factors take the places of
    {window} and {factor} in it, and the best of them is kept. levels: which laws are fitted. budget: seconds, all runs
    in one folder taken together; None for as long as it takes. train_length: in place of what the model's config says.
    """

    length: int
    recipe: str = PLAIN
    windows: tuple[int, ...] = ()
    factors: tuple[float, ...] = ()
    levels: tuple[str, ...] = LEVELS
    budget: float | None = None
    train_length: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if unknown := [level for level in self.levels if level not in LEVELS]:
            raise ValueError(f"levels: expected some of {', '.join(LEVELS)}, got {unknown[0]!r}")
        for text in self.recipes:
            found = parse_recipe(text).temperature
            if found is not None:
                raise ValueError(f"recipe: expected one without a temperature, which is to be fitted, got {found}")

    @classmethod
    def read(
        cls, length: int, recipe: str, windows: str | None, factors: str | None, levels: str, budget: str | None,
        **others: Any,
    ) -> Config:  # fmt: skip
        """From words of a command line."""
        wide, far = _numbers("windows", windows, int), _numbers("factors", factors, float)
        return cls(length, recipe, wide, far, tuple(levels.split(",")), seconds(budget), **others)

    @property
    def recipes(self) -> list[str]:
        """The recipe, with every window and factor put in."""
        found = [self.recipe]
        for name, values in (("window", self.windows), ("factor", self.factors)):
            place = f"{{{name}}}"
            if (place in self.recipe) != bool(values):
                raise ValueError(
                    f"{name}s: expected numbers if, and only if, the recipe says {place}, "
                    f"got {list(values)} for {self.recipe!r}"
                )
            shown = [f"{value:g}" if isinstance(value, float) else str(value) for value in values]
            found = [text.replace(place, word) for text in found for word in shown] if values else found
        return found


def seconds(text: str | None) -> float | None:
    """A time such as 90s, 10m or 2h."""
    if text is None:
        return None
    number, unit = text[:-1], text[-1:]
    try:
        found = float(number) * UNITS[unit]
    except (ValueError, KeyError):
        found = -1.0
    if not 0 < found < inf:
        raise ValueError(f"budget: expected a time such as 90s, 10m or 2h, got {text!r}")
    return found


def _numbers(name: str, text: str | None, kind: type) -> tuple[Any, ...]:
    try:
        return () if text is None else tuple(kind(word) for word in text.split(","))
    except ValueError:
        raise ValueError(f"{name}: expected numbers such as 4,8, got {text!r}") from None


@dataclass(frozen=True)
class Result:
    """recipe: with the temperature that was chosen. chosen: its name, of LAWS or LEVELS. data: as in calibrate.json."""

    recipe: Recipe
    chosen: str
    reason: str
    data: dict[str, Any]


def calibrate(
    model: PreTrainedModel,
    texts: Sequence[Text],
    config: Config,
    out: Path | None = None,
    name: str = "",
    say: Callable[[str], None] = print,
) -> Result:
    """Fit temperatures to one half of the texts and choose among them by the other.

    out: a folder for calibrate.json and recipe.txt. What an earlier run of the same has left there is kept.
    """
    if (own := get_recipe(model)) != Recipe():
        raise ValueError(f"model: already extended with {str(own)!r}; calibrate the one that it was made from")
    model.eval()
    return _Calibration(model, texts, config, out, name, say).run()


class _Calibration:
    def __init__(
        self,
        model: PreTrainedModel,
        texts: Sequence[Text],
        config: Config,
        out: Path | None,
        name: str,
        say: Callable[[str], None],
    ) -> None:
        trained = config.train_length or read_train_length(model.config.get_text_config())
        if trained is None:
            raise ValueError("train_length: expected a number, this model's config does not tell")
        if config.length <= trained:
            raise ValueError(f"length: expected more than {trained}, the training length, got {config.length}")
        self.model, self.config, self.out, self.say, self.trained = model, config, out, say, trained
        self.fitting, self.held = halves(texts, config.length, config.seed)
        self.knots = knots(trained, config.length)
        self.layers = introspect(model)
        self.begun = time.monotonic()
        self.machine = collect_provenance() | {"transformers": transformers.__version__}
        self.data = self._kept(name)
        self.before = self.data["seconds"]

    def run(self) -> Result:
        check_logits(self.model, torch.tensor(self.held[0].tokens[:32]))
        self.say(f"{len(self.fitting)} documents to fit to, {len(self.held)} held out")
        base, laws = self.base()
        for law in laws.values():
            self.losses(law, self.held)
        laws |= self.fitted(base, laws)
        losses = {name: self.losses(law, self.held) for name, law in laws.items()}
        chosen, reason = choose({name: values[:, -1] for name, values in losses.items()}, self.config.seed)
        self.data |= {
            "recipe": str(base),
            "candidates": [self.row(name, law, losses) for name, law in laws.items()],
            "chosen": chosen,
            "reason": reason,
            "entropy": self.entropy(base, laws[chosen]),
        }
        self.save()
        if self.out is not None:
            with write_atomically(self.out / "recipe.txt") as partial:
                partial.write_text(f"{laws[chosen]}\n", encoding="utf-8")
        return Result(laws[chosen], chosen, reason, self.data)

    def base(self) -> tuple[Recipe, dict[str, Recipe]]:
        """The recipe that is best on the texts to fit to, bare or with InfoScale, and the laws in closed form on it."""
        tried = {}
        for text in self.config.recipes:
            laws = self.closed(text)
            tried[text] = min(float(self.losses(laws[name], self.fitting)[:, -1].mean()) for name in LAWS[:2])
        best = min(tried, key=lambda text: tried[text])
        if len(tried) > 1:
            self.say(f"{best} is the best of {len(tried)} recipes")
        self.data["tried"] = [{"recipe": text, "loss": loss} for text, loss in tried.items()]
        laws = self.closed(best)
        return laws["none"], laws

    def closed(self, text: str) -> dict[str, Recipe]:
        base = parse_recipe(text, train_length=self.trained)
        if base.position is not None:
            base = replace(base, position=base.position.resolve(self.trained))
        known = (None, InfoScale(self.trained), LogN(self.trained))
        return {name: replace(base, temperature=law) for name, law in zip(LAWS, known, strict=True)}

    def fitted(self, base: Recipe, laws: dict[str, Recipe]) -> dict[str, Recipe]:
        """The recipe under each level that there was time to fit, each begun from the one before."""
        start = self.start(laws)
        levels = [level for level in LEVELS if level in self.config.levels and self.shape(level) is not None]
        found = {}
        for place, level in enumerate(levels):
            start = np.broadcast_to(start, (*(self.shape(level) or ()), start.shape[-1])).copy()
            fit = self.fit(level, base, start, self.deadline(len(levels) - place))
            if fit["table"] is None:
                self.say(f"{level}: not fitted ({fit['ended']})")
                break
            start = np.array(fit["logs"])
            # held past the last of the texts: a slope that goes on would reach any τ, below 0 too
            found[level] = replace(base, temperature=Fitted((*self.knots, 2 * self.knots[-1]), fit["table"]))
            self.losses(found[level], self.held)
            if fit["ended"] == "out of memory":
                break
        return found

    def start(self, laws: dict[str, Recipe]) -> Array:
        """ln τ at the knots of the law in closed form that is best on the texts to fit to, (1, 1, knots - 1)."""
        means = {name: self.losses(law, self.fitting)[:, -1].mean() for name, law in laws.items()}
        law = laws[min(means, key=lambda name: means[name])].temperature
        if law is None:
            return np.zeros((1, 1, len(self.knots) - 1))
        tau = law.scale(torch.tensor(self.knots[1:], dtype=torch.float64), self.layers[0].head_dim)
        return tau.log().numpy()[None, None]

    def shape(self, level: str) -> tuple[int, int] | None:
        """Layers and heads in the table of a level; None where it would be the one before."""
        layers = 1 + max(layer.index for layer in self.layers)
        heads = {layer.heads for layer in self.layers}
        if level == "scalar":
            return 1, 1
        if level == "layer":
            return (layers, 1) if layers > 1 else None
        return (layers, heads.pop()) if len(heads) == 1 and heads != {1} else None

    def fit(self, level: str, base: Recipe, start: Array, deadline: float) -> dict[str, Any]:
        fit = self.data["fits"].setdefault(level, {"ended": "budget", "history": [], "losses": [], "table": None})
        if fit["ended"] not in ("budget", "out of memory"):
            return fit
        fit["ended"] = "budget"  # until it has ended otherwise
        history = fit["history"]
        if history and history[0]["logs"] != start.tolist():
            history.clear()  # the level before has moved on since: those points were counted from elsewhere

        def noted() -> None:
            self.say(f"{level}: evaluation {len(history)}, loss {history[-1]['loss']:.5f}")
            self.save()
            if self.spent > deadline:
                raise EndError("budget")

        if self.spent <= deadline:
            texts = [torch.tensor(text.tokens[: self.config.length]) for text in self.fitting]
            fit["ended"] = descend(self.model, base, texts, self.knots, start, history, noted)
        if history:
            best = min(history, key=lambda row: row["objective"])
            tau = np.round(np.exp(best["logs"]), DIGITS)
            table = np.concatenate((np.ones_like(tau[..., :1]), tau, tau[..., -1:]), -1)
            fit |= {
                "table": (table[0, 0] if level == "scalar" else table).tolist(),
                "logs": best["logs"],
                "losses": [row["loss"] for row in history],
            }
        if fit["ended"] in ("converged", "evaluations"):
            fit["history"] = []  # nothing goes on from there
        self.save()
        return fit

    @property
    def spent(self) -> float:
        return self.before + time.monotonic() - self.begun

    def deadline(self, left: int) -> float:
        """When a level must end, so that those left have equal shares and all can be measured on held-out texts."""
        if self.config.budget is None:
            return inf
        measuring = len(self.held) * float(np.mean([row["seconds"] for row in self.data["cells"]]))
        return self.spent + (self.config.budget - self.spent) / left - measuring

    def losses(self, recipe: Recipe, texts: Sequence[Text]) -> Array:
        """Mean loss in every bucket of every text, and last that beyond the training length, all buckets alike."""
        key, edges = _key(recipe), (0, *self.knots)
        known = {(row["key"], row["text"]): row for row in self.data["cells"]}
        counts = np.array([b - max(a, 1) for a, b in pairwise(edges)])
        found = []
        for text in texts:
            if (row := known.get((key, text.sha256))) is None:
                row = {"key": key, "text": text.sha256} | measure_text(self.model, recipe, text, edges)
                self.data["cells"].append(row)
                self.save()
            means = np.array(row["loss"]) / counts
            found.append([*means, means[1:].mean()])
        return np.array(found)

    def row(self, name: str, recipe: Recipe, losses: dict[str, Array]) -> dict[str, Any]:
        """A candidate: its τ, and its held-out perplexity per bucket and beyond, also against others in per cent."""
        mean, low, high = (finite_perplexities(x) for x in mean_interval(losses[name], self.config.seed))
        against = {}
        for other in ("none", "infoscale"):
            change = mean_interval(losses[name] - losses[other], self.config.seed)
            percent = [percent_change(x) for x in change]
            against[other] = dict(zip(("percent", "low", "high"), percent, strict=True))
        told = {"name": name, "key": _key(recipe), "recipe": recipe.to_dict(), "tau": self.curve(recipe)}
        return told | {"perplexity": mean, "low": low, "high": high, "against": against}

    def curve(self, recipe: Recipe) -> dict[str, Any]:
        """τ against n, a row for all layers, for each, or for each of their heads."""
        law, n = recipe.temperature, list(self.knots)
        if law is None:
            return {"n": n, "rows": [[1.0] * len(n)]}
        if isinstance(law, Fitted):
            return {"n": n, "rows": np.array(law.table).reshape(-1, len(law.lengths))[:, : len(n)].tolist()}
        n = np.geomspace(n[0], n[-1], POINTS).tolist()
        tau = law.scale(torch.tensor(n, dtype=torch.float64), self.layers[0].head_dim)
        return {"n": n, "rows": [tau.tolist()]}

    def entropy(self, base: Recipe, chosen: Recipe) -> dict[str, Any]:
        """Entropies of heads on a held-out text: at the training length, and at full length before and after."""
        text = self.held[0]
        ids = torch.tensor(text.tokens[: self.config.length])[None]
        wanted = {"trained": (base, ids[:, : self.trained]), "before": (base, ids), "after": (chosen, ids)}
        found: dict[str, Any] = {"text": text.name}
        for when, (recipe, tokens) in wanted.items():
            with under_recipe(self.model, recipe):
                found[when] = told_entropies(self.model, tokens)
        return found

    def _kept(self, name: str) -> dict[str, Any]:
        """What an earlier run of the same has left, or a beginning."""
        asked = asdict(self.config)
        parts = (("fitting", self.fitting), ("held-out", self.held))
        head = {
            "model": identify_model(self.model, name),
            "config": {key: value for key, value in asked.items() if key not in ("budget", "levels")},
            "train_length": self.trained,
            "knots": self.knots,
            "texts": [{"name": t.name, "sha256": t.sha256, "part": part} for part, texts in parts for t in texts],
        }
        self.store = ResultsStore(self.out, CALIBRATION, head)
        head = self.store.head
        return self.store.earlier | head if self.store.earlier else head | {"cells": [], "fits": {}, "seconds": 0.0}

    def save(self) -> None:
        self.data |= {"seconds": self.spent, "budget": self.config.budget, "run": self.machine}
        self.store.write(self.data)


def _key(recipe: Recipe) -> str:
    return hashlib.sha256(str(recipe).encode()).hexdigest()[:16]
