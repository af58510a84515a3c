"""Print the tables of README.md from the raw files beside this script: python docs/results/share/tables.py

Perplexity of the last bucket, the geometric mean over the documents that every law of a column was measured on; answers
of retrieval, right of all, by filler.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
# plan: what ReRoPE and SelfExtend are in it
METHODS = {
    "smollm2-32k": ("rerope:window=4096", "selfextend:window=4096,group=14"),
    "smollm2-131k": ("rerope:window=4096", "selfextend:window=4096,group=62"),
    "tinyllama-8k": ("rerope:window=1024", "selfextend:window=1024,group=14"),
    "tinyllama-32k": ("rerope:window=1024", "selfextend:window=1024,group=62"),
    "gemma-131k": ("rerope:window=16384", "selfextend:window=16384,group=14"),
    "stories15M": ("rerope:window=128", "selfextend:window=128,group=40"),
    "llama": ("rerope:window=128", "selfextend:window=128,group=40"),
}
PRIOR = "share:beta=1,count=visible"
LAWS = {
    "none": "",
    "InfoScale": "+infoscale",
    "LogN": "+logn",
    "Power": "+power",
    "**share (β = ½)**": "+share:beta=0.5",
    "share, β = ¾": "+share:beta=0.75",
    "share, β = 1": "+share:beta=1",
    "prior, −ln(n / n_tr)": f"+{PRIOR}",
    "prior + Power on far keys": f"+power:keys=far+{PRIOR}",
    "prior + Power on all keys": f"+power+{PRIOR}",
}
FORGETS = "StreamingLLM (forgets)"


def read_cells(plan: str, kind: str, name: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    results = json.loads((HERE / plan / kind / name).read_text(encoding="utf-8"))
    return results, [cell for cell in results["cells"] if cell.get("failed") is None]


def list_kinds(plan: str, name: str) -> list[str]:
    return sorted(path.parent.name for path in (HERE / plan).glob(f"*/{name}"))


def compute_column(plan: str, kind: str, recipes: dict[str, str]) -> tuple[dict[str, float], int, int]:
    """Return perplexities by law, the documents they are means of, and on how many share (β = ½) is below InfoScale."""
    results, cells = read_cells(plan, kind, "perplexity.json")
    first, last = results["config"]["edges"][-2:]
    losses: dict[str, dict[str, float]] = {law: {} for law in recipes}
    for cell in cells:
        for law, recipe in recipes.items():
            if cell["recipe"] == recipe:
                losses[law][cell["text"]] = cell["loss"][-1] / (last - first)
    losses = {law: values for law, values in losses.items() if values}
    if not losses:
        return {}, 0, 0
    common = set.intersection(*map(set, losses.values()))
    share, info = losses.get("**share (β = ½)**", {}), losses.get("InfoScale", {})
    better = sum(share[text] < info[text] for text in common if text in share and text in info)
    means = {law: math.exp(sum(values[text] for text in common) / len(common)) for law, values in losses.items()}
    return means, len(common), better


def print_perplexity(method: int) -> None:
    columns = {}
    for plan, bases in METHODS.items():
        recipes = {law: bases[method] + suffix for law, suffix in LAWS.items()}
        sink = next(
            (
                c["recipe"]
                for c in read_cells(plan, list_kinds(plan, "perplexity.json")[0], "perplexity.json")[1]
                if c["recipe"].startswith("sink:")
            ),
            None,
        )
        recipes |= {FORGETS: sink} if sink else {}
        for kind in list_kinds(plan, "perplexity.json"):
            columns[plan, kind] = compute_column(plan, kind, recipes)
    print("| | " + " | ".join(f"{plan} {kind}" for plan, kind in columns) + " |")
    print("|---" * (len(columns) + 1) + "|")
    for law in (*LAWS, FORGETS):
        values = (means.get(law) for means, _, _ in columns.values())
        print(f"| {law} | " + " | ".join("" if x is None else f"{x:.4g}" for x in values) + " |")
    print("| documents | " + " | ".join(str(count) for _, count, _ in columns.values()) + " |")
    print(
        "| … where β = ½ is below InfoScale | " + " | ".join(str(better) for _, _, better in columns.values()) + " |\n"
    )


def print_retrieval() -> None:
    for plan, bases in METHODS.items():
        kinds = list_kinds(plan, "retrieval.json")
        right: Counter[tuple[str, str, str]] = Counter()
        count: Counter[tuple[str, str, str]] = Counter()
        for kind in kinds:
            for cell in read_cells(plan, kind, "retrieval.json")[1]:
                key = cell["recipe"], cell["task"], kind
                right[key] += cell["forced"]
                count[key] += cell["count"]
        tasks = sorted({task for _, task, _ in count})
        rows = [base + suffix for base in bases for suffix in LAWS.values()]
        rows += sorted({recipe for recipe, _, _ in count if recipe.startswith("sink:")})
        places = [(task, kind) for task in tasks for kind in kinds]
        if places:
            print(f"{plan}\n\n| | " + " | ".join(f"{task}, {kind}" for task, kind in places) + " |")
            print("|---" * (len(places) + 1) + "|")
        for recipe in rows:
            if any(count[recipe, task, kind] for task, kind in places):
                numbers = (f"{right[recipe, *place]} of {count[recipe, *place]}" for place in places)
                print(f"| `{recipe}` | " + " | ".join(numbers) + " |")
        print() if places else None


if __name__ == "__main__":
    for method, name in enumerate(("ReRoPE", "SelfExtend")):
        print(f"{name}\n")
        print_perplexity(method)
    print_retrieval()
