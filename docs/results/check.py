"""Recompute the numbers of the results pages from the raw files beside them.

    python docs/results/check.py            # exits with 1 and a line for each mismatch
    python docs/results/check.py --write    # writes hashes and marked blocks anew

Checked: the hash of every raw file (hashes.json, with the commits that measured it); the numbers of every plan's
table.md and beside.md, and its claims.json; and in pages the blocks between `<!-- numbers: NAME ARGUMENTS -->` and
`<!-- end -->`, each printed by the function of that name below.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from isentrope.evaluation.decisions import (
    EQUIVALENT,
    SUPERIOR,
    UNDECIDED,
    Effect,
    decide_claims,
    estimate_effect,
)
from isentrope.report.claims import evaluate_claims
from isentrope.report.load import Grid, Row, load_plans
from isentrope.report.tables.numbers import format_number
from isentrope.report.tables.plan_tables import write_tables
from isentrope.report.tables.published import format_published, load_published_tables

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
HASHES = HERE / "hashes.json"
RAW_FILES = ("results.jsonl", "results.jsonl.gz", "plan.json", "perplexity.json", "retrieval.json", "calibrate.json")
RECORD = "measured anew? record it: python docs/results/check.py --write"
PAGES = ("docs/results/README.md", "docs/results/share/README.md", "docs/laws.md", "README.md")
BLOCK = re.compile(r"(<!-- numbers: (\S+)((?: \S+)*) -->\n)(.*?)(<!-- end -->)", re.S)
VARIANTS = ("plain", "C.S.", "I.S.", "both")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write hashes and marked blocks anew")
    write = parser.parse_args().write
    problems = [*check_hashes(write), *check_tables(), *check_pages(write)]
    for problem in problems:
        print(problem, file=sys.stderr)
    print(f"{len(problems)} mismatches" if problems else "every number checked is that of its raw file")
    sys.exit(1 if problems else 0)


def list_raw_files() -> list[Path]:
    """List the raw results files, in order."""
    return sorted(path for name in RAW_FILES for path in HERE.rglob(name))


def describe_file(path: Path) -> dict[str, object]:
    """Return a raw file's hash, and the commits that it names."""
    content = path.read_bytes() if path.suffix != ".gz" else gzip.decompress(path.read_bytes())
    commits = sorted(set(re.findall(r'"commit": ?"([0-9a-z-]+)"', content.decode("utf-8"))))
    return {"sha256": hashlib.sha256(content).hexdigest(), "commits": commits}


def check_hashes(write: bool) -> Iterator[str]:
    """Compare every raw file with its recorded hash."""
    files = {str(path.relative_to(HERE)): describe_file(path) for path in list_raw_files()}
    if write:
        HASHES.write_text(json.dumps(files, indent=1) + "\n", encoding="utf-8")
        return
    known = json.loads(HASHES.read_text(encoding="utf-8"))
    for name in sorted(known.keys() | files.keys()):
        if name not in files or name not in known:
            yield f"{name}: {'missing' if name not in files else 'not in hashes.json'}; {RECORD}"
        elif files[name] != known[name]:
            yield f"{name}: changed since its hash was recorded; {RECORD}"


def list_plans() -> list[Path]:
    """List the folders of plans for masked models."""
    return sorted(path.parent for path in HERE.rglob("plan.json"))


def check_tables(plans: list[Path] | None = None) -> Iterator[str]:
    """Write each plan's table and claims anew in a temporary folder, and compare."""
    for folder in list_plans() if plans is None else plans:
        with tempfile.TemporaryDirectory() as temporary:
            copy = Path(temporary)
            for name in ("plan.json", "results.jsonl", "results.jsonl.gz", "timings.jsonl"):
                if (folder / name).is_file():
                    shutil.copy(folder / name, copy)
            write_tables(copy)
            for name in ("table.md", "claims.json", "beside.md"):
                kept, anew = folder / name, copy / name
                if kept.is_file() and anew.is_file() and read_numbers(kept) != read_numbers(anew):
                    yield f"{kept.relative_to(ROOT)}: not what its results.jsonl gives"


