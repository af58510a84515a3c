"""The benchmark suite: every group, one table, one JSON file.

    python benchmarks/run.py [--only attention,window,…] [--match ReRoPE]… [--quick] [--out FILE] [--seconds N]

On a GPU bf16, batch 1, 32 heads, d = 128, causal; on a CPU fp32, 4 heads, d = 64 and short lengths,
with targets for the group `cpu` alone.
Times are medians of warm calls, on a CPU means over the middle half of turns, every method taking turns with its
baseline, so that a clock that drifts moves both sides of a ratio. "cold" is a call whose geometry is built anew. "of
peak" is the least time that the card's data sheet allows, by operations or bytes, divided by the time. "peak MiB" is
above inputs and outputs. The file is written anew after every row. A row that fails says why, and the rest still runs.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import cases
import first_calls
import retrieve
import targets
import torch
from measure import BLANK, Job, Row, Sizes, save, sizes
from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from isentrope.core.caching import clear_caches
from isentrope.utils.provenance import collect_provenance

WIDE = 180  # columns that the table takes
Group = Callable[[], Iterator[Job]]
GROUPS = (
    "targets", "first", "attention", "window", "share", "retrieve", "backward", "memory", "scaling", "decoding", "gau",
    "compilation", "others", "cpu",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(GROUPS), help="groups, in this order")
    parser.add_argument("--match", action="append", help="only methods whose names begin so; repeat for several")
    parser.add_argument("--quick", action="store_true", help="small shapes, no targets: whether everything runs")
    parser.add_argument("--defaults", action="store_true", help="targets with the default switches alone")
    parser.add_argument("--out", type=Path, default=Path("results/benchmarks.json"))
    parser.add_argument("--seconds", type=float, default=float("inf"), help="after these, no measurement begins")
    parser.add_argument("--model", help="for decoding, in place of a random Llama of SmolLM2-135M's shape")
    parser.add_argument("--gguf-file")
    options = parser.parse_args()
    names = options.only.split(",")
    for name in names:
        if name not in GROUPS:
            parser.error(f"--only: expected some of {', '.join(GROUPS)}, got {name!r}")
    if options.defaults and "targets" not in names:
        parser.error(f"--defaults: expected --only to have targets, got {options.only!r}")
    size = replace(sizes(options.quick), switched=not options.defaults)
    chosen = groups(size, names, options.model, options.gguf_file)
    console = Console()
    if not console.is_terminal or console.width < WIDE:
        console = Console(width=WIDE, force_terminal=False)  # lines as they come, and the table at the end
    rows, left = run(chosen, size, options.out, options.seconds, console, options.match or [""])
    if not rows and not left:
        parser.error(f"--match: expected how a method of {options.only} begins, got {options.match}")
    met, missed = (sum(row["met"] is how for row in rows) for how in (True, False))
    failed = sum("failed" in row for row in rows)
    console.print(f"{len(rows)} rows: {met} targets met, {missed} missed, {failed} failed, {len(left)} left out")
    console.print(f"written to {options.out}")


def groups(size: Sizes, names: list[str], model: str | None = None, gguf_file: str | None = None) -> list[Group]:
    """What the groups will measure, as functions that say so job by job."""
    inputs = cases.Inputs(size)

    def of(name: str) -> Iterator[Job]:
        if name in ("decoding", "gau"):
            import models  # transformers takes seconds to load

            inputs.free()
            return models.gau(size) if name == "gau" else models.decoding(size, model, gguf_file)
        if name == "retrieve":
            inputs.free()
            return retrieve.retrieve(size)
        if name in ("targets", "cpu"):
            inputs.free()
            return getattr(targets, name)(size)
        if name == "first":
            inputs.free()
            clear_caches(keep_compiled=True)
            return first_calls.list_jobs(size)
        if name == "others":
            import others

            return others.others(size, inputs)
        return getattr(cases, name)(size, inputs)

    return [lambda name=name: of(name) for name in names]  # type: ignore[misc]


def run(
    chosen: list[Group], size: Sizes, out: Path, seconds: float, console: Console, match: Sequence[str] = ("",)
) -> tuple[list[Row], list[dict[str, Any]]]:
    """Measure, show and save; returns the rows and what no time was left for."""
    rows: list[Row] = []
    left: list[dict[str, Any]] = []
    told = {"provenance": made_with(), "sizes": {**vars(size), "dtype": str(size.dtype).removeprefix("torch.")}}
    begun = time.monotonic()
    table = heading()
    live = Live(table, console=console, auto_refresh=False) if console.is_terminal else None
    with live or nullcontext():
        for group in chosen:
            for job in group():
                if not job.method.startswith(tuple(match)):
                    continue
                if not job.free and time.monotonic() - begun > seconds:
                    left.append({"group": job.group, "method": job.method, "n": job.n})
                else:
                    rows.append(measured(job, size))
                    table.add_row(*cells(rows[-1]))
                    live.refresh() if live else console.out(line(rows[-1]))
                save(out, rows, **told, left_out=left)
    if live is None:
        console.print(table)
    if left:
        console.print("left out, time being up: " + ", ".join(f"{x['group']} {x['method']} {x['n']}" for x in left))
    return rows, left


def measured(job: Job, size: Sizes) -> Row:
    """The job's row, also where it fails."""
    row = BLANK | {"group": job.group, "method": job.method, "n": job.n}
    try:
        row |= job.work()
    except Exception as error:  # whatever it is, the next row may succeed
        row["failed"] = (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
    if size.device == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
    if not (size.cpu_targets if job.group == "cpu" else size.targets):
        row["target"] = row["met"] = None
    elif row["target"] is not None and row["ratio"] is not None:
        row["met"] = row["ratio"] <= row["target"]
    return row


def made_with() -> dict[str, Any]:
    told = collect_provenance() | {"cuda": torch.version.cuda, "command": " ".join(sys.argv)}
    for package in ("transformers", "triton"):
        try:
            told[package] = version(package)
        except PackageNotFoundError:
            told[package] = None
    if torch.cuda.is_available():
        told["memory"] = torch.cuda.get_device_properties(0).total_memory
        told["cudnn"] = torch.backends.cudnn.version()
    return told


def heading() -> Table:
    table = Table(title=f"isentrope on {'a GPU' if torch.cuda.is_available() else 'a CPU'}", title_justify="left")
    for name, justify in (
        ("group", "left"), ("what", "left"), ("n", "right"), ("ms", "right"), ("TFLOP/s", "right"), ("ratio", "right"),
        ("to", "left"), ("of peak", "right"), ("peak MiB", "right"), ("target", "right"), ("met", "left"),
        ("note", "left"),
    ):  # fmt: skip
        table.add_column(name, justify=justify, no_wrap=justify == "right")  # type: ignore[arg-type]
    return table


def cells(row: Row) -> list[str]:
    def number(value: float | None, form: str) -> str:
        return "" if value is None else format(value, form)

    met = {None: "", True: "[green]yes[/]", False: "[red]no[/]"}[row["met"]]
    peak = None if row["peak_bytes"] is None else row["peak_bytes"] / 2**20
    notes = [row["note"], None if row["cold_ms"] is None else f"cold {row['cold_ms']:.1f} ms"]
    note = f"[red]{escape(row['failed'])}[/]" if "failed" in row else "; ".join(x for x in notes if x)
    return [
        row["group"], row["method"], f"{row['n']:,}", number(row["ms"], ".2f"), number(row["tflops"], ".3g"),
        number(row["ratio"], ".3f"), row["baseline"] or "", number(row["of_peak"], ".0%"), number(peak, ",.0f"),
        "" if row["target"] is None else f"≤ {row['target']:.3g}", met, note,
    ]  # fmt: skip


def line(row: Row) -> str:
    """A row where no table can grow."""
    facts = [f"{row['group']:12} {row['method']:40} n={row['n']}"]
    facts += [f"{row[key]:{form}} {unit}" for key, form, unit in (
        ("ms", ".2f", "ms"), ("tflops", ".3g", "TFLOP/s"), ("ratio", ".3f", "×"),
        ("of_peak", ".0%", "of peak"),
    ) if row[key] is not None]  # fmt: skip
    facts += [row["baseline"] or "", {None: "", True: "met", False: "MISSED"}[row["met"]], row["note"] or ""]
    return "  ".join(x for x in [*facts, f"failed: {row['failed']}" if "failed" in row else ""] if x)


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main()
