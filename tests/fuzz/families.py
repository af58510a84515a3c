"""Every model type that transformers can build: extended, padded, saved and loaded, restored.

`check(name, folder)` judges one: "not built", "refused" or "right", or an AssertionError that says what is wrong.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging

import isentrope as ise
from isentrope.hf.names import CONFIG_KEY
from tests.fixtures.model_types import ACTIVE, VOCABULARY, _error, _silent, build, examine, output

PADDING = 7


def check(name: str, folder: Path, seed: int = 0) -> str:
    logging.disable_progress_bar()
    finding = examine(name, seed)
    if finding.outcome != "extended":
        return finding.outcome
    model: Any = build(name, seed=seed)
    ids = torch.randint(3, VOCABULARY, (1, 40), generator=torch.Generator().manual_seed(seed))
    with _silent():
        wrong = [
            *finding.wrong,
            *_wrong_when_padded(model, ids, ACTIVE[not finding.rotated]),
            *_wrong_when_loaded(model, ids, ACTIVE[not finding.rotated], folder),
        ]
    assert not wrong, f"{name}: {'; '.join(wrong)}"
    return "right"


def _wrong_when_padded(model: Any, ids: torch.Tensor, recipe: str) -> list[str]:
    """A row padded on the left says what it says alone, as nearly as in the plain model."""

    def gap() -> float:
        alone = output(model, ids, attention_mask=torch.ones_like(ids))
        filler = getattr(model.config.get_text_config(), "pad_token_id", None) or 0
        padded = torch.cat((torch.full((1, PADDING), filler), ids), 1)
        mask = torch.ones_like(padded)
        mask[:, :PADDING] = 0
        positions = (mask.cumsum(1) - 1).clamp_min(0)
        return _error(output(model, padded, attention_mask=mask, position_ids=positions)[:, PADDING:], alone)

    try:
        plain = gap()
    except (TypeError, ValueError, RuntimeError):
        return []  # takes no position_ids
    if plain > 1e-2:
        return []  # its own positions or state see the padding
    with ise.extended(model, recipe):
        error = gap()
    return [f"{recipe} padded: {error:.1e}, plain {plain:.1e}"] if error > 1e-4 + 4 * plain else []


def _wrong_when_loaded(model: Any, ids: torch.Tensor, recipe: str, folder: Path) -> list[str]:
    ise.extend(model, recipe)
    expected = output(model, ids)
    model.save_pretrained(folder)
    loaded = ise.load(folder).eval()
    wrong = [] if torch.equal(output(loaded, ids), expected) else [f"{recipe} loaded gives other numbers"]
    ise.restore(loaded)
    ise.restore(model)
    if hasattr(loaded.config, CONFIG_KEY) or not torch.equal(output(loaded, ids), output(model, ids)):
        wrong.append(f"{recipe} loaded is not restored")
    return wrong
