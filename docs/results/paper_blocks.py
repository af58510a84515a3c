"""Blocks of the page about the paper's tables, printed from their raw files: claims, rows, seeds trained twice."""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from isentrope.evaluation.decisions import EQUIVALENT, INFERIOR
from isentrope.experiments.joining import join_results
from isentrope.report.load import Row, load_plans
from isentrope.report.tables.numbers import format_number
from isentrope.report.tables.plan_tables import write_tables
from isentrope.report.tables.published import format_published, load_published_tables

HERE = Path(__file__).parent
LENGTH = 4096
CLAIMS = {
    "InfoScale": "InfoScale improves {}",
    "CosScale": "CosScale improves {}",
    "InfoScale on top of CosScale": "InfoScale improves {} with CosScale",
}
# one of each kind of those that do not hold: windows, InfoScale on top of CosScale, Softmax Plus, the best α
AGAINST = (
    "CosScale improves StreamingLLM",
    "CosScale improves LM-Infinite",
    "CosScale improves Windowed",
    "InfoScale improves Windowed",
    "InfoScale improves GAU-α with CosScale",
    "InfoScale improves PoSE with CosScale",
    "InfoScale is better than Softmax Plus with CosScale",
    "CosScale 128 is better than 32",
)
ALPHA = 0.05  # of the registered rule, after Holm's correction
# how models were trained, as the page says it and as the plan `study-why` names its rows
TRAINED = {
    "512, then 64 tokens, as in the study": "as in the study",
    "512, then 64 by the paper's schedule": "the paper's schedule",
    "512 with Softmax Plus, then 64": "Softmax Plus before",
    "512 with Softmax Plus, then 64 by the paper's schedule": "Softmax Plus before, the paper's schedule",
    "64 alone": "not pre-trained",
}
# rows of `study` that were trained and measured again, by recipe
AGAIN = {
    "RoPE": "rope",
    "RoPE + InfoScale": "rope+infoscale:count=sequence",
    "RoPE, CosScale 128": "rope+cosine:alpha=128",
    "ReRoPE": "rerope:window=64",
    "windowed": "rope+window:size=64",
}


def read_claims(folder: str | Path) -> list[dict[str, object]]:
    """Read the claims of a plan, in a folder beside this file, which `check_tables` compares with its raw results."""
    claims: list[dict[str, object]] = json.loads((HERE / folder / "claims.json").read_text(encoding="utf-8"))
    return claims


def format_effect(claim: dict[str, object]) -> str:
    """Format a difference of accuracy with its interval, in bold where that excludes zero."""
    (number,) = claim["numbers"]  # type: ignore[misc]
    mean, low, high = (number[name] for name in ("difference", "low", "high"))
    text = f"{mean:+.3f} ({low:+.3f} to {high:+.3f})".replace("-0.", "−0.")
    return f"**{text}**" if low > 0 or high < 0 else text


def render_paper_claims(*folders: str) -> str:
    """Print what InfoScale and CosScale change in each method, in accuracy at 4096 tokens."""
    claims = {claim["text"]: claim for folder in folders for claim in read_claims(folder)}
    methods = [text.removeprefix("CosScale improves ") for text in map(str, claims) if text.startswith("CosScale")]
    lines = ["| | " + " | ".join(CLAIMS) + " |", "|---" * (1 + len(CLAIMS)) + "|"]
    for method in methods:
        cells = [format_effect(claims[text.format(method)]) for text in CLAIMS.values()]
        lines.append(f"| {method} | {' | '.join(cells)} |")
    return "".join(f"{line}\n" for line in lines)


