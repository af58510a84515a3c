"""Join results of one plan that were measured apart: other seeds, on other days or machines."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from isentrope.utils.files import RERUN_REMEDY, read_fields, read_plain_or_gzip, write_atomically, write_json

# what runs of one plan must share
SHARED_FIELDS = ("title", "lengths", "train_length", "protocol", "positions", "rows", "claims")
Record = dict[str, Any]


def join_results(folders: Sequence[Path], out: Path) -> Path:
    """Write the results of several runs of one plan as one, in the plan's order.

    Args:
        folders: Folders of a plan's results, each of other seeds.
        out: The folder of all, whose name becomes the plan's.

    Returns:
        The path of `plan.json`, which has the hardware, versions and commit of each run with its seeds as `runs`, also
        those of runs that were joined before.

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
    write_json(out / "plan.json", first | joined | {"runs": [run for plan in plans for run in list_runs(plan)]})
    return out / "plan.json"


def list_runs(plan: Record) -> list[Record]:
    """List the runs behind a plan's results, each with its seeds, hardware, versions and commit.

    Args:
        plan: the content of `plan.json`; of joined results, those that were joined.
    """
    runs = plan.get("runs") or [{"seeds": list(plan["seeds"])} | (plan.get("run") or {})]
    return [dict(run) for run in runs]


def _read_lines(path: Path) -> list[Record]:
    if (content := read_plain_or_gzip(path)) is None:
        raise ValueError(f"{path}: expected results, got no such file; {RERUN_REMEDY}")
    return [json.loads(line) for line in content.splitlines()]


def _write_lines(path: Path, rows: Sequence[Record]) -> None:
    with write_atomically(path) as partial:
        partial.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
