"""What the modules of the theory share: a step of a derivation, and checks of arguments."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Step:
    """One step of a derivation: the exact value before the sign ≅ and the approximation after it."""

    name: str
    exact: Floats
    approximate: Floats

    @property
    def error(self) -> Floats:
        return self.approximate - self.exact


def check_length(name: str, value: ArrayLike) -> Floats:
    return check_range(name, value, minimum=1)


def check_range(name: str, value: ArrayLike, minimum: float = 0, maximum: float = np.inf) -> Floats:
    array = np.asarray(value, dtype=np.float64)
    wrong = array[~(np.isfinite(array) & (array >= minimum) & (array <= maximum))]
    if wrong.size:
        limits = [f"{sign} {value:g}" for sign, value in ((">=", minimum), ("<=", maximum)) if np.isfinite(value)]
        raise ValueError(f"{name}: expected {' and '.join(['finite', *limits])}, got {wrong[0]:g}")
    return array
