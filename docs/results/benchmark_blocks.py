"""Blocks of docs/performance.md and docs/performance-details.md, printed from results files of `benchmarks/run.py`.

After a new run: put its file into benchmarks/results, add its name at the end of `FILES`, and write the page anew:

    python docs/results/check.py --write

A row of a later file replaces the same row of earlier ones. A block without rows says that it is not measured yet.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
TARGETS = "2026-11-19-h200-targets.json"
MILLION = "2026-11-17-h200-million.json"
FILES: dict[str, tuple[str, ...]] = {  # and the groups that are taken from each; all where none is named
    "2026-11-16-h200-8.json": (),
    "2026-11-16-h200-share.json": (),
    "2026-11-16-h200-frontier.json": (),
    "2026-11-16-h200-frontier-2.json": (),
    "2026-11-17-h200-targets-2.json": (),
    "2026-11-18-h200-share.json": (),
    "2026-11-18-cpu.json": (),
    "2026-11-18-cpu-others.json": (),
    "2026-11-18-h200-others.json": (),
    "2026-11-19-cpu.json": (),
    "2026-11-19-cpu-1.json": (),
    "2026-11-19-cpu-2.json": (),
    "2026-11-19-h200-first.json": (),
    "2026-11-19-h200-others.json": (),
    "2026-11-19-h200-decoding.json": (),
    "2026-11-19-h200-first-2.json": (),
    TARGETS: (),
    "2026-11-19-h200-decoding-2.json": (),
    "2026-11-19-h200-retrieve.json": (),
    "2026-11-19-h200-others-2.json": (),
    "2026-11-19-h200-decoding-3.json": (),
    "2026-11-19-h200-retrieve-2.json": (),
    "2026-11-19-h200-spans.json": (),
    "2026-11-19-h200-spans-2.json": (),
    "2026-11-19-h200-gradients.json": (),
    "2026-11-19-h200-decoding-4.json": (),
    "2026-11-19-h200-rows-2.json": (),
    "2026-11-20-h200-queries-1.json": ("bidirectional",),
    "2026-11-20-h200-queries-2.json": (),
    "2026-11-20-h200-queries-3.json": (),
}
# Rows at 4,096 tokens that are not used, by file. Those of TARGETS waited for the host: their baselines took 28 to 71 %
# longer than in an earlier run, and with heads of 64 two thirds of what 8,192 tokens take, which are four times the
# work. Those of the kernel for Hopper are from before its launches were worked out once, before it took any padding,
# and before its backward.
CAUSAL_4096 = frozenset(("attention", name, 4096) for name in ("ReRoPE 1024", "SelfExtend 1024/8"))
CHANGED_ROWS = frozenset(
    ("rows", f"ReRoPE 1024, {how}", n)
    for how, n in (("padded", 8192), ("padded, backward", 8192), ("packed, backward", 36864))
)
UNUSED = {
    TARGETS: CAUSAL_4096
    | {("attention", "LM-Infinite 5 + 1024", 4096), ("bidirectional", "window 1024, d 128", 4096)}
    | {("bidirectional", f"{name}, d 64", 4096) for name in ("ReRoPE 1024", "window 1024")},
    "2026-11-19-h200-spans.json": CAUSAL_4096 | CHANGED_ROWS,
    "2026-11-19-h200-spans-2.json": CAUSAL_4096 | CHANGED_ROWS,
}
SWITCHED_FILES = TARGETS, "2026-11-19-h200-spans.json", "2026-11-19-h200-spans-2.json"
MISSING = "Not measured yet."
SWITCHED = ", with"  # or without: in the name of a row whose switches are not the default
NEAR_AND_FAR = ("ReRoPE", "Leaky ReRoPE", "SelfExtend")
DECODED = ("ReRoPE 4096 + InfoScale", "InfoScale", "SelfExtend 4096/8 + InfoScale")
GRAPH, EAGER = (tuple(f"{x}, batch {n}, {how}" for x in DECODED for n in (1, 8)) for how in ("graph", "eager"))
# of the table at the top: words, group, how methods begin, lengths
SUMMARY: tuple[tuple[str, str, tuple[str, ...], tuple[int, ...]], ...] = (
    ("InfoScale with RoPE, PI or YaRN, or with cosine scores, prompts from 16,384 tokens", "attention",
     ("InfoScale", "CosScale"), (16384, 32768, 131072)),
    ("ReRoPE, SelfExtend, window 1024, prompt of 4,096 tokens", "attention",
     ("ReRoPE 1024", "SelfExtend 1024/8"), (4096,)),
    ("ReRoPE, SelfExtend, window 1024 and 4096, prompt of 8,192 and 16,384 tokens", "attention",
     ("ReRoPE 1024", "ReRoPE 4096", "SelfExtend 1024/8", "SelfExtend 4096/8"), (8192, 16384)),
    ("ReRoPE, Leaky ReRoPE, SelfExtend, prompt of 32,768 tokens", "attention", NEAR_AND_FAR, (32768,)),
    ("the same, 131,072 tokens", "attention", NEAR_AND_FAR, (131072,)),
    ("a share law on top of them", "share", ("",), (16384, 32768, 131072)),
    ("a window, StreamingLLM, LM-Infinite, relative to FlexAttention's own window", "window", ("",), (32768, 131072)),
    ("ALiBi, 32,768 and 131,072 tokens", "attention", ("ALiBi",), (32768, 131072)),
    ("`retrieve` with `pool=8`, prompt of 131,072 tokens", "retrieve", ("ReRoPE, queries=32,pool=8",), (131072,)),
    ("forward and backward, InfoScale", "backward", ("InfoScale",), (16384,)),
    ("forward and backward, ReRoPE 1024", "backward", ("ReRoPE 1024",), (16384,)),
    ("entropy as well, relative to the same call without", "entropy", ("",), (32768,)),
    ("padded rows, relative to as many tokens in equal rows", "rows", ("ReRoPE 1024, padded", "window 1024, padded"),
     (8192,)),
    ("one token with a CUDA graph, cache of 32,768 keys, relative to the plain model", "decoding", GRAPH, (32768,)),
    ("one token without a graph", "decoding", EAGER, (32768,)),
)  # fmt: skip
Row = dict[str, Any]


@cache
def read_rows() -> tuple[Row, ...]:
    """Return the rows with a ratio of all files, a later one in place of an earlier one of the same name."""
    rows: dict[tuple[str, str, int], Row] = {}
    for name, groups in FILES.items():
        document = json.loads((RESULTS / name).read_text(encoding="utf-8"))
        for row in document["rows"]:
            known = row.get("ratio") is not None and not row["method"].endswith("growth")
            place = row["group"], row["method"], row["n"]
            if known and (not groups or row["group"] in groups) and place not in UNUSED.get(name, ()):
                rows[place] = row | {"hardware": document["provenance"]["hardware"]}
    return tuple(rows.values())


def format_range(values: list[float]) -> str:
    """Format the smallest and largest of some ratios."""
    low, high = (f"{x:.2f}" for x in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


def render_benchmark_summary() -> str:
    """Print the lines of `SUMMARY` that are measured, on kernels that are on."""
    lines = ["| | time relative to plain attention |", "|---|---|"]
    for words, group, begins, lengths in SUMMARY:
        chosen = [row for row in _choose(group, begins) if row["n"] in lengths and not _is_switched(row)]
        named = [row for row in chosen if row["method"] in begins]
        ratios = [row["ratio"] for row in named or chosen]
        if ratios:
            lines.append(f"| {words} | {format_range(ratios)} |")
    return "\n".join(lines) + "\n"


def render_benchmark_ratios(groups: str, *words: str) -> str:
    """Print the ratios of some groups, a row a method and a column a length; missed targets are bold.

    Args:
        groups: separated by commas; here and in words "_" is a space.
        words: lengths, and with what methods begin; by default, all.
    """
    begins = tuple(word.replace("_", " ") for word in words if not word.isdecimal())
    only = {int(word) for word in words if word.isdecimal()}
    chosen = _choose(groups.replace("_", " "), begins or ("",))
    rows = [row for row in chosen if (not only or row["n"] in only) and not _is_switched(row)]
    if not rows:
        return f"{MISSING}\n"
    lengths = sorted({row["n"] for row in rows})
    more: dict[str, Callable[[Row], str | None]] = {
        "target": lambda row: None if row["target"] is None else f"{row['target']:.4g}",
        "of the card's peak": lambda row: None if row.get("of_peak") is None else f"{row['of_peak']:.0%}",
        "relative to": lambda row: row["baseline"],
    }
    more = {name: read for name, read in more.items() if any(read(row) is not None for row in rows)}
    if any(row.get("of_peak") is None for row in rows):
        more.pop("of the card's peak", None)
    if len({row["baseline"] for row in rows}) == 1:
        more.pop("relative to", None)  # the text says so once
    lines = [
        f"| | {' | '.join([*(f'{n:,}' for n in lengths), *more])} |",
        "|---" * (1 + len(lengths) + len(more)) + "|",
    ]
    for group, method in dict.fromkeys((row["group"], row["method"]) for row in rows):
        mine = [row for row in rows if (row["group"], row["method"]) == (group, method)]
        cells = ["".join(_format_ratio(row) for row in mine if row["n"] == n) for n in lengths]
        cells += [", ".join(dict.fromkeys(filter(None, map(read, mine)))) for read in more.values()]
        lines.append(f"| {' | '.join((method, *cells))} |")
    return "\n".join(lines) + "\n"


def render_benchmark_others() -> str:
    """Print ours relative to what others run, a column a length on a GPU and then on a CPU, whose windows differ."""
    cells: dict[str, dict[str, str]] = {}
    for row in sorted(_choose("others", ("",)), key=lambda row: ("NVIDIA" not in row["hardware"], row["n"])):
        name, device = re.sub(r" \d+(/\d+)?", "", row["method"]), "GPU" if "NVIDIA" in row["hardware"] else "CPU"
        cells.setdefault(name, {})[f"{device}, {row['n']:,}"] = _format_ratio(row)
    return _format_cells(cells)


def render_benchmark_switches() -> str:
    """Print what each switch changes: time with it, divided by that of the same call without, which took turns."""
    lines = ["| switch | call | tokens | with ÷ without |", "|---|---|---|---|"]
    cells: dict[tuple[str, str, int], float] = {}
    for file in SWITCHED_FILES:
        rows = json.loads((RESULTS / file).read_text(encoding="utf-8"))["rows"]
        names = {(row["group"], row["n"], row["method"]) for row in rows}
        for row in rows:
            if row.get("of_without") is None:
                continue
            method, _, switch = row["method"].rpartition(f"{SWITCHED} ")
            if not method:  # on by default: the row before it is the one without
                method, without = row["method"], f"{row['method']}{SWITCHED}out "
                known = (name for group, n, name in names if (group, n) == (row["group"], row["n"]))
                switch = next(name.removeprefix(without) for name in known if name.startswith(without))
            if (row["group"], method, row["n"]) in UNUSED.get(file, ()):
                continue
            call = f"{row['group']}: {method}" if row["group"] in ("backward", "entropy", "bidirectional") else method
            cells[switch.replace("+", "` and `"), call, row["n"]] = row["of_without"]
    lines += [f"| `{switch}` | {call} | {n:,} | {ratio:.2f} |" for (switch, call, n), ratio in cells.items()]
    return "\n".join(lines) + "\n"


def render_benchmark_decoding() -> str:
    """Print what a prompt and a token cost, a row a recipe: a method's name is the recipe and, after it, the column."""
    cells: dict[str, dict[str, str]] = {}
    for row in _choose("decoding", DECODED):
        recipe, _, column = row["method"].partition(", ")
        cells.setdefault(recipe, {})[column] = _format_ratio(row)
    return _format_cells(cells)


