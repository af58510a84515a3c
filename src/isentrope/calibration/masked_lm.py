"""Fit a law of GAU-α to validation documents: the temperature, or temperature and share law, of the lowest loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from itertools import product
from math import log
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import minimize, minimize_scalar
from torch import Tensor
from torch.nn import functional as F

from isentrope.data.prepared import Documents
from isentrope.evaluation.masked_lm import MAX_TOKENS_PER_FORWARD, MaskingProtocol, UnmeasurableError
from isentrope.parts import Part
from isentrope.share import DEFAULT_BETA, Share
from isentrope.temperatures import Fitted, Power

MAX_DOCUMENTS = 8
PROTOCOL = MaskingProtocol("random", positions=512, seed=1)  # also short documents have hundreds of predictions
TAU_BOUNDS, TAU_TOLERANCE = (0.5, 4.0), 0.01
# of far keys: β and ln τ, where a search begins at the best of a grid
BETA_BOUNDS, LOG_TAU_BOUNDS = (0.0, 3.0), (-0.7, 0.7)
BETA_GRID, LOG_TAU_GRID = (0.0, DEFAULT_BETA, 1.5, 3.0), (-0.35, 0.0, 0.35)
FIRST_STEPS = ((0.0, 0.0), (-0.3, 0.0), (0.0, 0.2))
MAX_EVALUATIONS = 30

Law = tuple[Part, ...]
Array = NDArray[np.float64]


def fit_masked_law(
    model: Any, documents: Documents, hashes: Sequence[str], length: int, train_length: int, mask_token: int
) -> Law:
    """Give all layers the law that makes 15 % masked tokens likeliest at this length.

    A position method with near and far keys gets a temperature of its far keys and a share law, fitted together; any
    other gets one temperature. One law serves all layers and heads, and it has no effect at the training length.

    Args:
        model: GAU-α under a recipe without a temperature and a share law; the law stays in place.
        documents: To fit to; the first eight that are long enough.
        hashes: Of each document.
        length: Tokens of each document.
        train_length: The length from which on the law acts.
        mask_token: Id of the token put in place of a masked one.

    Returns:
        What to add to the recipe, its temperature first; nothing inside the training length.

    Raises:
        UnmeasurableError: No document has that many tokens.
    """
    if length <= train_length:
        return ()
    compute_loss = _build_loss(model, documents, hashes, length, mask_token)
    window = model.gau_alpha.encoder.layer[0].gau.recipe.position.near_window
    if window is None:
        law = _fit_temperature(compute_loss, length, train_length)
    else:
        law = _fit_far_keys(compute_loss, length, train_length, window)
    set_law(model, law)
    return law


def _fit_temperature(compute_loss: Callable[[Law], float], length: int, train_length: int) -> Law:
    """Fit a temperature of all keys: 1 at the training length, and straight in ln n to what is fitted here."""

    def build(tau: float) -> Law:
        return (Fitted((train_length, length), (1.0, round(float(tau), 4)), count="sequence"),)

    best = minimize_scalar(
        lambda tau: compute_loss(build(tau)), bounds=TAU_BOUNDS, method="bounded", options={"xatol": TAU_TOLERANCE}
    ).x
    # never worse than no temperature: the search is for one minimum, and there may be two
    return min(build(1.0), build(best), key=compute_loss)


def _fit_far_keys(compute_loss: Callable[[Law], float], length: int, train_length: int, window: int) -> Law:
    """Fit β and γ of far keys, whose logits become (n / n_tr)^γ s - β ln(max(n_far / n_ref, 1))."""

    def build(beta: float, log_tau: float) -> Law:
        gamma = round(float(log_tau) / log(length / train_length), 4)
        share = Share(round(float(beta), 4)).resolve(train_length, window)
        return Power(train_length, gamma, count="sequence", keys="far"), share

    # nothing and the closed law are of the grid, so that the result is never worse; the simpler one wins a tie
    grid = sorted(product(BETA_GRID, LOG_TAU_GRID), key=lambda numbers: (numbers[0], abs(numbers[1])))
    start = min(grid, key=lambda numbers: compute_loss(build(*numbers)))
    bounds = np.array((BETA_BOUNDS, LOG_TAU_BOUNDS))
    best = minimize(
        lambda numbers: compute_loss(build(*numbers)),
        start,
        method="Nelder-Mead",
        bounds=bounds,
        options={
            "xatol": 0.01, "fatol": 1e-4, "maxfev": MAX_EVALUATIONS,
            "initial_simplex": _reflect(np.array(start) + np.array(FIRST_STEPS), *bounds.T),
        },
    ).x  # fmt: skip
    return min(build(*start), build(*best), key=compute_loss)


def _reflect(points: Array, low: Array, high: Array) -> Array:
    """Move points that are beyond a bound to the other side of it."""
    points = np.where(points < low, 2 * low - points, points)
    return np.where(points > high, 2 * high - points, points)


def _build_loss(
    model: Any, documents: Documents, hashes: Sequence[str], length: int, mask_token: int
) -> Callable[[Law], float]:
    """Return a function of a law: the mean loss of masked tokens, the same ones each time, of all documents at once."""
    long = [i for i in range(len(documents)) if documents.lengths[i] >= length][:MAX_DOCUMENTS]
    if not long:
        raise UnmeasurableError(f"no validation document has {length} tokens")
    texts = torch.stack([torch.from_numpy(documents[i][:length].astype("int64")) for i in long])
    hidden = [torch.from_numpy(PROTOCOL.draw_positions(length, hashes[i])) for i in long]
    text = texts.repeat_interleave(len(hidden[0]), 0).to(model.device)
    at = torch.cat(hidden).to(model.device)
    ids = text.scatter(1, at, mask_token)
    rows = max(1, MAX_TOKENS_PER_FORWARD.get(model.device.type, 1 << 13) // length)

    @cache
    def compute_loss(law: Law) -> float:
        set_law(model, law)
        total = torch.zeros((), dtype=torch.float64, device=model.device)
        with torch.inference_mode():
            for part, where, full in zip(ids.split(rows), at.split(rows), text.split(rows), strict=True):
                logits: Tensor = model(input_ids=part, at=where).logits
                labels = full.gather(1, where).flatten()
                total += F.cross_entropy(logits.flatten(0, 1).float(), labels, reduction="sum")
        return total.item() / at.numel()

    return compute_loss


def set_law(model: Any, law: Law) -> None:
    """Give all layers of GAU-α a temperature, a share law, or both; what the law leaves out is removed."""
    share = next((part for part in law if isinstance(part, Share)), None)
    temperature = tuple(part for part in law if part is not share)
    for layer in model.gau_alpha.encoder.layer:
        layer.gau.recipe = replace(layer.gau.recipe, temperature=temperature, share=share)
