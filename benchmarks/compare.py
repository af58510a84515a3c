"""Compare two results files of `run.py`: which rows became slower or faster beyond noise.

    python benchmarks/compare.py OLD NEW [--noise 0.03] [--threshold 0.05] [--by ratio] [--json]

Rows are matched by group, method and n. What is compared is the ratio to the row's own baseline, measured in the same
process, so that another clock or a busier machine moves both sides; `--by ms` compares times. The exit status is 1
where a row became slower by more than the threshold, or fails now and did not before, and 2 for a file that cannot be
read.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

Key = tuple[str, str, int]
NOISE, THRESHOLD = 0.03, 0.05  # ratios carry a few percent of the card's clock


class Change(NamedTuple):
    """One row in both files; `change` is new / old - 1."""

    group: str
    method: str
    n: int
    old: float
    new: float
    change: float
    verdict: str


def read_rows(path: Path) -> dict[Key, dict[str, Any]]:
    """Return the rows of a results file by group, method and n.

    Raises:
        ValueError: it is no results file of `run.py`, or has a row twice.
    """
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
        found = {(str(row["group"]), str(row["method"]), int(row["n"])): row for row in rows}
    except OSError as error:
        raise ValueError(
            f"{path}: cannot be read: {error.strerror}; give two results files of benchmarks/run.py"
        ) from None
    except (KeyError, TypeError, ValueError):
        raise ValueError(f"{path}: expected a results file of benchmarks/run.py; give one with rows") from None
    if len(found) < len(rows):
        raise ValueError(f"{path}: expected each group, method and n once, got one twice; compare files of single runs")
    return found


def compare(
    old: dict[Key, dict[str, Any]], new: dict[Key, dict[str, Any]], by: str, noise: float, threshold: float
) -> list[Change]:
    """Return the rows that both files have a value of, the largest slowdown first."""
    changes = []
    for key in old.keys() & new.keys():
        before, after = old[key].get(by), new[key].get(by)
        if before is None or after is None or before <= 0:
            continue
        change = after / before - 1
        verdict = "slower" if change > noise else "faster" if change < -noise else "same"
        changes.append(Change(*key, before, after, change, "regression" if change > threshold else verdict))
    return sorted(changes, key=lambda change: (-change.change, change[:3]))


def find_failures(old: dict[Key, dict[str, Any]], new: dict[Key, dict[str, Any]]) -> list[Key]:
    """Return the rows that fail now, and did not before or were not there."""
    return sorted(key for key, row in new.items() if "failed" in row and "failed" not in old.get(key, {}))


def format_change(change: Change) -> str:
    values = f"{change.old:8.3f} → {change.new:8.3f}  {change.change:+7.1%}"
    return f"{change.verdict:10}  {values}  {change.group}, {change.method}, n = {change.n:,}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--noise", type=float, default=NOISE, help="smaller changes are not shown")
    parser.add_argument("--threshold", type=float, default=THRESHOLD, help="larger slowdowns are regressions")
    parser.add_argument("--by", choices=("ratio", "ms"), default="ratio")
    parser.add_argument("--json", action="store_true", help="every row that both files have, for programs")
    options = parser.parse_args(arguments)
    if not 0 <= options.noise <= options.threshold:
        parser.error(f"--noise: expected 0 to --threshold ({options.threshold:g}), got {options.noise:g}")
    try:
        old, new = read_rows(options.old), read_rows(options.new)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    changes = compare(old, new, options.by, options.noise, options.threshold)
    failures = find_failures(old, new)
    regressions = [change for change in changes if change.verdict == "regression"]
    if options.json:
        facts = {"by": options.by, "noise": options.noise, "threshold": options.threshold}
        rows = [change._asdict() for change in changes]
        print(json.dumps({**facts, "rows": rows, "failed": failures, "regressions": len(regressions)}, indent=1))
    else:
        for change in changes:
            if change.verdict != "same":
                print(format_change(change))
        for group, method, n in failures:
            print(f"failed      {group}, {method}, n = {n:,}")
        only_old, only_new = len(old.keys() - new.keys()), len(new.keys() - old.keys())
        print(f"{len(changes)} rows compared, {len(regressions)} regressions, {len(failures)} failures; "
              f"only in old: {only_old}, only in new: {only_new}")  # fmt: skip
    return 1 if regressions or failures else 0


if __name__ == "__main__":
    sys.exit(main())
