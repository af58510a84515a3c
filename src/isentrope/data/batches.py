"""Batches for training, each a function of the seed and the step alone."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from isentrope.data.prepared import Documents
from isentrope.positions import PoSE

CROPS = ("random", "first")
MASKED, SWAPPED = 0.8, 0.1  # of the chosen tokens; the rest are left as they are


@dataclass(frozen=True)
class Crops(ABC):
    """`crops[step]`: a batch made of crops of documents, drawn anew for each example of each epoch.

    An epoch takes every document once, in an order of its own; a crop begins anywhere in its document, or with "first"
    at its beginning. Nothing is remembered between steps, so that a run may be cut into processes, stopped and resumed
    at will.
    """

    documents: Documents
    length: int
    size: int
    seed: int
    crop: str = "random"
    beyond: ClassVar[int] = 0  # tokens of a crop after the `length` that a model reads

    def __post_init__(self) -> None:
        if self.crop not in CROPS:
            raise ValueError(f"crop: expected one of {', '.join(CROPS)}, got {self.crop!r}")
        if min(self.length, self.size) < 1:
            raise ValueError(f"length and size: expected 1 or more, got {self.length} and {self.size}")
        if not 0 <= self.seed < 1 << 64:
            raise ValueError(f"seed: expected a number in 0 … 2⁶⁴ - 1, got {self.seed}")
        if not len(self.documents):
            raise ValueError("documents: expected some, got none")
        if (shortest := int(self.documents.lengths.min())) < self.length + self.beyond:
            tokens = f"{shortest} tokens" + (f" less {self.beyond}" if self.beyond else "")
            raise ValueError(f"length: expected at most the shortest document's {tokens}, got {self.length}")

    @abstractmethod
    def __getitem__(self, step: int) -> dict[str, torch.Tensor]:
        """What the model reads, and the labels."""

    @property
    def steps_per_epoch(self) -> float:
        return len(self.documents) / self.size

    def members(self, step: int) -> NDArray[np.int64]:
        """Which documents the batch takes, (size,)."""
        count = len(self.documents)
        taken = np.arange(step * self.size, (step + 1) * self.size)
        orders = {epoch: self._order(epoch) for epoch in np.unique(taken // count).tolist()}
        return np.array([orders[i // count][i % count] for i in taken.tolist()])

    def _cut(self, step: int, rng: np.random.Generator) -> NDArray[np.int64]:
        """The tokens of the step's crops, (size, length + beyond)."""
        which, length = self.members(step), self.length + self.beyond
        last = self.documents.lengths[which] - length
        begin = (rng.random(self.size) * (last + 1)).astype(np.int64)
        if self.crop == "first":
            begin[:] = 0
        places = self.documents.starts[which] + begin
        return self.documents.ids[places[:, None] + np.arange(length)].astype(np.int64)

    def _order(self, epoch: int) -> NDArray[np.int64]:
        # steps count from 0 up and epochs from 2⁶³ up: no two draws share a key
        return self._random((1 << 63) + epoch).permutation(len(self.documents))

    def _random(self, counter: int) -> np.random.Generator:
        return np.random.Generator(np.random.Philox(key=np.array([self.seed, counter], np.uint64)))


@dataclass(frozen=True)
class Batches(Crops):
    """Crops of `length` tokens, a share of them masked.

    round(share · length) tokens of each crop are to be predicted (BERT's way: as many in each row): 80 % of them become
    the mask token, 10 % another token, 10 % stay. With `pose`, positions are drawn up to that length.
    """

    _: KW_ONLY
    mask_token: int
    ordinary: NDArray[np.int64]  # tokens to put in place of others
    share: float = 0.15
    pose: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.share < 1:
            raise ValueError(f"share: expected a number in (0, 1), got {self.share!r}")
        if not len(self.ordinary):
            raise ValueError("ordinary: expected tokens to put in place of others, got none")
        if self.pose is not None and self.pose < self.length:
            raise ValueError(f"pose: expected at least the length {self.length}, got {self.pose}")

    @property
    def predictions(self) -> int:
        """Tokens to be predicted in each row."""
        return max(1, round(self.share * self.length))

    def __getitem__(self, step: int) -> dict[str, torch.Tensor]:
        """input_ids (size, length); at, labels (size, predictions): where and what; noise (size,): for dropout."""
        rng = self._random(step)
        ids = self._cut(step, rng)
        count = self.predictions
        order = rng.random((self.size, self.length))
        at = np.sort(np.argpartition(order, count - 1, 1)[:, :count], 1)
        labels = np.take_along_axis(ids, at, 1)
        fate = rng.random(at.shape)
        other = self.ordinary[rng.integers(0, len(self.ordinary), at.shape)]
        shown = np.where(fate < MASKED, self.mask_token, np.where(fate < MASKED + SWAPPED, other, labels))
        np.put_along_axis(ids, at, shown, 1)

        batch: dict[str, Any] = {"input_ids": ids, "at": at, "labels": labels}
        batch["noise"] = rng.integers(0, 1 << 31, self.size, np.int32)
        batch = {name: torch.from_numpy(array) for name, array in batch.items()}
        if self.pose is not None:
            generator = torch.Generator().manual_seed(int(rng.integers(0, 1 << 62)))
            batch["position_ids"] = PoSE(self.pose).sample(self.size, self.length, generator)
        return batch


@dataclass(frozen=True)
class NextTokens(Crops):
    """Crops of `length` tokens, each followed by one more: every token is to be predicted from those before it."""

    beyond: ClassVar[int] = 1

    def __getitem__(self, step: int) -> dict[str, torch.Tensor]:
        """input_ids, labels (size, length)."""
        ids = torch.from_numpy(self._cut(step, self._random(step)))
        return {"input_ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}
