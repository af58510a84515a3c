"""Repeated trainings: from which step on the weights of two runs differ."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from isentrope.report.figures.losses import read_run


def find_first_difference(first: dict[int, str], second: dict[int, str]) -> tuple[int, int | None]:
    """Compare the hashes that two runs logged.

    Args:
        first: The hash of the weights after each step that has one.
        second: The same, of the other run.

    Returns:
        The last step up to which all hashes are equal, 0 where the first ones differ, and the first step at which they
        differ; None where they never do.
    """
    last = 0
    for step in sorted(first.keys() & second.keys()):
        if first[step] != second[step]:
            return last, step
        last = step
    return last, None


def compare_weights(runs: Sequence[Path]) -> list[str]:
    """Say for each run from which step on its weights differ from the first run's, one line each.

    Args:
        runs: Folders of trainings; those without hashes in their logs are left out.
    """
    hashes = {run: {row["step"]: row["weights"] for row in read_run(run)["rows"] if "weights" in row} for run in runs}
    hashed = [run for run in runs if hashes[run]]
    lines = []
    for run in hashed[1:]:
        first = hashed[0]
        if not hashes[first].keys() & hashes[run].keys():
            lines.append(f"{first} and {run}: no step at which both have a hash; give both the same --hash-every")
            continue
        last, step = find_first_difference(hashes[first], hashes[run])
        if step is None:
            lines.append(f"{first} and {run}: the same weights, bit for bit, up to step {last}")
        else:
            lines.append(f"{first} and {run}: the weights differ at step {step}, and are equal up to step {last}")
    return lines
