"""Blocks of the pages about laws for far keys, printed from their raw files (`share/tables.py` reads those)."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from isentrope.report.load import Grid, Row, load_plans

HERE = Path(__file__).parent
MISSING = "–"
# heading, plan and kinds of text of each column
COLUMNS = (
    ("SmolLM2 24–32k: novels · technical · speeches", "smollm2-32k", ("novels", "technical", "speeches")),
    ("64–128k: novels · technical", "smollm2-131k", ("novels", "technical")),
    ("TinyLlama 6–8k: novels · technical · speeches", "tinyllama-8k", ("novels", "technical", "speeches")),
    ("16–32k: novels · technical · speeches", "tinyllama-32k", ("novels", "technical", "speeches")),
    ("Gemma-3-270M 96–128k: novels · technical", "gemma-131k", ("novels", "technical")),
    ("stories15M 2–4k", "stories15M", ("stories",)),
    ("Llama 2–4k", "llama", ("modules",)),
)
SPARED = {  # plans with attention sinks that a law spares
    "smollm2-32k": "SmolLM2", "smollm2-131k": "SmolLM2", "tinyllama-8k": "TinyLlama", "tinyllama-32k": "TinyLlama",
    "gemma-131k": "Gemma-3-270M",
}  # fmt: skip
METHODS = {"ReRoPE": 0, "SelfExtend": 1}  # their places in `METHODS` of share/tables.py
SHARE_HALF = "**share (β = ½)**"
PRIOR = "prior, −ln(n / n_tr)"
PRIOR_POWER = "prior + Power on far keys"


def load_script(name: str) -> ModuleType:
    """Load a script of the folder share."""
    spec = spec_from_file_location(f"share_{name}", HERE / "share" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


TABLES = load_script("tables")
Column = tuple[dict[str, float], int, int]


def format_perplexity(x: float | None) -> str:
    """Format with three or four digits."""
    if x is None:
        return MISSING
    return f"{x:.{0 if x >= 99.95 else 1 if x >= 9.995 else 2 if x >= 3 else 3}f}"


def compute_columns(method: str) -> dict[tuple[str, str], Column]:
    """Compute perplexities by law, documents, and documents where β = ½ is below InfoScale, by plan and kind."""
    columns = {}
    for _, plan, kinds in COLUMNS:
        base = TABLES.METHODS[plan][METHODS[method]]
        for kind in kinds:
            recipes = {law: base + suffix for law, suffix in TABLES.LAWS.items()}
            cells = TABLES.read_cells(plan, kind, "perplexity.json")[1]
            sink = next((cell["recipe"] for cell in cells if cell["recipe"].startswith("sink:")), None)
            columns[plan, kind] = TABLES.compute_column(plan, kind, recipes | ({TABLES.FORGETS: sink} if sink else {}))
    return columns


def join_lines(lines: list[str]) -> str:
    return "".join(f"{line}\n" for line in lines)


def render_share_perplexity(method: str) -> str:
    """Print perplexity in the last bucket under every law, a column for each model and length."""
    columns = compute_columns(method)
    lines = ["| | " + " | ".join(head for head, _, _ in COLUMNS) + " |", "|---" * (len(COLUMNS) + 1) + "|"]

    def add(name: str, texts: dict[tuple[str, str], str]) -> None:
        groups = ([texts[plan, kind] for kind in kinds] for _, plan, kinds in COLUMNS)
        cells = ("" if set(group) == {MISSING} else " · ".join(group) for group in groups)
        lines.append(f"| {name} | {' | '.join(cells)} |")

    for law in (*TABLES.LAWS, TABLES.FORGETS):
        name = method if law == "none" else law if law == TABLES.FORGETS else f"+ {law}".replace("+ **", "**+ ")
        add(name, {key: format_perplexity(means.get(law)) for key, (means, _, _) in columns.items()})
    add("documents", {key: str(count) for key, (_, count, _) in columns.items()})
    add("… with β = ½ below InfoScale", {key: str(better) for key, (_, _, better) in columns.items()})
    return join_lines(lines)


def render_share_wins() -> str:
    """Print in how many columns and documents share (β = ½) is below InfoScale, both position methods together."""
    columns = [x for method in METHODS for x in compute_columns(method).values()]
    pairs = [(means, count, better) for means, count, better in columns if {SHARE_HALF, "InfoScale"} <= means.keys()]
    wins = sum(means[SHARE_HALF] < means["InfoScale"] for means, _, _ in pairs)
    documents, better = sum(count for _, count, _ in pairs), sum(better for _, _, better in pairs)
    head = "| share (β = ½) below InfoScale | columns | single documents |\n|---|---|---|\n"
    return f"{head}| decoders | {wins} of {len(pairs)} | {better} of {documents} |\n"


FILLERS = ("novels", "technical", "speeches", "repetitive")
SINK_LAWS = {"share (β = ½)": "share:beta=0.5", "share, β = 1": "share:beta=1", "prior": TABLES.PRIOR}
SINKS = ",sinks=4"


def list_sink_rows(method: str) -> dict[str, str]:
    """Name laws with and without spared attention sinks, and what follows the method in their recipes."""
    names = {f"{method} + {law}": text for law, text in SINK_LAWS.items()}
    return {
        name + suffix: f"+{text}{option}"
        for name, text in names.items()
        for suffix, option in (("", ""), (", sinks = 4", SINKS))
    }


def render_share_sinks() -> str:
    """Print perplexity in the last bucket and passkeys with and without spared sinks, on the same documents."""
    plans = [(head, plan, kinds) for head, plan, kinds in COLUMNS if plan in SPARED]
    heads = " | ".join(
        f"{SPARED[plan]} {head.split(': ')[0].split()[-1]}: {head.split(': ')[1]}" for head, plan, _ in plans
    )
    lines = [f"| | {heads} |", "|---" * (len(plans) + 1) + "|"]
    columns: dict[tuple[str, str], Column] = {}
    names = [name for method in METHODS for name in list_sink_rows(method)]
    for _, plan, kinds in plans:
        window = TABLES.METHODS[plan][0].partition("=")[2]
        recipes = {TABLES.FORGETS: f"sink:sinks=4,size={int(window) - 4}"}
        for method, index in METHODS.items():
            base = TABLES.METHODS[plan][index]
            recipes |= {name: base + suffix for name, suffix in list_sink_rows(method).items()}
        for kind in kinds:
            columns[plan, kind] = TABLES.compute_column(plan, kind, recipes)

    def add(name: str, texts: list[list[str]]) -> None:
        cells = ("" if set(group) == {MISSING} else " · ".join(group) for group in texts)
        lines.append(f"| {name} | {' | '.join(cells)} |")

    for name in (*names, TABLES.FORGETS):
        means = [[columns[plan, kind][0].get(name) for kind in kinds] for _, plan, kinds in plans]
        if any(value is not None for group in means for value in group):
            add(name, [[format_perplexity(value) for value in group] for group in means])
    add("documents", [[str(columns[plan, kind][1]) for kind in kinds] for _, plan, kinds in plans])
    laws = {"none": "", **list_sink_rows("ReRoPE")}
    for name, suffix in laws.items():
        counts = [count_common(plan, TABLES.METHODS[plan][0] + suffix, list(laws.values())) for _, plan, _ in plans]
        if any(count for _, count in counts):
            texts = [[f"{right} of {count}" if count else MISSING] for right, count in counts]
            add(f"passkeys: {name}", texts)
    return join_lines(lines)


def count_common(plan: str, recipe: str, suffixes: list[str]) -> tuple[int, int]:
    """Count the passkeys that a recipe retrieves, and all, at the places measured for every law with passkeys."""
    base, found = TABLES.METHODS[plan][0], dict[str, dict[tuple[Any, ...], tuple[int, int]]]()
    for filler in FILLERS:
        for cell in TABLES.read_cells(plan, f"{filler}-filler", "retrieval.json")[1]:
            if cell["task"] == "passkey" and cell["recipe"] in [base + suffix for suffix in suffixes]:
                place = filler, cell["length"], cell["depth"]
                found.setdefault(cell["recipe"], {})[place] = cell["forced"], cell["count"]
    places = set.intersection(*map(set, found.values())) if found else set()
    values = [found[recipe][place] for place in places] if recipe in found else []
    return sum(right for right, _ in values), sum(count for _, count in values)


TASKS = ("passkey", "needle")
FOUND_ROWS = (
    (
        "rerope:window=4096",
        "",
        "+infoscale",
        "+share:beta=0.5",
        f"+{TABLES.PRIOR}",
        f"+power:keys=far+{TABLES.PRIOR}",
        "+power:keys=far+share:beta=1.25,count=visible",
        "+logn:keys=far+share:beta=1",
        "+share:beta=1,sinks=4",
    ),
    ("selfextend:window=4096,group=14", "", "+share:beta=0.5", f"+power:keys=far+{TABLES.PRIOR}"),
)


def count_answers(plan: str, task: str, filler: str, recipe: str) -> tuple[int, int]:
    """Count answers of which every token is the likeliest, and all."""
    if not (HERE / "share" / plan / f"{filler}-filler" / "retrieval.json").is_file():
        return 0, 0
    cells = TABLES.read_cells(plan, f"{filler}-filler", "retrieval.json")[1]
    chosen = [cell for cell in cells if cell["recipe"] == recipe and cell["task"] == task]
    return sum(cell["forced"] for cell in chosen), sum(cell["count"] for cell in chosen)


def count_common_answers(recipes: Sequence[str]) -> dict[tuple[str, str, str], tuple[int, int]]:
    """Count answers of SmolLM2 at 32,768 tokens, right and all, at the depths that all of the recipes have.

    By recipe, task and filler.
    """
    found = dict[tuple[str, str, str], dict[float, tuple[int, int]]]()  # then by depth
    for filler in FILLERS:
        for cell in TABLES.read_cells("smollm2-32k", f"{filler}-filler", "retrieval.json")[1]:
            found.setdefault((cell["recipe"], cell["task"], filler), {})[cell["depth"]] = cell["forced"], cell["count"]
    counts = {}
    for task in TASKS:
        for filler in FILLERS:
            depths = set.intersection(*(set(found[recipe, task, filler]) for recipe in recipes))
            for recipe in recipes:
                answers = [found[recipe, task, filler][depth] for depth in depths]
                counts[recipe, task, filler] = sum(right for right, _ in answers), sum(count for _, count in answers)
    return counts


def render_share_found() -> str:
    """Print passkeys and needles that SmolLM2 finds at 32,768 tokens, by filler."""
    lines = ["| | passkeys: " + " · ".join(FILLERS) + " | needles |", "|---|---|---|"]
    recipes = [*(base + law for base, *laws in FOUND_ROWS for law in laws), "sink:sinks=4,size=4092"]
    counts = count_common_answers(recipes)
    for recipe in recipes:
        cells = (" · ".join("{} of {}".format(*counts[recipe, task, filler]) for filler in FILLERS) for task in TASKS)
        lines.append(f"| `{recipe}` | {' | '.join(cells)} |")
    return join_lines(lines)


def render_share_found_elsewhere() -> str:
    """Print passkeys found by other models and at other lengths, in all fillers."""
    lines = [
        "| passkeys found | none | InfoScale | share (β = ½) | prior + Power far | StreamingLLM |",
        "|---" * 6 + "|",
    ]
    laws = ("", "+infoscale", "+share:beta=0.5", f"+power:keys=far+{TABLES.PRIOR}")
    for name, plan in (
        ("SmolLM2 at 131,072", "smollm2-131k"),
        ("TinyLlama at 8192", "tinyllama-8k"),
        ("TinyLlama at 32,768", "tinyllama-32k"),
        ("Gemma-3-270M at 131,072", "gemma-131k"),
    ):
        base = TABLES.METHODS[plan][0]
        sink = "sink:sinks=4,size=" + str(int(base.partition("=")[2]) - 4)
        cells = []
        for recipe in (*(base + law for law in laws), sink):
            counts = [count_answers(plan, "passkey", filler, recipe) for filler in FILLERS]
            cells.append(f"{sum(right for right, _ in counts)} of {sum(count for _, count in counts)}")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return join_lines(lines)


GAU = {"statutes": "statutes", "Chinese novels": "novels", "English books": "books"}
GAU_LAWS = {
    "": "plain", "+ InfoScale": "I.S.", "+ LogN": "LogN", "+ Power": "Power", "**+ share (β = ½)**": "β = 0.5",
    "+ share, β = 1": "β = 1", "+ prior": "β = 1, all keys",
    "+ prior + Power on far keys": "β = 1, all keys, Power far", "fitted (β, γ of far keys)": "fitted",
}  # fmt: skip
GAU_METHODS = {"ReRoPE 64": "ReRoPE", "Leaky ReRoPE 32/128": "Leaky ReRoPE", "SelfExtend 32/128": "SelfExtend"}
GAU_ROWS = [
    *((law or name, (method, variant)) for name, method in GAU_METHODS.items() for law, variant in GAU_LAWS.items()),
    ("windowed 64", ("Windowed", "plain")),
]


def load_gau(folder: str) -> Grid:
    (plan,) = load_plans(HERE / "share" / "gau" / folder)
    return plan.grids[0]


def read_gau(grid: Grid, row: tuple[str, str], metric: str) -> float | None:
    value = grid.value(Row(*row), 4096, metric)
    return None if value is None else value.mean


def render_share_gau() -> str:
    """Print accuracy and perplexity of GAU-α at 4096 characters under each law."""
    grids = [load_gau(folder) for folder in GAU.values()]
    lines = [f"| ACC (PPL) | {' | '.join(GAU)} |", "|---" * (len(GAU) + 1) + "|"]
    for name, row in GAU_ROWS:
        cells = []
        for grid in grids:
            accuracy, perplexity = read_gau(grid, row, "acc"), read_gau(grid, row, "ppl")
            cells.append(MISSING if accuracy is None else f"{accuracy:.3f} ({format_perplexity(perplexity)})")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return join_lines(lines)


def render_small_laws(plan: str, kind: str) -> str:
    """Print every law under several position methods of a small model: perplexity in the last bucket, documents."""
    data = json.loads((HERE / "share" / plan / kind / "perplexity.json").read_text(encoding="utf-8"))
    first, last = data["config"]["edges"][-2:]
    losses: dict[str, dict[str, float]] = {}
    for cell in data["cells"]:
        losses.setdefault(cell["recipe"], {})[cell["text"]] = cell["loss"][-1] / (last - first)
    common = set.intersection(*map(set, losses.values()))
    bases = list(dict.fromkeys(recipe.partition("+")[0] for recipe in losses if recipe != "plain"))
    laws = list(dict.fromkeys(recipe.partition("+")[2] for recipe in losses if recipe != "plain"))
    lines = ["| | " + " | ".join(f"`{base}`" for base in bases) + " |", "|---" * (len(bases) + 1) + "|"]
    for law in laws:
        cells = []
        for base in bases:
            values = losses.get(f"{base}+{law}" if law else base)
            mean = None if values is None else math.exp(sum(values[text] for text in common) / len(common))
            cells.append("" if mean is None else format_perplexity(mean))
        lines.append(f"| {f'`{law}`' if law else 'none'} | {' | '.join(cells)} |")
    return join_lines([*lines, f"| documents | {' | '.join(str(len(common)) for _ in bases)} |"])


LAW_COLUMNS = ("none", "InfoScale", SHARE_HALF, PRIOR, PRIOR_POWER)
LAW_ROWS = {
    "SmolLM2, 8192 → 32k: novels · technical · speeches": 0, "SmolLM2 → 131k: novels · technical": 1,
    "TinyLlama, 2048 → 8192: novels · technical · speeches": 2, "TinyLlama → 32k: novels · technical · speeches": 3,
    "Gemma-3-270M, 32k → 131k: novels · technical": 4, "stories15M, 256 → 4096": 5,
    "the Llama that ships, 256 → 4096": 6,
}  # fmt: skip


def render_laws_measured() -> str:
    """Print perplexity under each law of ReRoPE, the best of each text in bold; answers found; GAU-α's accuracy."""
    columns = compute_columns("ReRoPE")
    heads = [law.replace("*", "") for law in LAW_COLUMNS]
    lines = ["| | " + " | ".join(heads) + " |", "|---" * (len(heads) + 1) + "|"]
    for name, index in LAW_ROWS.items():
        _, plan, kinds = COLUMNS[index]
        means = [columns[plan, kind][0] for kind in kinds]
        best = [min(values[law] for law in LAW_COLUMNS) for values in means]
        cells = []
        for law in LAW_COLUMNS:
            texts = [format_perplexity(values[law]) for values in means]
            bold = [text == format_perplexity(x) for text, x in zip(texts, best, strict=True)]
            cells.append(" · ".join(f"**{t}**" if b else t for t, b in zip(texts, bold, strict=True)))
        lines.append(f"| {name} | {' | '.join(cells)} |")
    recipes = [TABLES.METHODS["smollm2-32k"][0] + TABLES.LAWS[law] for law in LAW_COLUMNS]
    counts = count_common_answers(recipes)
    found = []
    for recipe in recipes:
        answers = [counts[recipe, task, filler] for task in TASKS for filler in FILLERS]
        found.append((sum(right for right, _ in answers), sum(count for _, count in answers)))
    most = max(right for right, _ in found)
    texts = [f"**{right}** of {count}" if right == most else f"{right} of {count}" for right, count in found]
    lines.insert(3, f"| … passkeys and needles found | {' | '.join(texts)} |")
    variants = ("plain", "I.S.", "β = 0.5", "β = 1, all keys", "β = 1, all keys, Power far")
    grids = [load_gau(folder) for folder in GAU.values()]
    windowed = " · ".join(f"{read_gau(grid, ('Windowed', 'plain'), 'acc'):.3f}" for grid in grids)
    accuracies = [[read_gau(grid, ("ReRoPE", variant), "acc") or 0.0 for grid in grids] for variant in variants]
    tops = [max(row[i] for row in accuracies) for i in range(len(grids))]
    cells = [
        " · ".join(
            f"**{x:.3f}**" if f"{x:.3f}" == f"{top:.3f}" else f"{x:.3f}" for x, top in zip(row, tops, strict=True)
        )
        for row in accuracies
    ]
    name = f"GAU-α, 64 → 4096, ACC: statutes · novels · books (windowed {windowed})"
    return join_lines([*lines, f"| {name} | {' | '.join(cells)} |"])
