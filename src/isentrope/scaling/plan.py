"""Predict a grid of models, recipes, lengths and numbers of devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

from isentrope.scaling.hardware import Device, Link
from isentrope.scaling.prefill import Setup, list_exchanges, predict
from isentrope.scaling.shape import ModelShape
from isentrope.scaling.visibility import read_visibility
from isentrope.utils.files import write_json
from isentrope.version import __version__

FILE = "plan-scale.json"


@dataclass(frozen=True)
class ScalePlan:
    """What is predicted: every combination.

    Attributes:
        shapes: of models.
        recipes: their texts.
        tokens: lengths of the text.
        gpus: numbers of devices.
        device: of every process.
        link: between them.
    """

    shapes: tuple[ModelShape, ...]
    recipes: tuple[str, ...]
    tokens: tuple[int, ...]
    gpus: tuple[int, ...]
    device: Device
    link: Link


def predict_plan(plan: ScalePlan) -> list[dict[str, Any]]:
    """Predict every combination by every way of exchange; a row says why where one does not work.

    Text is laid out in zigzag, or in one part a process where queries see a window: its work is even then, and a
    process has one edge to exchange instead of two.
    """
    rows = []
    for shape, recipe, tokens, gpus in product(plan.shapes, plan.recipes, plan.tokens, plan.gpus):
        visibility = read_visibility(recipe)
        layout = "contiguous" if visibility.kind == "windowed" else "zigzag"
        for exchange in list_exchanges(visibility):
            row: dict[str, Any] = {
                "model": shape.name, "recipe": recipe, "keys": visibility.kind, "tokens": tokens, "gpus": gpus,
                "exchange": exchange,
            }  # fmt: skip
            try:
                cost = predict(shape, visibility, Setup(tokens, gpus, exchange, layout), plan.device, plan.link)
            except ValueError as error:
                rows.append(row | {"refused": str(error)})
                continue
            rows.append(
                row
                | {"refused": None, **asdict(cost), "memory_bytes": cost.memory_bytes}
                | {"fits": cost.memory_bytes <= plan.device.memory_bytes}
            )
    return rows


def write_plan(plan: ScalePlan, out: Path) -> Path:
    """Predict and write `plan-scale.json`; returns its path."""
    out.mkdir(parents=True, exist_ok=True)
    head = {"isentrope": __version__, "device": asdict(plan.device), "link": asdict(plan.link)}
    shapes = [asdict(shape) | {"weights": shape.weights} for shape in plan.shapes]
    path = out / FILE
    write_json(path, head | {"models": shapes, "rows": predict_plan(plan)})
    return path


def parse_tokens(text: str) -> tuple[int, ...]:
    """Parse lengths separated by commas, with K and M for 2¹⁰ and 2²⁰: "131072,1M".

    Raises:
        ValueError: an entry is not a length.
    """
    units = {"K": 1 << 10, "M": 1 << 20}
    tokens = []
    for word in (word.strip().upper() for word in text.split(",")):
        number, unit = (word[:-1], units[word[-1]]) if word[-1:] in units else (word, 1)
        if not (number.isascii() and number.isdigit()) or int(number) < 1:
            raise ValueError(f"tokens: expected lengths such as 131072,1M,10M, got {text!r}")
        tokens.append(int(number) * unit)
    return tuple(tokens)


def select_fastest(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Select the fastest way of exchange of each model, recipe, length and number of devices: of those that fit into
    memory, or where none does, of all."""
    best: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in rows:
        if row["refused"] is not None:
            continue
        key = tuple(row[name] for name in ("model", "recipe", "tokens", "gpus"))
        if key not in best or (not row["fits"], row["seconds"]) < (not best[key]["fits"], best[key]["seconds"]):
            best[key] = row
    return list(best.values())