def read_numbers(path: Path) -> object:
    """Return the rows of a page's tables, or what a JSON file holds: words around tables may change."""
    text = path.read_text(encoding="utf-8")
    return json.loads(text) if path.suffix == ".json" else [line for line in text.splitlines() if line.startswith("|")]


def check_pages(write: bool) -> Iterator[str]:
    """Print every marked block anew, and compare or replace it."""
    for name in PAGES:
        path = ROOT / name
        text = path.read_text(encoding="utf-8")
        anew = BLOCK.sub(lambda match: match[1] + render(match[2], match[3].split()) + match[5], text)
        if anew == text:
            continue
        if write:
            path.write_text(anew, encoding="utf-8")
            continue
        for old, new in zip(BLOCK.finditer(text), BLOCK.finditer(anew), strict=True):
            if old[4] != new[4]:
                yield f"{name}: the block {old[2]}{old[3]} is not what the raw files give"


def render(name: str, arguments: list[str]) -> str:
    """Print a block by the name of its function."""
    if name not in RENDERERS:
        raise ValueError(f"numbers: expected one of {', '.join(RENDERERS)}, got {name!r}")
    return RENDERERS[name](*arguments)


def load_grid(folder: str) -> Grid:
    (plan,) = load_plans(HERE / folder)
    return plan.grids[0]


@dataclass(frozen=True)
class Question:
    """A claim about runs made before any was registered.

    Args:
        text: the claim.
        equivalent: whether it says that nothing changes.
        runs: for each pre-training its folder, the row that should be better, and the row it is compared with.
    """

    text: str
    equivalent: bool
    runs: tuple[tuple[str, Row, Row], ...]


def compare_rows(
    text: str, folders: str, this: tuple[str, str], than: tuple[str, str], equivalent: bool = False
) -> Question:
    """Compare two rows in several folders."""
    return Question(text, equivalent, tuple((folder, Row(*this), Row(*than)) for folder in folders.split()))


LONG = "novels/ablation-long books/ablation-long dna/ablation-long"
PLAIN = ("GAU-α", "plain")
COSINE = compare_rows("", f"laws/ablation {LONG}", ("GAU-α", "C.S."), PLAIN).runs
BOTH = compare_rows("", f"laws/ablation {LONG}", ("GAU-α", "both"), ("GAU-α", "C.S.")).runs
SECOND = Row("CosScale 128", "C.S."), Row("CosScale 128", "both")
SHARE = "laws/share novels/share books/share"
QUESTIONS = (
    compare_rows(
        "InfoScale improves plain RoPE, without training",
        f"laws/ablation laws/why {LONG} demo",
        ("GAU-α", "I.S."),
        PLAIN,
    ),
    Question("CosScale (α = 128) improves plain RoPE", False, (*COSINE, ("laws/why", SECOND[0], Row(*PLAIN)))),
    Question("InfoScale improves CosScale (α = 128)", False, (*BOTH, ("laws/why", SECOND[1], SECOND[0]))),
    compare_rows("InfoScale improves CosScale (α = 16)", "demo", ("GAU-α", "both"), ("GAU-α", "C.S.")),
    compare_rows(
        "InfoScale changes nothing in a window", "laws/main", ("Windowed", "I.S."), ("Windowed", "plain"), True
    ),
    compare_rows("InfoScale improves ReRoPE", f"laws/main {LONG} demo", ("ReRoPE", "I.S."), ("ReRoPE", "plain")),
    compare_rows("The share law improves ReRoPE more than InfoScale", SHARE, ("ReRoPE", "β = 0.5"), ("ReRoPE", "I.S.")),
    compare_rows(
        "ReRoPE with the share law is as good as a window", SHARE, ("ReRoPE", "β = 0.5"), ("Windowed", "plain"), True
    ),
)
LENGTH, MARGIN = 4096, 0.01


def estimate(question: Question) -> tuple[Effect, int]:
    """Estimate a difference over pre-trainings, or documents where there is one alone; and count those of its sign."""
    runs = [load_grid(folder).differences(than, this, LENGTH, "acc") for folder, this, than in question.runs]
    arrays = [array for run in runs for array in run]
    means = np.array([array.mean() for array in arrays])
    alike = int((np.sign(means) == np.sign(means.mean())).sum())
    if len(arrays) == 1:
        return estimate_effect(arrays), alike
    error = float(means.std(ddof=1) / np.sqrt(len(means)))
    seeds, documents = sum(len(array) for array in arrays), sum(array.shape[1] for array in arrays)
    return Effect(float(means.mean()), error, len(means) - 1, len(means), seeds, documents, {}), alike


