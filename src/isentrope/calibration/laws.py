"""The laws that are compared on one recipe: those in closed form, and one whose values are fitted.

A position method of one branch gets a temperature of all keys, ln τ at a few lengths. One with near and far keys gets
exponents: (n / n_tr)^γ multiplies far logits, -β ln(max(n_far / n_ref, 1)) is added to them, and (n / n_tr)^γ_near
multiplies near ones.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from math import inf, log
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from isentrope.core.layout import Layout
from isentrope.core.region import band
from isentrope.evaluation.metrics import Array
from isentrope.evaluation.recipe_texts import parse_recipe
from isentrope.hf.learned_laws import LearnedPower, LearnedShare, LearnedTemperature, learn_laws
from isentrope.parts import MAX_EXPONENT
from isentrope.recipe import Recipe
from isentrope.share import Share
from isentrope.temperatures import Fitted, InfoScale, LogN, Power
from isentrope.utils.messages import truncate

DIGITS = 4  # of a fitted value
CURVE_POINTS = 33  # of a law in closed form
LOG_TAU_STEP, BETA_STEP = 0.1, 0.5  # of ln τ at the last length, and of β


@dataclass(frozen=True)
class Laws(ABC):
    """The laws of one recipe.

    Attributes:
        base: the recipe without any.
        knots: lengths, from the training length to that of the texts.
        layers: of the model.
        head_dim: of the model.
    """

    base: Recipe
    knots: tuple[int, ...]
    layers: int
    head_dim: int
    has_near = False

    @property
    def train_length(self) -> int:
        return self.knots[0]

    def build_closed(self) -> dict[str, Recipe]:
        """Return the recipe under each law in closed form, the simplest first."""
        n = self.train_length
        known = {"none": None, "infoscale": InfoScale(n), "logn": LogN(n), "power": Power(n)}
        return {name: replace(self.base, temperature=law) for name, law in known.items()}

    @abstractmethod
    def choose_start(self, measure: Callable[[Recipe], float]) -> Array:
        """Return the values that a fit starts from and is drawn to, (1, 1, values).

        Args:
            measure: returns the loss under a recipe, on the texts to fit to.
        """

    @abstractmethod
    def get_steps(self, count: int) -> Array:
        """Return a step of each of so many values that changes attention noticeably."""

    @abstractmethod
    def build(self, values: Array) -> Recipe:
        """Return the recipe with values (layers or 1, heads or 1, values)."""

    @abstractmethod
    def learn(self, model: PreTrainedModel, values: Tensor) -> AbstractContextManager[None]:
        """Run a model under the law while the block lasts, such that gradients flow to the values."""

    def add_near(self, values: Array) -> Array:
        """Return the values with one for near keys, where near and far keys have laws of their own."""
        raise NotImplementedError

    def sample_curves(self, recipe: Recipe) -> dict[str, Any]:
        """Sample a law against n: one row for all layers, for each, or for each of their heads."""
        return {"tau": self._sample_tau(recipe, "far")}

    def _sample_tau(self, recipe: Recipe, keys: str) -> dict[str, Any]:
        law = next((law for law in recipe.temperatures if law.keys in ("all", keys)), None)
        if law is None:
            return {"n": list(self.knots), "rows": [[1.0] * len(self.knots)]}
        n = list(self.knots) if isinstance(law, Fitted) else self._curve_lengths
        counts = torch.tensor(n, dtype=torch.float64)[None, None]
        return {"n": n, "rows": self._sample_rows(law, lambda own: own.scale(counts, self.head_dim))}

    @property
    def _curve_lengths(self) -> list[float]:
        return list(np.geomspace(self.knots[0], self.knots[-1], CURVE_POINTS).tolist())

    def _sample_rows(self, law: Any, sample: Callable[[Any], Tensor]) -> list[list[float]]:
        rows: list[list[float]] = []
        for layer in range(self.layers):
            own = law.for_layer(layer)
            rows += sample(own)[0].tolist()
            if own is law:  # the same in all layers
                break
        return rows


@dataclass(frozen=True)
class TemperatureLaws(Laws):
    """A temperature of all keys: ln τ at all knots but the first, straight in ln n between them."""

    def choose_start(self, measure: Callable[[Recipe], float]) -> Array:
        """Take the closed law that is best on the texts to fit to."""
        law = min(self.build_closed().values(), key=measure).temperature
        if law is None:
            return np.zeros((1, 1, len(self.knots) - 1))
        tau: Array = law.scale(torch.tensor(self.knots[1:], dtype=torch.float64), self.head_dim).log().numpy()
        return tau[None, None]

    def get_steps(self, count: int) -> Array:
        return np.full(count, LOG_TAU_STEP)

    def build(self, values: Array) -> Recipe:
        tau = np.round(np.exp(values), DIGITS)
        table = np.concatenate((np.ones_like(tau[..., :1]), tau, tau[..., -1:]), -1)
        table = table[0, 0] if table.shape[:2] == (1, 1) else table
        # constant past the last length: a slope that continued would reach any τ, below 0 too
        law = Fitted((*self.knots, 2 * self.knots[-1]), table.tolist())
        return replace(self.base, temperature=law)

    def learn(self, model: PreTrainedModel, values: Tensor) -> AbstractContextManager[None]:
        initial = replace(self.base, temperature=Fitted(self.knots, (1.0,) * len(self.knots)))

        def set_laws(recipe: Recipe, layer: int) -> Recipe:
            return replace(recipe, temperature=LearnedTemperature(self.knots, values, layer))

        return learn_laws(model, initial, set_laws)


@dataclass(frozen=True)
class NearFarLaws(Laws):
    """A law for near and far keys: β, γ and, where near keys are fitted too, γ_near.

    Attributes:
        initial: the recipe with the law that a fit starts from.
    """

    initial: Recipe
    has_near = True

    def build_closed(self) -> dict[str, Recipe]:
        closed = _add_closed_law(self.base, self.train_length)
        given = {} if self.initial == closed else {"given": self.initial}
        return super().build_closed() | {"closed": closed} | given

    def choose_start(self, measure: Callable[[Recipe], float]) -> Array:
        """Take the law in the recipe that was given, or the closed one; a table's mean."""
        share = self.initial.share
        return np.array([[[0.0 if share is None else float(np.mean(share.beta)), self._get_exponent("far")]]])

    def _get_exponent(self, keys: str) -> float:
        """Return γ of the initial law at the last length."""
        n = self.knots[-1]
        rows = self._sample_tau(self.initial, keys)["rows"]
        return float(np.mean(np.log([row[-1] for row in rows]))) / log(n / self.train_length)

    def add_near(self, values: Array) -> Array:
        near = np.full((*values.shape[:2], 1), self._get_exponent("near"))
        return np.concatenate((values, near), -1)

    def get_steps(self, count: int) -> Array:
        gamma = LOG_TAU_STEP / log(self.knots[-1] / self.train_length)
        return np.array([BETA_STEP, gamma, gamma])[:count]

    def build(self, values: Array) -> Recipe:
        beta, *gammas = (_as_table(values[..., i]) for i in range(values.shape[-1]))
        far, *near = (
            Power(self.train_length, gamma, keys=keys) for gamma, keys in zip(gammas, ("far", "near"), strict=False)
        )
        laws = (*(near or _select_near(self.initial)), far)
        return replace(self.base, temperature=laws, share=replace(self._share, beta=beta))

    @property
    def _share(self) -> Share:
        window = self.base.position.near_window
        share: Share = self.initial.share or Share(0.0).resolve(self.train_length, window)
        return share

    def learn(self, model: PreTrainedModel, values: Tensor) -> AbstractContextManager[None]:
        n, share = self.train_length, self._share
        reference = share.reference
        assert reference is not None  # resolved with the training length

        def set_laws(recipe: Recipe, layer: int) -> Recipe:
            if recipe.share is None:  # a layer with a window of its own has no far keys
                return recipe
            far = LearnedPower(n, values[..., 1], layer, "far")
            fitted_near = values.shape[-1] > 2
            near = (LearnedPower(n, values[..., 2], layer, "near"),) if fitted_near else _select_near(recipe)
            own = LearnedShare(reference, values[..., 0], layer, share.count, share.sinks)
            return replace(recipe, temperature=(*near, far), share=own)

        return learn_laws(model, self.build(values.detach().double().cpu().numpy()), set_laws)

    def sample_curves(self, recipe: Recipe) -> dict[str, Any]:
        """Sample τ of far and near keys, and the bias of far ones."""
        curves = super().sample_curves(recipe) | {"tau_near": self._sample_tau(recipe, "near")}
        n = self._curve_lengths
        if recipe.share is None:
            return curves | {"bias": {"n": n, "rows": [[0.0] * len(n)]}}
        near = recipe.position.near_window + recipe.share.sinks if recipe.share.count == "far" else 0
        counts = torch.tensor(n, dtype=torch.float64).sub(near).clamp_min(1)[None, None]
        return curves | {"bias": {"n": n, "rows": self._sample_rows(recipe.share, lambda own: own.bias(counts))}}


