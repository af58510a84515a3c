"""Values of the library's formulas, with which pages that compute them again are checked."""

from __future__ import annotations

from typing import Any

import torch

from isentrope.positions.branch import Position
from isentrope.recipe import Recipe
from isentrope.recipe.recipe import Recipe as SingleRecipe
from isentrope.theory.far_keys import far_entropy_gaussian, far_share_gaussian

# recipes of the methods, by length, training length and window
METHODS = {
    "rope": "rope",
    "rerope": "rerope:window={window}",
    "leakyrerope": "leakyrerope:window={window},reach=0.75",
    "selfextend": "selfextend:window={window},reach=0.75",
    "jetlong": "jetlong:window={window}",
    "dualchunk": "dualchunk",
}
LAWS = ("infoscale", "infoscaleexact", "logn", "power", "yarntemperature")
ROWS = ((64, 16, 6), (200, 64, 32), (1000, 128, 16))  # n, training length, window


def compute_formula_values() -> dict[str, list[dict[str, Any]]]:
    """Compute distances of position methods, temperatures, and shares and entropies of far keys."""
    return {"distances": _distances(), "laws": _temperatures(), "far": _far_keys()}


def _distances() -> list[dict[str, Any]]:
    rows = []
    for n, trained, window in ROWS:
        pairs = [(i, j) for i in (0, n // 3, n // 2 + 1, n - 1) for j in (0, i // 5, i // 2, i - i // 9, i)]
        for method, text in METHODS.items():
            recipe = Recipe.parse(text.format(window=window), train_length=trained)
            assert isinstance(recipe, SingleRecipe) and recipe.position is not None
            position = recipe.position.resolve(trained)
            for i, j in dict.fromkeys(pairs):
                value = compute_distance(position, i, j, n)
                rows.append(
                    {"method": method, "n": n, "trained": trained, "window": window, "i": i, "j": j, "value": value}
                )
    return rows


def compute_distance(position: Position, query: int, key: int, length: int) -> float:
    """Return the distance at which a query meets a key in a row of so many tokens, from the method's branches."""
    steps = torch.arange(length)[None]

    def side(at: Any, index: int) -> float:
        return 0.0 if at is None else float(at[0, index]) if isinstance(at, torch.Tensor) else float(at)

    for branch in position.branches(steps, steps, 1, (length, length)):
        if any(span.contains(query, key) for span in branch.region.spans):
            return side(branch.query, query) - side(branch.key, key)
    raise ValueError(f"{position.name()}: expected a branch for query {query} and key {key}, got none")


def _temperatures() -> list[dict[str, Any]]:
    rows = []
    for law in LAWS:
        for trained, head_dim in ((64, 128), (2048, 64)):
            recipe = Recipe.parse(f"rope+{law}:train_length={trained}")
            assert isinstance(recipe, SingleRecipe)
            (temperature,) = recipe.temperature if isinstance(recipe.temperature, tuple) else (recipe.temperature,)
            lengths = [trained // 2, trained, 2 * trained, 16 * trained, 64 * trained + 1]
            values: Any = temperature.scale(torch.tensor(lengths, dtype=torch.float64), head_dim)
            rows += [
                {"law": law, "n": n, "trained": trained, "d": head_dim, "value": value}
                for n, value in zip(lengths, values.tolist(), strict=True)
            ]
    return rows


def _far_keys() -> list[dict[str, Any]]:
    rows = []
    for n, window, reference in ((4096, 128, 128), (300, 256, 1), (32768, 4096, 4096)):
        for beta, tau, sigma in ((0.0, 1.0, 1.0), (0.5, 1.0, 2.0), (1.0, 1.2, 1.5)):
            share = float(far_share_gaussian(n, window, reference, beta, tau, sigma))
            entropy = float(far_entropy_gaussian(n, window, tau, sigma))
            row = {"n": n, "window": window, "reference": reference, "beta": beta, "tau": tau, "sigma": sigma}
            rows.append(row | {"share": share, "entropy": entropy})
    return rows
