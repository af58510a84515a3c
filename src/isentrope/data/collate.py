"""A data collator that draws PoSE positions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from isentrope.positions import PoSE


class PoSECollator:
    """Add PoSE positions to a collator's batches, drawn anew for every batch of every epoch.

    Pass `PoSECollator(collator, target_length=4096)` to `Trainer(data_collator=…)`. Padding may be on either side.
    transformers takes jumping positions for packed texts unless the batch has an attention mask, so a missing mask is
    added as ones.

    Args:
        collator: Any collator that returns `input_ids`.
        target_length: Positions are drawn up to this length.
        seed: Seed of the draws.
    """

    def __init__(self, collator: Callable[[Any], dict[str, Any]], target_length: int = 4096, seed: int = 0) -> None:
        self.collator, self.pose = collator, PoSE(target_length)
        self.seed, self.generators = seed, dict[int, torch.Generator]()

    def __call__(self, examples: Any) -> dict[str, Any]:
        batch = self.collator(examples)
        ids = batch["input_ids"]
        if batch.get("attention_mask") is None:
            batch["attention_mask"] = torch.ones_like(ids)
        mask = batch["attention_mask"].to(torch.int64)
        if mask.dim() != 2:
            raise ValueError(f"PoSECollator: expected an attention mask (batch, tokens), got {tuple(mask.shape)}")
        positions = torch.zeros_like(mask)
        for row, visible in enumerate(mask.bool()):
            length = int(visible.sum())
            if length:
                positions[row, visible] = self.pose.sample(1, length, self._generator())[0]
        batch["position_ids"] = positions
        return batch

    def _generator(self) -> torch.Generator:
        """Return the generator of this data loader worker."""
        worker = torch.utils.data.get_worker_info()
        key = -1 if worker is None else worker.id
        if key not in self.generators:
            # A worker's seed differs between epochs; without workers one generator serves all epochs.
            seed = self.seed if worker is None else self.seed + worker.seed
            seed += 0x9E3779B97F4A7C15 * _rank()  # so that processes draw different positions
            self.generators[key] = torch.Generator().manual_seed(seed % (1 << 63))
        return self.generators[key]


def _rank() -> int:
    distributed = torch.distributed
    return distributed.get_rank() if distributed.is_available() and distributed.is_initialized() else 0