def render_benchmark_million() -> str:
    """Print what each way to read a million tokens takes, relative to the plain model and to its own cache."""
    ways = json.loads((RESULTS / MILLION).read_text(encoding="utf-8"))["ways"]
    titles = "seconds", "time, × plain", "memory above the weights, × the cache", "perplexity, last half", "ms a token"
    lines = [f"| | {' | '.join(titles)} |", "|---" * (1 + len(titles)) + "|"]
    for name, way in ways.items():
        recipe = name if way["recipe"] is None else f"{name}: `{way['recipe']}`"
        cells = [f"{way['seconds']:.1f}", f"{way['seconds'] / ways['plain']['seconds']:.3f}"]
        constant = way["cache_bytes"] < ways["plain"]["cache_bytes"]  # no longer than the window
        memory = f"{way['peak_bytes'] / 2**30:.1f} GiB" if constant else f"{way['peak_bytes'] / way['cache_bytes']:.3f}"
        perplexity = f"{way['positions'][-1]['perplexity']:,.4g}"
        cells += [memory, perplexity, f"{1000 * way['seconds_per_token']:.0f}"]
        lines.append(f"| {' | '.join((recipe, *cells))} |")
    return "\n".join(lines) + "\n"


def render_benchmark_files() -> str:
    """Print the files that the page is from, each with its hardware, torch, date and commit."""
    lines = []
    for name in FILES:
        made = json.loads((RESULTS / name).read_text(encoding="utf-8"))["provenance"]
        facts = f"{made['hardware']}, torch {made['torch'].partition('+')[0]}, {made['date']}, `{made['commit']}`"
        lines.append(f"- [{name}](../benchmarks/results/{name}): {facts}")
    return "\n".join(lines) + "\n"


def _is_switched(row: Row) -> bool:
    return SWITCHED in row["method"]


def _choose(groups: str, begins: tuple[str, ...]) -> list[Row]:
    return [row for row in read_rows() if row["group"] in groups.split(",") and row["method"].startswith(begins)]


def _format_cells(rows: dict[str, dict[str, str]]) -> str:
    """Format a table of cells, by row and column; columns come as they are first seen."""
    columns = list(dict.fromkeys(column for cells in rows.values() for column in cells))
    lines = [f"| | {' | '.join(columns)} |", "|---" * (1 + len(columns)) + "|"]
    lines += [f"| {name} | {' | '.join(cells.get(c, '') for c in columns)} |" for name, cells in rows.items()]
    return "\n".join(lines) + "\n"


def _format_ratio(row: Row) -> str:
    text = f"{row['ratio']:.2f}" if row["ratio"] < 10 else f"{row['ratio']:.0f}"
    return f"**{text}**" if row["met"] is False else text
