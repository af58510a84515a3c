"""The paper's evaluation: masked tokens predicted from all others, at lengths past the training length.

PPL = exp(mean cross-entropy) over all predictions, ACC = share of exact hits.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from isentrope.data.prepared import Documents
from isentrope.evaluation.metrics import summarize_predictions

PROTOCOLS = ("single", "random")
MAX_TOKENS_PER_FORWARD = {"cpu": 1 << 13, "cuda": 1 << 19}


class UnmeasurableError(RuntimeError):
    """Nothing can be measured: no document is long enough, or the loss is not a number."""


@dataclass(frozen=True)
class MaskingProtocol:
    """What is masked.

    Args:
        name: `single`, one token at a time, or `random`, `share` of the tokens at once.
        positions: predictions a document; None for every position once (single), or for one draw (random).
        share: of the tokens that are masked at once.
        seed: of the positions drawn.
        batch: rows of one forward pass, at most.
    """

    name: str = "single"
    positions: int | None = 256
    share: float = 0.15
    seed: int = 0
    batch: int = 32

    def __post_init__(self) -> None:
        if self.name not in PROTOCOLS:
            raise ValueError(f"protocol: expected one of {', '.join(PROTOCOLS)}, got {self.name!r}")
        if self.positions is not None and self.positions < 1:
            raise ValueError(f"positions: expected 1 or more, or None for all, got {self.positions}")
        if not 0 < self.share < 1 or self.batch < 1:
            raise ValueError(f"share, batch: expected in (0, 1) and 1 or more, got {self.share} and {self.batch}")

    def draw_positions(self, length: int, document: str) -> NDArray[np.int64]:
        """Draw the positions masked in each row that a document is read in, (rows, masked at once)."""
        key = hashlib.sha256(f"{self.seed} {length} {document}".encode()).digest()
        random = np.random.default_rng(np.frombuffer(key, np.uint32))
        if self.name == "single":
            count = length if self.positions is None else min(self.positions, length)
            return np.sort(random.choice(length, count, replace=False))[:, None]
        at_once = max(1, round(self.share * length))
        rows = -(-(self.positions or 1) // at_once)
        return np.stack([np.sort(random.choice(length, at_once, replace=False)) for _ in range(rows)])


@dataclass(frozen=True)
class DocumentScore:
    """One document's predictions, the sum of their cross-entropies, and the exact hits."""

    sha256: str
    count: int
    loss: float
    hits: int


def score_documents(
    model: Any, documents: Documents, hashes: Sequence[str], length: int, mask_token: int, protocol: MaskingProtocol
) -> list[DocumentScore]:
    """Score every document of `length` tokens or more, cut to that length; shorter ones are left out.

    Args:
        model: GAU-α with its head for masked tokens.
        documents: in tokens.
        hashes: of each document, which seed its masked positions.
        length: tokens read of each.
        mask_token: id of the token put in place of a masked one.
        protocol: what is masked.
    """
    chosen = [i for i in range(len(hashes)) if documents.lengths[i] >= length]
    if not chosen:
        return []
    device = model.device
    drawn = [protocol.draw_positions(length, hashes[i]) for i in chosen]
    owners = torch.arange(len(chosen)).repeat_interleave(torch.tensor([len(rows) for rows in drawn]))
    masked = torch.from_numpy(np.concatenate(drawn))
    texts = torch.from_numpy(np.stack([documents[i][:length] for i in chosen]).astype(np.int64))
    # rows of several documents share a forward pass: one alone leaves a GPU idle
    rows = max(1, min(protocol.batch, MAX_TOKENS_PER_FORWARD.get(device.type, 1 << 13) // length))
    losses, hits = [], []
    with torch.inference_mode():
        for owner, at in zip(owners.split(rows), masked.split(rows), strict=True):
            loss, hit = _score_rows(model, texts[owner].to(device), at.to(device), mask_token)
            losses.append(loss)
            hits.append(hit)
    loss, hit = torch.cat(losses).cpu(), torch.cat(hits).cpu()
    totals = torch.zeros(len(chosen), dtype=torch.float64).index_add_(0, owners, loss)
    right = torch.zeros(len(chosen), dtype=torch.int64).index_add_(0, owners, hit)
    return [
        DocumentScore(hashes[i], positions.size, total, count)
        for i, positions, total, count in zip(chosen, drawn, totals.tolist(), right.tolist(), strict=True)
    ]


def _score_rows(model: Any, text: Tensor, at: Tensor, mask_token: int) -> tuple[Tensor, Tensor]:
    """Return the summed loss in fp64 and the hits of each row, masked at its positions `at` (rows, positions)."""
    labels = text.gather(1, at)
    logits = model(input_ids=text.scatter(1, at, mask_token), at=at).logits.float()
    losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view_as(labels)
    return losses.double().sum(1), (logits.argmax(-1) == labels).sum(1)


def summarize_scores(scores: Sequence[DocumentScore], seed: int = 0) -> dict[str, float]:
    """PPL and ACC over all predictions, with 95 % intervals by bootstrap over documents."""
    counts, losses, hits = zip(*((score.count, score.loss, score.hits) for score in scores), strict=True)
    return summarize_predictions(counts, losses, hits, seed)