def render_questions() -> str:
    """Print what the runs so far say to each question: verdict, difference, interval, and what it rests on."""
    estimates = [estimate(question) for question in QUESTIONS]
    effects = [effect for effect, _ in estimates]
    equivalences = [question.equivalent for question in QUESTIONS]
    decisions = decide_claims(effects, [MARGIN] * len(effects), equivalences)
    lines = [
        "| question | verdict | ACC at 4096 | 95 % interval | pre-trainings | of this sign |",
        "|---|---|---|---|---|---|",
    ]
    for question, (effect, alike), decision in zip(QUESTIONS, estimates, decisions, strict=True):
        expected = EQUIVALENT if question.equivalent else SUPERIOR
        verdict = {expected: "holds", UNDECIDED: "undecided"}.get(decision.verdict, "does not hold")
        if effect.pretrainings == 1:
            verdict += ", one model"
        low, high = effect.interval()
        numbers = f"{effect.mean:+.3f} | {low:+.3f} to {high:+.3f} | {effect.pretrainings} | {alike}"
        lines.append(f"| {question.text} | **{verdict}** | {numbers} |")
    return "".join(f"{line}\n" for line in lines).replace("-0.", "−0.")


def render_beside_paper(metric: str, length: str, *sources: str) -> str:
    """Print a metric at a length, *paper / ours*, a line for each method of FOLDER:TABLE; our best in bold."""
    lines = [f"| {metric.upper()} at {length} | neither | CosScale | InfoScale | both |", "|---|---|---|---|---|"]
    for folder, table in (source.split(":") for source in sources):
        grid, published = load_grid(folder), load_published_tables()[f"table {table}"]
        for method in dict.fromkeys(row.method for row in grid.plan.rows):
            rows = [Row(method, variant) for variant in VARIANTS]
            values = [grid.value(row, int(length), metric) for row in rows]
            texts = ["" if value is None else format_number(value.mean, metric) for value in values]
            best = (max if metric == "acc" else min)((float(text) for text in texts if text), default=None)
            ours = [f"**{text}**" if text and float(text) == best else text for text in texts]
            paper = [published.values.get((row, int(length), metric)) for row in rows]
            theirs = ["–" if value is None else format_published(value, metric) for value in paper]
            cells = (f"{a} / {b}" for a, b in zip(theirs, ours, strict=True))
            lines.append(f"| {method} | {' | '.join(cells)} |")
    return "".join(f"{line}\n" for line in lines)


def render_claims(folder: str) -> str:
    """Print each claim of a plan with its verdict and the numbers that decide it."""
    lines = ["| claim | verdict | numbers |", "|---|---|---|"]
    for verdict in evaluate_claims(load_grid(folder)):
        lines.append(f"| {verdict['text']} | **{verdict['verdict']}** | {verdict['words']} |")
    return "".join(f"{line}\n" for line in lines)


def render_verdicts(folder: str) -> str:
    """Print the verdicts that a plan's claims.json has, which `check_tables` compares with its raw results."""
    lines = ["| claim, registered before the runs | verdict | at 4096 | 95 % interval |", "|---|---|---|---|"]
    for claim in json.loads((HERE / folder / "claims.json").read_text(encoding="utf-8")):
        (number,) = claim["numbers"]
        form = "{:+.3f}" if claim["metric"] == "acc" else "{:+.1f} %"
        values = [form.format(number[name]) for name in ("difference", "low", "high")]
        lines.append(f"| {claim['text']} | **{claim['verdict']}** | {values[0]} | {values[1]} to {values[2]} |")
    return "".join(f"{line}\n" for line in lines).replace("-0.", "−0.")


RENDERERS: dict[str, Callable[..., str]] = {
    "verdicts": render_verdicts,
    "questions": render_questions,
    "beside_paper": render_beside_paper,
    "claims": render_claims,
}

if __name__ == "__main__":
    main()
