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
    return [
        _score(model, documents[i], sha256, length, mask_token, protocol)
        for i, sha256 in enumerate(hashes)
        if documents.lengths[i] >= length
    ]


def _score(
    model: Any, tokens: NDArray[np.int32], sha256: str, length: int, mask_token: int, protocol: MaskingProtocol
) -> DocumentScore:
    device = model.device
    text = torch.from_numpy(tokens[:length].astype(np.int64)).to(device)
    hidden = torch.from_numpy(protocol.draw_positions(length, sha256)).to(device)
    loss = torch.zeros((), dtype=torch.float64, device=device)
    hits = torch.zeros((), dtype=torch.int64, device=device)
    rows = max(1, min(protocol.batch, MAX_TOKENS_PER_FORWARD.get(device.type, 1 << 13) // length))
    with torch.inference_mode():
        for at in hidden.split(rows):
            ids = text.repeat(len(at), 1).scatter_(1, at, mask_token)
            logits = model(input_ids=ids, at=at).logits.flatten(0, 1).float()
            labels = text[at].flatten()
            loss += F.cross_entropy(logits, labels, reduction="sum")
            hits += (logits.argmax(-1) == labels).sum()
    return DocumentScore(sha256, hidden.numel(), loss.item(), int(hits))


def summarize_scores(scores: Sequence[DocumentScore], seed: int = 0) -> dict[str, float]:
    """PPL and ACC over all predictions, with 95 % intervals by bootstrap over documents."""
    counts, losses, hits = zip(*((score.count, score.loss, score.hits) for score in scores), strict=True)
    return summarize_predictions(counts, losses, hits, seed)
