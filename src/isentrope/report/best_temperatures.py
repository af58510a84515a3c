"""The best temperature at each length, as plans with fitted rows have measured it, and what each law says."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp, log, sqrt
from pathlib import Path

from isentrope.report.load import Grid
from isentrope.utils.files import RERUN_REMEDY, read_fields

FITTED = re.compile(r"fitted:lengths=\((?P<lengths>[\d, ]+)\),table=\((?P<table>[\d., ]+)\)")
POWER_NUMERATOR = 0.63  # of γ = 0.63 / ln n_tr
YARN_SLOPE = 0.1


def collect_best_temperatures(grid: Grid) -> dict[str, dict[int, float]]:
    """Collect the fitted temperature of each method by length, the mean over seeds.

    Args:
        grid: of a plan with `fit: true` in rows without far keys of their own; other rows are left out.
    """
    values: dict[str, dict[int, list[float]]] = {}
    for (row, length), cells in grid.cells_by_seed.items():
        for cell in cells.values():
            if match := FITTED.search(str(cell.get("recipe"))):
                tau = [float(x) for x in match["table"].split(",") if x.strip()][-1]
                values.setdefault(row.method, {}).setdefault(length, []).append(tau)
    return {
        method: {n: sum(taus) / len(taus) for n, taus in sorted(by_length.items())}
        for method, by_length in values.items()
    }


@dataclass(frozen=True)
class FittedModel:
    """Temperatures fitted to one model, each for all keys, layers and heads.

    Args:
        name: of the model.
        train_length: n_tr.
        head_size: d.
        fits: for each position method the best τ by length.
    """

    name: str
    train_length: int
    head_size: int
    fits: Mapping[str, Mapping[int, float]]

    @property
    def lengths(self) -> list[int]:
        """All fitted lengths, in order."""
        return sorted({n for values in self.fits.values() for n in values})


def read_calibrated(path: Path) -> dict[int, float]:
    """Read the temperature for all heads that `isentrope calibrate` fitted, by length past the training length.

    Args:
        path: of `calibrate.json`.

    Raises:
        ValueError: no such temperature was fitted.
    """
    data = read_fields(path, RERUN_REMEDY, "train_length", "candidates")
    for candidate in data["candidates"]:
        if candidate["name"] == "scalar":
            pairs = zip(candidate["tau"]["n"], candidate["tau"]["rows"][0], strict=True)
            return {int(n): float(tau) for n, tau in pairs if n > data["train_length"]}
    raise ValueError(f"{path}: expected a fit of one temperature for all heads (level scalar), got none")


def compute_residuals(models: Sequence[FittedModel]) -> dict[str, dict[str, float]]:
    """Compute what each law leaves of ln τ*: the root of the mean square over a model's points, and over all of them.

    Args:
        models: the fitted temperatures.

    Returns:
        For each law, "none" (τ = 1) first, the residual by the name of the model, and over all points as "all".
    """
    squares: dict[str, dict[str, list[float]]] = {}
    for model in models:
        laws = {"none": dict.fromkeys(model.lengths, 1.0)}
        laws |= compute_laws(model.lengths, model.train_length, model.head_size)
        for law, values in laws.items():
            errors = [log(tau / values[n]) ** 2 for fit in model.fits.values() for n, tau in fit.items()]
            squares.setdefault(law, {})[model.name] = errors
    for by_model in squares.values():
        by_model["all"] = [x for values in list(by_model.values()) for x in values]
    return {law: {name: sqrt(sum(x) / len(x)) for name, x in by_model.items()} for law, by_model in squares.items()}


def compute_laws(lengths: Sequence[int], train_length: int, head_size: int) -> dict[str, dict[int, float]]:
    """Compute τ of every closed law at these lengths.

    InfoScale √(f(n) / f(n_tr)), f(m) = 1 - y, y = m^{-2/d} (Li et al.); exact g(n) / g(n_tr), g(m) = √(1 - y) / y
    (their Eq. 10); LogN ln n / ln n_tr; Power (n / n_tr)^{0.63 / ln n_tr}; YaRN (1 + 0.1 ln(n / n_tr))², its attention
    factor for that extension, on both q and k (Peng et al., 2023).

    Args:
        lengths: n.
        train_length: n_tr.
        head_size: d.
    """

    def remainder(n: float) -> float:
        return float(n) ** (-2 / head_size)

    def exact(n: float) -> float:
        return sqrt(1 - remainder(n)) / remainder(n)

    laws = {
        "InfoScale": lambda n: sqrt((1 - remainder(n)) / (1 - remainder(train_length))),
        "InfoScale, exact": lambda n: exact(n) / exact(train_length),
        "LogN": lambda n: log(n) / log(train_length),
        "Power": lambda n: exp(POWER_NUMERATOR / log(train_length) * log(n / train_length)),
        "YaRN": lambda n: (1 + YARN_SLOPE * log(n / train_length)) ** 2,
    }
    return {name: {n: float(law(n)) for n in lengths} for name, law in laws.items()}
