"""Join results of one plan that were measured apart: other seeds, on other days or machines."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from isentrope.utils.files import RERUN_REMEDY, read_fields, write_atomically, write_json

# what runs of one plan must share
SHARED_FIELDS = ("title", "lengths", "train_length", "protocol", "positions", "rows", "claims")
Record = dict[str, Any]


def join_results(folders: Sequence[Path], out: Path) -> Path:
    """Write the results of several runs of one plan as one, in the plan's order.

    Args:
        folders: Folders of a plan's results, each of other seeds.
        out: The folder of all, whose name becomes the plan's.

    Returns:
        The path of `plan.json`, which has the runs' hardware, versions and commits as `runs`.

    Raises:
        ValueError: There is nothing to join, the runs are of other plans or documents, or a seed is in two of them.
    """
    if not folders:
        raise ValueError("folders: expected one or more, got none")
    plans = [read_fields(folder / "plan.json", RERUN_REMEDY, *SHARED_FIELDS, "seeds", "data") for folder in folders]
    first, seeds = plans[0], set[int]()
    for folder, plan in zip(folders, plans, strict=True):
        differing = [field for field in SHARED_FIELDS if plan[field] != first[field]]
        if plan["data"]["partition"] != first["data"]["partition"]:
            differing.append("documents")
        if differing:
            raise ValueError(
                f"{folder}: expected the plan of {folders[0]}, got another ({', '.join(differing)} differ)"
            )
        if twice := seeds & set(plan["seeds"]):
            raise ValueError(f"{folder}: expected other seeds than the folders before it, got {min(twice)} again")
        seeds |= set(plan["seeds"])
    results = [row for folder in folders for row in _read_lines(folder / "results.jsonl")]
    timings = {row["key"]: row for folder in folders for row in _read_lines(folder / "timings.jsonl")}
    order = {(row["method"], row["variant"]): index for index, row in enumerate(first["rows"])}
    results.sort(
        key=lambda row: (order[row["method"], row["variant"]], first["lengths"].index(row["length"]), row["seed"])
    )
    out.mkdir(parents=True, exist_ok=True)
    _write_lines(out / "results.jsonl", results)
    _write_lines(out / "timings.jsonl", [timings[row["key"]] for row in results if row["key"] in timings])
    checkpoints = {name: row for plan in plans for name, row in plan.get("checkpoints", {}).items()}
    joined = {"name": out.name, "seeds": sorted(seeds), "checkpoints": checkpoints}
    write_json(out / "plan.json", first | joined | {"runs": [plan.get("run") for plan in plans]})
    return out / "plan.json"


def _read_lines(path: Path) -> list[Record]:
    if not path.is_file():
        raise ValueError(f"{path}: expected results, got no such file; {RERUN_REMEDY}")
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _write_lines(path: Path, rows: Sequence[Record]) -> None:
    with write_atomically(path) as partial:
        partial.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