def render_against_paper() -> str:
    """Print claims of the paper that do not hold in these runs."""
    lines = ["| the paper's claim | by the rule | at 4096 | 95 % interval |", "|---|---|---|---|"]
    folders = ("main", "ablation", "sweep", "softmax", "softmax-cosine")
    claims = {str(claim["text"]): claim for folder in folders for claim in read_claims(f"paper/{folder}")}
    for text in AGAINST:
        (number,) = claims[text]["numbers"]  # type: ignore[misc]
        mean, low, high = (f"{number[name]:+.3f}".replace("-", "−") for name in ("difference", "low", "high"))
        how = {INFERIOR: "worse", EQUIVALENT: f"the same within {number['margin']}"}[str(claims[text]["decision"])]
        if how == "worse" and number["p_not_equivalent"] < ALPHA:
            how = f"worse by less than {number['margin']}"
        lines.append(f"| {text} | **{claims[text]['verdict']}**: {how} | {mean} | {low} to {high} |")
    return "".join(f"{line}\n" for line in lines)


def render_trained(folder: str) -> str:
    """Print accuracies at 1024 and 4096 tokens of models that were trained in several ways, and the paper's."""
    (plan,) = load_plans(HERE / folder)
    lengths = (1024, LENGTH)
    columns = [(kind, variant) for kind in ("", ", α = 16", ", windowed") for variant in ("none", "InfoScale")]
    lines = [
        "| trained at | plain RoPE | + InfoScale | CosScale 16 | + InfoScale | windowed | + InfoScale |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, method in TRAINED.items():
        rows = [Row(method + kind, variant) for kind, variant in columns]
        pairs = [[plan.grids[0].value(row, length, "acc") for length in lengths] for row in rows]
        cells = (" → ".join("–" if x is None else format_number(x.mean, "acc") for x in pair) for pair in pairs)
        lines.append(f"| {name} | {' | '.join(cells).replace('– → –', '–')} |")
    tables = load_published_tables()
    rows = [("4.5", Row("GAU-α", "plain")), ("4.5", Row("GAU-α", "I.S.")), ("4.3.2", Row("16", "C.S."))]
    published = [[tables[f"table {table}"].values[row, length, "acc"] for length in lengths] for table, row in rows]
    cells = (" → ".join(format_published(x, "acc") for x in pair) for pair in published)
    lines.append(f"| the paper | {' | '.join(cells)} | – | – | – |")
    return "".join(f"{line}\n" for line in lines)


def render_decided(*folders: str) -> str:
    """Count the verdicts of some plans, each decided together."""
    lines = ["| claims | holds | does not hold | undecided |", "|---|---|---|---|"]
    for folder in folders:
        verdicts = [claim["verdict"] for claim in read_claims(folder)]
        counts = " | ".join(str(verdicts.count(name)) for name in ("holds", "does not hold", "undecided"))
        name = folder.rpartition("/")[2]
        lines.append(f"| [{name}]({name}/table.md): {len(verdicts)} | {counts} |")
    return "".join(f"{line}\n" for line in lines)


def render_paper_rows(folder: str, table: str) -> str:
    """Print every row of a plan at 4096 tokens, *paper / ours*."""
    (plan,) = load_plans(HERE / folder)
    published = load_published_tables()[f"table {table}"]
    names = {"plain": "neither", "C.S.": "CosScale", "I.S.": "InfoScale", "both": "both", "softmax+": "Softmax Plus"}
    names["C.S. softmax+"] = "CosScale, Softmax Plus"
    lines = [f"| | ACC at {LENGTH} | PPL at {LENGTH} |", "|---|---|---|"]
    for row in plan.rows:
        cells = []
        for metric in ("acc", "ppl"):
            ours, theirs = plan.grids[0].value(row, LENGTH, metric), published.values.get((row, LENGTH, metric))
            assert ours is not None
            paper = "–" if theirs is None else format_published(theirs, metric)
            cells.append(f"{paper} / {format_number(ours.mean, metric)}")
        name = f"α = {row.method}" if row.method.isdigit() else names[row.variant]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "".join(f"{line}\n" for line in lines)


def render_clex() -> str:
    """Print CLEX by length, and the claims about it, also with an earlier run of other seeds."""
    (plan,) = load_plans(HERE / "paper/clex")
    (grid,) = plan.grids
    names = {"plain": "", "C.S.": " + CosScale", "I.S.": " + InfoScale", "both": " + both"}
    lines = ["| ACC at | " + " | ".join(map(str, plan.lengths)) + f" | PPL at {LENGTH} |"]
    lines.append("|---" * (2 + len(plan.lengths)) + "|")
    for row in plan.rows:
        last = grid.value(row, LENGTH, "ppl")
        assert last is not None
        means = [format_number(value.mean, "acc") for n in plan.lengths if (value := grid.value(row, n, "acc"))]
        name = row.method + names[row.variant]
        lines.append(f"| {name} | {' | '.join(means)} | {format_number(last.mean, 'ppl')} |")
    claims, joined = read_claims("paper/clex"), decide_together("archive/statutes/clex-64", "paper/clex")
    count, count_joined = (each[0]["pretrainings"] for each in (claims, joined))
    lines += [
        "",
        f"| claim, ACC at {LENGTH} | {count} pre-trainings | verdict | {count_joined}, not registered | would be |",
        "|---|---|---|---|---|",
    ]
    for claim, again in zip(claims, joined, strict=True):
        assert claim["text"] == again["text"]
        verdict = f"{format_effect(claim)} | **{claim['verdict']}**"
        lines.append(f"| {claim['text']} | {verdict} | {format_effect(again)} | {again['verdict']} |")
    return "".join(f"{line}\n" for line in lines)


def decide_together(*folders: str) -> list[dict[str, object]]:
    """Decide the claims of a plan from several runs of other seeds."""
    with TemporaryDirectory() as temporary:
        join_results([HERE / folder for folder in folders], Path(temporary))
        write_tables(Path(temporary))
        return read_claims(Path(temporary))


def render_anchor() -> str:
    """Print claims decided with one token masked at a time beside the same claims with 15 % masked at once."""
    claims, at_once = read_claims("paper/anchor"), {claim["text"]: claim for claim in read_claims("study")}
    counts = [claim["pretrainings"] for claim in (claims[0], at_once[claims[0]["text"]])]
    head = f"| ACC at {LENGTH} | one at a time, {counts[0]} pre-trainings | 15 % at once, {counts[1]} pre-trainings |"
    lines = [head, "|---|---|---|"]
    assert all(claim["pretrainings"] == counts[0] for claim in claims)
    for claim in claims:
        lines.append(f"| {claim['text']} | {format_effect(claim)} | {format_effect(at_once[claim['text']])} |")
    return "".join(f"{line}\n" for line in lines)


def render_trained_again() -> str:
    """Print how far two trainings of one seed are apart, beside how far seeds are apart."""
    first = read_accuracies("study")
    again = read_accuracies("paper/ablation") | read_accuracies("paper/main")
    seeds = sorted({seed for recipe, seed in again if recipe == AGAIN["RoPE"]})
    heads = " | ".join(f"seed {seed}" for seed in seeds)
    lines = [f"| ACC at {LENGTH}, first / again | {heads} | SD of a repeat | SD of a seed |"]
    lines.append("|---" * (3 + len(seeds)) + "|")
    for name, recipe in AGAIN.items():
        pairs = [(first[recipe, seed], again[recipe, seed]) for seed in seeds]
        repeat = np.sqrt(np.mean([(a - b) ** 2 / 2 for a, b in pairs]))
        every = np.std([value for (other, _), value in first.items() if other == recipe], ddof=1)
        cells = " | ".join(f"{a:.3f} / {b:.3f}" for a, b in pairs)
        lines.append(f"| {name} | {cells} | {repeat:.3f} | {every:.3f} |")
    return "".join(f"{line}\n" for line in lines)


def read_accuracies(folder: str) -> dict[tuple[str, int], float]:
    """Read accuracies at 4096 tokens by recipe and seed, of the two checkpoints that both runs have."""
    (plan,) = load_plans(HERE / folder)
    rows = {Row(row["method"], row["variant"]): row["recipe"] for row in plan.metadata["rows"]}
    return {
        (rows[row], seed): float(cell["acc"])
        for (row, length), cells in plan.grids[0].cells_by_seed.items()
        for seed, cell in cells.items()
        if length == LENGTH and cell["checkpoint"] in ("dot", "cosine128")
    }
