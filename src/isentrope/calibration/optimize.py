"""Fit temperatures by gradients: the law over n that makes text beyond the training length likeliest, model frozen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from scipy.optimize import minimize
from torch import Tensor
from transformers import PreTrainedModel

from isentrope.evaluation.metrics import Array
from isentrope.evaluation.perplexity import differentiable_losses
from isentrope.hf.learned_temperature import checkpoint_layers, learn_temperatures
from isentrope.recipe import Recipe

MAX_EVALUATIONS = 24  # of one law
MIN_GAIN_NATS = 2e-5  # a step that gains less is the last
MIN_STEP = 1e-3  # of ln τ: a shorter step is the last too, since losses in half precision are no smoother
PRIOR_SPREAD = 0.1  # of ln τ around the law that a fit starts from
FIRST_STEP = 0.1  # of ln τ
MAX_ACTIVATIONS = 1 << 26  # tokens × width × layers kept for a backward; above, layers are checkpointed


class StopFit(Exception):  # noqa: N818  # ends a fit, like StopIteration
    """Ends a fit; the message says why."""


@dataclass(frozen=True)
class FitProblem:
    """What is fitted.

    Args:
        model: frozen.
        recipe: what gets the temperature.
        texts: in tokens, each of edges[-1] or more.
        edges: lengths where ln τ is fitted, after the first, where it is 0.
        start: ln τ to start from, (layers or 1, heads or 1, edges - 1).
    """

    model: PreTrainedModel
    recipe: Recipe
    texts: Sequence[Tensor]
    edges: tuple[int, ...]
    start: Array


def choose_knots(train_length: int, length: int) -> tuple[int, ...]:
    """Choose lengths from one to the other in equal ratios, as near to 2 as possible."""
    steps = max(1, round(float(np.log2(length / train_length))))
    return tuple(round(train_length * (length / train_length) ** (step / steps)) for step in range(steps + 1))


def mean_bucket_loss(losses: Tensor, edges: Sequence[int]) -> Tensor:
    """Average the mean losses of buckets of positions, so that a law must hold at every length."""
    return torch.stack([losses[a - 1 : b - 1].mean() for a, b in pairwise(edges)]).mean()


def loss_and_gradient(
    model: PreTrainedModel, texts: Sequence[Tensor], edges: Sequence[int], logs: Tensor
) -> tuple[float, Array]:
    """Compute the mean over texts of the loss beyond the training length, and its gradient in ln τ, `logs`."""
    total, gradient = 0.0, torch.zeros_like(logs, dtype=torch.float64)
    config = model.config.get_text_config()
    heavy = edges[-1] * config.hidden_size * config.num_hidden_layers > MAX_ACTIVATIONS
    with checkpoint_layers(model) if heavy else nullcontext():
        for tokens in texts:
            loss = mean_bucket_loss(differentiable_losses(model, tokens), edges) / len(texts)
            gradient += torch.autograd.grad(loss, logs)[0]
            total += loss.item()
    return total, gradient.cpu().numpy()


def fit_law(problem: FitProblem, history: list[dict[str, Any]], on_evaluation: Callable[[], None]) -> str:
    """Fit ln τ at all edges but the first by L-BFGS.

    Args:
        problem: what is fitted.
        history: each evaluation with its point, loss and gradient is appended. What is there already is taken as
            evaluated, so that an interrupted fit resumes.
        on_evaluation: called after each new one; ends the fit by `StopFit`.

    Returns:
        Why the fit ended.
    """
    model, texts, edges, start = problem.model, problem.texts, problem.edges, problem.start
    weight = 1 / (PRIOR_SPREAD**2 * len(texts) * (edges[-1] - edges[0]))  # of the prior, against that many tokens
    known = {tuple(row["at"]): row for row in history}
    # a first step of L-BFGS has length 1: about FIRST_STEP for each row of the table
    unit = FIRST_STEP * np.sqrt(start.shape[0] * start.shape[1])
    dtype = torch.float64 if model.dtype == torch.float64 else torch.float32
    logs = torch.zeros(start.shape, dtype=dtype, device=model.device, requires_grad=True)

    def evaluate(at: Array) -> tuple[float, Array]:
        row = known.get(tuple(at.tolist()))
        if row is None:
            point = start + unit * at.reshape(start.shape)
            _check_continue(point, history)
            with torch.no_grad():
                logs.copy_(torch.as_tensor(point))
            loss, gradient = loss_and_gradient(model, texts, edges, logs)
            if not np.isfinite(loss) or not np.isfinite(gradient).all():
                raise StopFit("no finite loss")
            away = point - start
            objective = loss + weight * float((away**2).sum()) / 2
            slope = unit * (gradient + weight * away).ravel()
            row = {"at": at.tolist(), "logs": point.tolist(), "loss": loss, "objective": objective}
            row["gradient"] = slope.tolist()
            history.append(row)
            on_evaluation()
        return row["objective"], np.array(row["gradient"])

    options = {"maxfun": MAX_EVALUATIONS, "maxiter": MAX_EVALUATIONS, "ftol": MIN_GAIN_NATS, "gtol": MIN_GAIN_NATS / 4}
    try:
        with learn_temperatures(model, problem.recipe, edges, logs):
            solution = minimize(evaluate, np.zeros(start.size), jac=True, method="L-BFGS-B", options=options)
    except StopFit as end:
        return str(end)
    except torch.OutOfMemoryError:
        return "out of memory"
    return "converged" if solution.success else "evaluations"


def _check_continue(point: Array, history: list[dict[str, Any]]) -> None:
    """Stop a fit after MAX_EVALUATIONS, or whose next point is where the best is."""
    if len(history) >= MAX_EVALUATIONS:
        raise StopFit("evaluations")
    if history:
        best = min(history, key=lambda row: row["objective"])
        if np.abs(point - np.array(best["logs"])).max() < MIN_STEP:
            raise StopFit("converged")
