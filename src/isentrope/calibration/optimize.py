"""Temperatures by gradients: the law over n that makes text beyond the training length likeliest, the model frozen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
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

EVALUATIONS = 24  # at most, of one law
CLOSE = 2e-5  # nats: a step that gains less is the last
STILL = 1e-3  # of ln τ: a step that is shorter too, for in half precision losses are no smoother than that
SPREAD = 0.1  # of ln τ around the law that a fit begins from, as expected before any text is read
FIRST = 0.1  # how far ln τ goes at the first step
KEPT = 1 << 26  # tokens × width × layers that a backward may have kept for it


class EndError(Exception):
    """A fit is to end, and why."""


def knots(train_length: int, length: int) -> tuple[int, ...]:
    """Lengths from one to the other in equal ratios, as near to 2 as they come."""
    steps = max(1, round(float(np.log2(length / train_length))))
    found = (train_length * (length / train_length) ** (step / steps) for step in range(steps + 1))
    return tuple(round(n) for n in found)


def balanced(losses: Tensor, edges: Sequence[int]) -> Tensor:
    """The mean over buckets of positions of their mean losses, so that a law must hold at every length."""
    return torch.stack([losses[a - 1 : b - 1].mean() for a, b in pairwise(edges)]).mean()


def loss_and_gradient(
    model: PreTrainedModel, texts: Sequence[Tensor], edges: Sequence[int], logs: Tensor
) -> tuple[float, Array]:
    """Mean over texts of the loss beyond the training length, of a model that is `tempered` by `logs`."""
    total, gradient = 0.0, torch.zeros_like(logs, dtype=torch.float64)
    config = model.config.get_text_config()
    heavy = edges[-1] * config.hidden_size * config.num_hidden_layers > KEPT
    with checkpoint_layers(model) if heavy else nullcontext():
        for tokens in texts:
            loss = balanced(differentiable_losses(model, tokens), edges) / len(texts)
            gradient += torch.autograd.grad(loss, logs)[0]
            total += loss.item()
    return total, gradient.cpu().numpy()


def descend(
    model: PreTrainedModel,
    recipe: Recipe,
    texts: Sequence[Tensor],
    edges: tuple[int, ...],
    start: Array,
    history: list[dict[str, Any]],
    noted: Callable[[], None],
) -> str:
    """Fit ln τ at all edges but the first, (layers or 1, heads or 1, edges - 1), by L-BFGS; return why it ended.

    history: each evaluation with its point, loss and gradient is added to it. What is there already is taken as
    evaluated, so that an interrupted fit goes on. noted: called after each new one; ends the fit by `EndError`.
    """
    weight = 1 / (SPREAD**2 * len(texts) * (edges[-1] - edges[0]))  # of what is expected, against that many tokens
    known = {tuple(row["at"]): row for row in history}
    # a first step of L-BFGS has length 1: about FIRST for each row of the table
    unit = FIRST * np.sqrt(start.shape[0] * start.shape[1])
    dtype = torch.float64 if model.dtype == torch.float64 else torch.float32
    logs = torch.zeros(start.shape, dtype=dtype, device=model.device, requires_grad=True)

    def evaluate(at: Array) -> tuple[float, Array]:
        row = known.get(tuple(at.tolist()))
        if row is None:
            point = start + unit * at.reshape(start.shape)
            _check_worth(point, history)
            with torch.no_grad():
                logs.copy_(torch.as_tensor(point))
            loss, gradient = loss_and_gradient(model, texts, edges, logs)
            if not np.isfinite(loss) or not np.isfinite(gradient).all():
                raise EndError("no finite loss")
            away = point - start
            objective = loss + weight * float((away**2).sum()) / 2
            slope = unit * (gradient + weight * away).ravel()
            row = {"at": at.tolist(), "logs": point.tolist(), "loss": loss, "objective": objective}
            row["gradient"] = slope.tolist()
            history.append(row)
            noted()
        return row["objective"], np.array(row["gradient"])

    options = {"maxfun": EVALUATIONS, "maxiter": EVALUATIONS, "ftol": CLOSE, "gtol": CLOSE / 4}
    try:
        with learn_temperatures(model, recipe, edges, logs):
            found = minimize(evaluate, np.zeros(start.size), jac=True, method="L-BFGS-B", options=options)
    except EndError as end:
        return str(end)
    except torch.OutOfMemoryError:
        return "out of memory"
    return "converged" if found.success else "evaluations"


def _check_worth(point: Array, history: list[dict[str, Any]]) -> None:
    """End a fit that has been long enough, or whose next point is where the best is."""
    if len(history) >= EVALUATIONS:
        raise EndError("evaluations")
    if history:
        best = min(history, key=lambda row: row["objective"])
        if np.abs(point - np.array(best["logs"])).max() < STILL:
            raise EndError("converged")
