"""Fit a law by gradients: the values that make text beyond the training length likeliest, with the model frozen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.optimize import minimize
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from isentrope.calibration.laws import Laws
from isentrope.calibration.passkeys import RETRIEVAL_WEIGHT
from isentrope.evaluation.answers import compute_answer_logits
from isentrope.evaluation.metrics import Array
from isentrope.evaluation.perplexity import differentiable_losses
from isentrope.evaluation.prompts import Prompt
from isentrope.hf.learned_laws import checkpoint_layers

MAX_EVALUATIONS = 24  # of one law
MIN_GAIN_NATS = 2e-5  # a step that gains less is the last
MIN_STEP = 1e-2  # in steps of a law: a shorter one is the last too, since losses in half precision are no smoother
PRIOR_SPREAD = 1.0  # around the values that a fit starts from, in steps of a law
MAX_ACTIVATIONS = 1 << 26  # tokens × width × layers kept for a backward; above, layers are checkpointed


class StopFit(Exception):  # noqa: N818  # ends a fit, like StopIteration
    """Ends a fit; the message says why."""


@dataclass(frozen=True)
class FitProblem:
    """What is fitted.

    Args:
        model: frozen.
        laws: what the values are of.
        texts: in tokens, each of `laws.knots[-1]` or more.
        start: values to start from, (layers or 1, heads or 1, values).
        prompts: whose answers are fitted to as well.
    """

    model: PreTrainedModel
    laws: Laws
    texts: Sequence[Tensor]
    start: Array
    prompts: Sequence[Prompt] = ()


class Evaluation(NamedTuple):
    """The mean loss of texts beyond the training length, of answers (0 without any), and the objective's gradient."""

    loss: float
    retrieval: float
    gradient: Array


def choose_knots(train_length: int, length: int) -> tuple[int, ...]:
    """Choose lengths from one to the other in equal ratios, as near to 2 as possible."""
    steps = max(1, round(float(np.log2(length / train_length))))
    return tuple(round(train_length * (length / train_length) ** (step / steps)) for step in range(steps + 1))


def mean_bucket_loss(losses: Tensor, edges: Sequence[int]) -> Tensor:
    """Average the mean losses of buckets of positions, so that a law must hold at every length."""
    return torch.stack([losses[a - 1 : b - 1].mean() for a, b in pairwise(edges)]).mean()


def mean_answer_loss(model: PreTrainedModel, prompt: Prompt) -> Tensor:
    """Average -ln p over the tokens of an answer."""
    return F.cross_entropy(*compute_answer_logits(model, prompt))


def loss_and_gradient(problem: FitProblem, values: Tensor) -> Evaluation:
    """Compute the mean losses, and the gradient of their weighted sum in `values`, with which the model runs.

    Raises:
        StopFit: the values have no effect, since a window covers the texts or a mask hides what is beyond it.
    """
    model, edges = problem.model, problem.laws.knots
    totals, gradient = [0.0, 0.0], torch.zeros_like(values, dtype=torch.float64)
    config = model.config.get_text_config()
    heavy = edges[-1] * config.hidden_size * config.num_hidden_layers > MAX_ACTIVATIONS

    def add(term: int, weight: float, loss: Tensor) -> None:
        nonlocal gradient
        if not loss.requires_grad:
            raise StopFit("no key is far")
        gradient += weight * torch.autograd.grad(loss, values)[0]
        totals[term] += loss.item()

    with checkpoint_layers(model) if heavy else nullcontext():
        for tokens in problem.texts:
            add(0, 1.0, mean_bucket_loss(differentiable_losses(model, tokens), edges) / len(problem.texts))
        for prompt in problem.prompts:
            add(1, RETRIEVAL_WEIGHT, mean_answer_loss(model, prompt) / len(problem.prompts))
    return Evaluation(totals[0], totals[1], gradient.cpu().numpy())


def fit_law(problem: FitProblem, history: list[dict[str, Any]], on_evaluation: Callable[[], None]) -> str:
    """Fit the values of a law by L-BFGS, drawn to those it starts from.

    Args:
        problem: what is fitted.
        history: each evaluation with its point, losses and gradient is appended. What is there already is taken as
            evaluated, so that an interrupted fit resumes.
        on_evaluation: called after each new one; ends the fit by `StopFit`.

    Returns:
        Why the fit ended.
    """
    model, start, knots = problem.model, problem.start, problem.laws.knots
    step = problem.laws.get_steps(start.shape[-1])
    weight = 1 / (PRIOR_SPREAD**2 * len(problem.texts) * (knots[-1] - knots[0]))  # of the prior, against the tokens
    known = {tuple(row["at"]): row for row in history}
    # a first step of L-BFGS has length 1: about a step of the law for each row of the table
    unit = step * np.sqrt(start.shape[0] * start.shape[1])
    dtype = torch.float64 if model.dtype == torch.float64 else torch.float32
    values = torch.zeros(start.shape, dtype=dtype, device=model.device, requires_grad=True)

    def evaluate(at: Array) -> tuple[float, Array]:
        row = known.get(tuple(at.tolist()))
        if row is None:
            point = start + unit * at.reshape(start.shape)
            _check_continue(point / step, [(r["objective"], np.array(r["values"]) / step) for r in history])
            with torch.no_grad():
                values.copy_(torch.as_tensor(point))
            loss, retrieval, gradient = loss_and_gradient(problem, values)
            if not np.isfinite(loss + retrieval) or not np.isfinite(gradient).all():
                raise StopFit("no finite loss")
            away = (point - start) / step
            objective = loss + RETRIEVAL_WEIGHT * retrieval + weight * float((away**2).sum()) / 2
            slope = unit * (gradient + weight * away / step)
            row = {"at": at.tolist(), "values": point.tolist(), "loss": loss, "retrieval": retrieval}
            row |= {"objective": objective, "gradient": slope.ravel().tolist()}
            history.append(row)
            on_evaluation()
        return row["objective"], np.array(row["gradient"])

    options = {"maxfun": MAX_EVALUATIONS, "maxiter": MAX_EVALUATIONS, "ftol": MIN_GAIN_NATS, "gtol": MIN_GAIN_NATS / 4}
    try:
        with problem.laws.learn(model, values):
            solution = minimize(evaluate, np.zeros(start.size), jac=True, method="L-BFGS-B", options=options)
    except StopFit as end:
        return str(end)
    except torch.OutOfMemoryError:
        return "out of memory"
    return "converged" if solution.success else "evaluations"


def _check_continue(point: Array, history: list[tuple[float, Array]]) -> None:
    """Stop a fit after MAX_EVALUATIONS, or whose next point is where the best is."""
    if len(history) >= MAX_EVALUATIONS:
        raise StopFit("evaluations")
    if history:
        _, best = min(history, key=lambda row: row[0])
        if np.abs(point - best).max() < MIN_STEP:
            raise StopFit("converged")
