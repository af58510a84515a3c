"""Fit a temperature of GAU-α: the τ at one length with the lowest loss on validation documents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from scipy.optimize import minimize_scalar

from isentrope.data.prepared import Documents
from isentrope.evaluation.masked_lm import MaskingProtocol, UnmeasurableError, score_documents
from isentrope.temperatures import Fitted

TAU_BOUNDS, TAU_TOLERANCE = (0.5, 4.0), 0.01
MAX_DOCUMENTS = 8


def fit_masked_temperature(
    model: Any, documents: Documents, hashes: Sequence[str], length: int, train_length: int, mask_token: int
) -> Fitted | None:
    """Give all layers the τ that makes 15 % masked tokens likeliest at this length; None inside the training length.

    One number for all layers and heads: 1 at the training length, and straight in ln n to what is fitted here.
    """
    if length <= train_length:
        return None
    long = [i for i in range(len(documents)) if documents.lengths[i] >= length][:MAX_DOCUMENTS]
    if not long:
        raise UnmeasurableError(f"no validation document has {length} tokens")
    starts, lengths = documents.starts[long], documents.lengths[long]
    chosen = Documents([documents.names[i] for i in long], lengths, starts, documents.ids)
    names = [hashes[i] for i in long]

    protocol = MaskingProtocol("random", positions=None, seed=1)

    def loss(tau: float) -> float:
        set_temperature(model, Fitted((train_length, length), (1.0, float(tau)), count="sequence"))
        scores = score_documents(model, chosen, names, length, mask_token, protocol)
        return sum(score.loss for score in scores) / sum(score.count for score in scores)

    best = minimize_scalar(loss, bounds=TAU_BOUNDS, method="bounded", options={"xatol": TAU_TOLERANCE}).x
    # never worse than no temperature: the search is for one minimum, and there may be two
    tau = round(float(best), 4) if loss(best) < loss(1.0) else 1.0
    fitted = Fitted((train_length, length), (1.0, tau), count="sequence")
    set_temperature(model, fitted)
    return fitted


def set_temperature(model: Any, temperature: Any) -> None:
    """Give all layers of GAU-α a temperature."""
    for layer in model.gau_alpha.encoder.layer:
        layer.gau.recipe = replace(layer.gau.recipe, temperature=temperature)