def _select_near(recipe: Recipe) -> tuple[Any, ...]:
    """Return what a recipe's temperatures do to near keys."""
    return tuple(
        law if law.keys == "near" else replace(law, keys="near") for law in recipe.temperatures if law.keys != "far"
    )


def _as_table(values: Array) -> Any:
    """Round values (layers or 1, heads or 1) to what a part takes: a number, or a table (layers, heads)."""
    rounded = np.clip(np.round(values, DIGITS), -MAX_EXPONENT, MAX_EXPONENT)
    return float(rounded[0, 0]) if rounded.shape == (1, 1) else rounded.tolist()


def hash_recipe(recipe: Recipe) -> str:
    """Return what a recipe is called in cells of results."""
    return hashlib.sha256(str(recipe).encode()).hexdigest()[:16]


def make_laws(text: str, knots: tuple[int, ...], layers: int, head_dim: int) -> Laws:
    """Choose the laws of a recipe by its position method.

    Args:
        text: the recipe, with the law to start from where it names one.
        knots: lengths, from the training length to that of the texts.
        layers: of the model.
        head_dim: of the model.
    """
    recipe = parse_recipe(text, train_length=knots[0])
    _check_laws_act(text, recipe, knots[0], knots[-1])
    if recipe.position is not None:
        recipe = replace(recipe, position=recipe.position.resolve(knots[0]))
    base = replace(recipe, temperature=None, share=None)
    window = None if base.position is None else base.position.near_window
    if window is None:
        return TemperatureLaws(base, knots, layers, head_dim)
    initial = _add_closed_law(base, knots[0]) if recipe == base else recipe.fill_train_length(knots[0])
    return NearFarLaws(base, knots, layers, head_dim, initial)


def count_most_visible(recipe: Recipe, length: int) -> int:
    """Count the keys that a query of a text sees at most under a recipe."""
    if recipe.retrieve is not None:
        return min(length, recipe.retrieve.count_most_far() + recipe.position.near_window)
    layout = Layout(1, 1, length, torch.device("cpu"))  # the last query
    region = band(-inf, 1) if recipe.mask is None else recipe.mask.region(True)
    return int(layout.count_keys("visible", layout.simplify(region & band(-inf, 1))))


def _check_laws_act(text: str, recipe: Recipe, train_length: int, length: int) -> None:
    """Refuse a recipe under which no law has an effect, since no query sees more keys than in training."""
    most = count_most_visible(recipe, length)
    if most <= train_length:
        raise ValueError(
            f"recipe: under {truncate(text)} a query sees at most {most} keys, no more than in training "
            f"({train_length}), so that no law has an effect; extend the model with it as it is, or fit a recipe that "
            f"sees all of the text, such as rerope:window={train_length // 2}"
        )


def _add_closed_law(base: Recipe, train_length: int) -> Recipe:
    return replace(base, share=Share().resolve(train_length, base.position.near_window))
