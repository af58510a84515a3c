"""The best temperature at each length, as plans with fitted rows have measured it, and what each law says."""

from __future__ import annotations

import re
from math import exp, log, sqrt

from isentrope.report.load import Grid

FITTED = re.compile(r"fitted:lengths=\((?P<lengths>[\d, ]+)\),table=\((?P<table>[\d., ]+)\)")
POWER_NUMERATOR = 0.63  # of γ = 0.63 / ln n_tr


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


def compute_laws(lengths: list[int], train_length: int, head_size: int) -> dict[str, dict[int, float]]:
    """Compute τ of every closed law at these lengths.

    InfoScale √(f(n) / f(n_tr)), f(m) = 1 - y, y = m^{-2/d} (Li et al.); exact g(n) / g(n_tr), g(m) = √(1 - y) / y
    (their Eq. 10); LogN ln n / ln n_tr; Power (n / n_tr)^{0.63 / ln n_tr}.

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
    }
    return {name: {n: float(law(n)) for n in lengths} for name, law in laws.items()}
