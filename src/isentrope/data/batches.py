"""Training batches, each a function of the seed and the step alone."""

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
MASKED_SHARE, REPLACED_SHARE = 0.8, 0.1  # of the predicted tokens; the rest keep their value


@dataclass(frozen=True)
class CropBatches(ABC):
    """`batches[step]`: random crops of documents, drawn anew for each example of each epoch.

    An epoch visits every document once, in its own order. A crop starts at a random token of its document, or at the
    first one with crop="first". No state is kept between steps, so a run may be split over processes and resumed.
    """

    documents: Documents
    length: int
    size: int
    seed: int
    crop: str = "random"
    extra_tokens: ClassVar[int] = 0  # tokens of a crop beyond the `length` that a model reads

    def __post_init__(self) -> None:
        if self.crop not in CROPS:
            raise ValueError(f"crop: expected one of {', '.join(CROPS)}, got {self.crop!r}")
        if min(self.length, self.size) < 1:
            raise ValueError(f"length and size: expected 1 or more, got {self.length} and {self.size}")
        if not 0 <= self.seed < 1 << 64:
            raise ValueError(f"seed: expected a number in 0 … 2⁶⁴ - 1, got {self.seed}")
        if not len(self.documents):
            raise ValueError("documents: expected some, got none")
        if (shortest := int(self.documents.lengths.min())) < self.length + self.extra_tokens:
            tokens = f"{shortest} tokens" + (f" less {self.extra_tokens}" if self.extra_tokens else "")
            raise ValueError(f"length: expected at most the shortest document's {tokens}, got {self.length}")

    @abstractmethod
    def __getitem__(self, step: int) -> dict[str, torch.Tensor]:
        """Return the model inputs and labels of a step."""

    @property
    def steps_per_epoch(self) -> float:
        return len(self.documents) / self.size

    def document_indices(self, step: int) -> NDArray[np.int64]:
        """Return the indices of the documents that a step crops, (size,)."""
        count = len(self.documents)
        examples = np.arange(step * self.size, (step + 1) * self.size)
        orders = {epoch: self._order(epoch) for epoch in np.unique(examples // count).tolist()}
        return np.array([orders[i // count][i % count] for i in examples.tolist()])

    def _read_crops(self, step: int, rng: np.random.Generator) -> NDArray[np.int64]:
        """Return the tokens of the step's crops, (size, length + extra_tokens)."""
        indices, length = self.document_indices(step), self.length + self.extra_tokens
        last_start = self.documents.lengths[indices] - length
        start = (rng.random(self.size) * (last_start + 1)).astype(np.int64)
        if self.crop == "first":
            start[:] = 0
        offsets = self.documents.starts[indices] + start
        return self.documents.ids[offsets[:, None] + np.arange(length)].astype(np.int64)

    def _order(self, epoch: int) -> NDArray[np.int64]:
        # Steps count up from 0 and epochs from 2⁶³, so no two draws share a key.
        return self._generator((1 << 63) + epoch).permutation(len(self.documents))

    def _generator(self, counter: int) -> np.random.Generator:
        return np.random.Generator(np.random.Philox(key=np.array([self.seed, counter], np.uint64)))


@dataclass(frozen=True)
class MaskedBatches(CropBatches):
    """Crops of `length` tokens of which round(share · length) are predicted, the same number in each row as in BERT.

    80 % of the predicted tokens become the mask token, 10 % a random replacement token, 10 % keep their value. With
    `pose`, positions are drawn up to that length.
    """

    _: KW_ONLY
    mask_token: int
    replacement_tokens: NDArray[np.int64]
    share: float = 0.15
    pose: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.share < 1:
            raise ValueError(f"share: expected a number in (0, 1), got {self.share!r}")
        if not len(self.replacement_tokens):
            raise ValueError("replacement_tokens: expected one or more, got none")
        if self.pose is not None and self.pose < self.length:
            raise ValueError(f"pose: expected at least the length {self.length}, got {self.pose}")

    @property
    def predictions(self) -> int:
        """Number of predicted tokens in each row."""
        return max(1, round(self.share * self.length))

    def __getitem__(self, step: int) -> dict[str, torch.Tensor]:
        """Return input_ids (size, length), at and labels (size, predictions), and noise (size,), dropout's seeds."""
        rng = self._generator(step)
        ids = self._read_crops(step, rng)
        count = self.predictions
        order = rng.random((self.size, self.length))
        at = np.sort(np.argpartition(order, count - 1, 1)[:, :count], 1)
        labels = np.take_along_axis(ids, at, 1)
        draw = rng.random(at.shape)
        replacements = self.replacement_tokens[rng.integers(0, len(self.replacement_tokens), at.shape)]
        replaced = np.where(draw < MASKED_SHARE + REPLACED_SHARE, replacements, labels)
        np.put_along_axis(ids, at, np.where(draw < MASKED_SHARE, self.mask_token, replaced), 1)

        batch: dict[str, Any] = {"input_ids": ids, "at": at, "labels": labels}
        batch["noise"] = rng.integers(0, 1 << 31, self.size, np.int32)
        batch = {name: torch.from_numpy(array) for name, array in batch.items()}
        if self.pose is not None:
            generator = torch.Generator().manual_seed(int(rng.integers(0, 1 << 62)))
            batch["position_ids"] = PoSE(self.pose).sample(self.size, self.length, generator)
        return batch


@dataclass(frozen=True)
class NextTokenBatches(CropBatches):
    """Crops of `length` tokens and the one after: every token is predicted from those before it."""

    extra_tokens: ClassVar[int] = 1

    def __getitem__(self, step: int) -> dict[str, torch.Tensor]:
        """Return input_ids and labels, (size, length)."""
        ids = torch.from_numpy(self._read_crops(step, self._generator(step)))
        return {"input_ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}
