"""Blocks of the pages about masked models, printed from their raw files: claims, the paper's tables beside ours."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from isentrope.evaluation.decisions import (
    EQUIVALENT,
    SUPERIOR,
    UNDECIDED,
    Effect,
    decide_claims,
    estimate_effect,
)
from isentrope.report.best_temperatures import (
    FittedModel,
    collect_best_temperatures,
    compute_residuals,
    read_calibrated,
)
from isentrope.report.claims import evaluate_claims
from isentrope.report.figures.study import collect_gains, rank_correlation
from isentrope.report.load import Grid, Row, load_plans
from isentrope.report.peaks import decide_peaks, load_peaks
from isentrope.report.registered_claims import DEFAULT_MARGIN
from isentrope.report.tables.numbers import format_number
from isentrope.report.tables.published import format_published, load_published_tables

HERE = Path(__file__).parent
ARCHIVE = "archive"
VARIANTS = ("plain", "C.S.", "I.S.", "both")


@cache  # blocks ask for the same grids
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


STATUTES = f"{ARCHIVE}/statutes"
LONG = " ".join(f"{ARCHIVE}/{name}/ablation-long" for name in ("novels", "books", "dna"))
PLAIN = ("GAU-α", "plain")
COSINE = compare_rows("", f"{STATUTES}/ablation {LONG}", ("GAU-α", "C.S."), PLAIN).runs
BOTH = compare_rows("", f"{STATUTES}/ablation {LONG}", ("GAU-α", "both"), ("GAU-α", "C.S.")).runs
SECOND = Row("CosScale 128", "C.S."), Row("CosScale 128", "both")
SHARE = "share/gau/statutes share/gau/novels share/gau/books"
QUESTIONS = (
    compare_rows(
        "InfoScale improves plain RoPE, without training",
        f"{STATUTES}/ablation {STATUTES}/why {LONG} demo",
        ("GAU-α", "I.S."),
        PLAIN,
    ),
    Question("CosScale (α = 128) improves plain RoPE", False, (*COSINE, (f"{STATUTES}/why", SECOND[0], Row(*PLAIN)))),
    Question("InfoScale improves CosScale (α = 128)", False, (*BOTH, (f"{STATUTES}/why", SECOND[1], SECOND[0]))),
    compare_rows("InfoScale improves CosScale (α = 16)", "demo", ("GAU-α", "both"), ("GAU-α", "C.S.")),
    compare_rows(
        "InfoScale changes nothing in a window", f"{STATUTES}/main", ("Windowed", "I.S."), ("Windowed", "plain"), True
    ),
    compare_rows("InfoScale improves ReRoPE", f"{STATUTES}/main {LONG} demo", ("ReRoPE", "I.S."), ("ReRoPE", "plain")),
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


def render_verdicts(folder: str, wanted: str = "") -> str:
    """Print the verdicts that a plan's claims.json has, which `check_tables` compares with its raw results.

    Args:
        folder: Of the plan's results.
        wanted: The verdict of the claims to print; all by default.
    """
    lines = ["| claim, registered before the runs | verdict | at 4096 | 95 % interval |", "|---|---|---|---|"]
    for claim in json.loads((HERE / folder / "claims.json").read_text(encoding="utf-8")):
        if wanted not in ("", claim["verdict"]):
            continue
        (number,) = claim["numbers"]
        form = "{:+.3f}" if claim["metric"] == "acc" else "{:+.1f} %"
        values = [form.format(number[name]) for name in ("difference", "low", "high")]
        lines.append(f"| {claim['text']} | **{claim['verdict']}** | {values[0]} | {values[1]} to {values[2]} |")
    return "".join(f"{line}\n" for line in lines).replace("-0.", "−0.")


TEXTS = {"statutes": "study"} | {name: f"other-texts/{name}" for name in ("novels", "code", "books")}
TEXT_ROWS = {
    "plain RoPE": ("RoPE", "none"), "plain RoPE + InfoScale": ("RoPE", "InfoScale"), "ReRoPE": ("ReRoPE", "none"),
    "ReRoPE + InfoScale": ("ReRoPE", "InfoScale"), "ReRoPE + Power": ("ReRoPE", "Power"),
    "ReRoPE + share": ("ReRoPE", "share"), "SelfExtend": ("SelfExtend", "none"),
    "SelfExtend + share": ("SelfExtend", "share"), "windowed": ("Windowed", "none"),
}  # fmt: skip


def render_other_texts() -> str:
    """Print each claim registered for other texts with its difference, interval and verdict on each, if measured."""
    claims = {
        text: {
            claim["text"]: claim for claim in json.loads((HERE / folder / "claims.json").read_text(encoding="utf-8"))
        }
        for text, folder in TEXTS.items()
    }
    grids = {text: load_grid(folder) for text, folder in TEXTS.items()}
    lines = [f"| ACC at {LENGTH} | {' | '.join(claims)} | pre-trainings that agree |", "|---" * (len(claims) + 2) + "|"]
    for claim in grids["code"].plan.metadata["claims"]:
        name = claim["text"]
        cells = [_format_claim(claims[text].get(name), claim, grid) for text, grid in grids.items()]
        lines.append(f"| {name} | {' | '.join(cells)} | {_count_agreeing(claim, list(grids.values()))} |")
    return "".join(f"{line}\n" for line in lines).replace("-0.", "−0.")


def _format_claim(claim: dict[str, Any] | None, registered: dict[str, Any], grid: Grid) -> str:
    """Format a claim as one corpus has it, where it was registered and measured there."""
    if claim is None:
        return "not registered"
    if not claim["numbers"]:
        return "one pre-training" if len(_list_differences(registered, grid)) == 1 else "–"
    (number,) = claim["numbers"]
    fewer = "" if claim["seeds"] == len(grid.seeds) else f", {claim['seeds']} pre-trainings"
    interval = f"{number['difference']:+.3f} ({number['low']:+.3f} to {number['high']:+.3f})"
    return f"{interval}, **{claim['verdict']}**{fewer}"


def _count_agreeing(claim: dict[str, Any], grids: list[Grid]) -> str:
    """Count the pre-trainings of all texts whose own difference is what a claim says: above zero, or within ± 0.01."""
    differences = [difference for grid in grids for difference in _list_differences(claim, grid)]
    agree = [abs(x) <= DEFAULT_MARGIN if claim["kind"] == "equivalent" else x > 0 for x in differences]
    return f"{sum(agree)} of {len(agree)}"


def _list_differences(claim: dict[str, Any], grid: Grid) -> list[float]:
    """List the difference of each pre-training that has both rows of a claim."""
    this, than = (Row(claim[name]["method"], claim[name]["variant"]) for name in ("this", "than"))
    better, worse = (grid.cells_by_seed.get((row, LENGTH), {}) for row in (this, than))
    return [better[seed]["acc"] - worse[seed]["acc"] for seed in better.keys() & worse.keys()]


def render_accuracy_by_text() -> str:
    """Print accuracies inside, at 128 tokens, and at 64 times the training length, on each corpus."""
    lines = ["| ACC, 128 → 4096 tokens | " + " | ".join(TEXTS) + " |", "|---" * (len(TEXTS) + 1) + "|"]
    grids = [load_grid(folder) for folder in TEXTS.values()]
    for name, row in TEXT_ROWS.items():
        values = [[grid.value(Row(*row), length, "acc") for length in (128, LENGTH)] for grid in grids]
        cells = (" → ".join("–" if x is None else format_number(x.mean, "acc") for x in pair) for pair in values)
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "".join(f"{line}\n" for line in lines)


def render_components(folder: str) -> str:
    """Print the standard deviations of each claim's difference over what varied, of accuracy."""
    lines = [
        "| claim | pre-trainings | documents | the rest | seeds | documents measured |",
        "|---|---|---|---|---|---|",
    ]
    for claim in json.loads((HERE / folder / "claims.json").read_text(encoding="utf-8")):
        if claim["metric"] == "acc":
            parts = claim["numbers"][0]["components"]
            numbers = " | ".join(f"{parts[name]:.3f}" for name in ("pre-training", "document", "rest"))
            lines.append(f"| {claim['text']} | {numbers} | {claim['seeds']} | {claim['documents']} |")
    return "".join(f"{line}\n" for line in lines)


def render_gain(folder: str) -> str:
    """Print how InfoScale's gain goes with the rise of entropy without it, over methods and pre-trainings."""
    points = collect_gains(load_grid(folder))
    lines = ["| | Spearman | rows |", "|---|---|---|"]
    lines.append(
        f"| gain of InfoScale and rise of entropy without it | {rank_correlation(points):.2f} | {len(points)} |"
    )
    return "".join(f"{line}\n" for line in lines)


def render_runs(*folders: str) -> str:
    """Print where, when and from which commit each plan below some folders was run."""
    lines = ["| run | seeds | commit | hardware | PyTorch | date |", "|---|---|---|---|---|---|"]
    for plan in sorted(path for folder in folders for path in (HERE / folder).rglob("plan.json")):
        data = json.loads(plan.read_text(encoding="utf-8"))
        name, seeds = plan.parent.relative_to(HERE), ", ".join(map(str, data["seeds"]))
        run = {
            key: " ".join(dict.fromkeys(str(r[key]) for r in data.get("runs") or [data["run"]])) for key in data["run"]
        }
        link = f"[{name}]({name.relative_to(folders[0]) if len(folders) == 1 else name}/table.md)"
        lines.append(f"| {link} | {seeds} | {run['commit']} | {run['hardware']} | {run['torch']} | {run['date']} |")
    return "".join(f"{line}\n" for line in lines)


LONG_LENGTHS = (128, 1024, 4096, 8192, 16384)
LONG_ROWS = {
    "plain RoPE": PLAIN, "+ InfoScale": ("GAU-α", "I.S."), "ReRoPE": ("ReRoPE", "plain"),
    "ReRoPE + InfoScale": ("ReRoPE", "I.S."), "CosScale 128": ("GAU-α", "C.S."),
    "CosScale 128 + InfoScale": ("GAU-α", "both"), "windowed": ("Windowed", "plain"),
}  # fmt: skip


def render_long() -> str:
    """Print accuracies on novels · books · DNA, to 256 times the training length."""
    grids = [load_grid(folder) for folder in LONG.split()]
    lines = ["| ACC | " + " | ".join(map(str, LONG_LENGTHS)) + " |", "|---" * (len(LONG_LENGTHS) + 1) + "|"]
    for name, row in LONG_ROWS.items():
        cells = []
        for length in LONG_LENGTHS:
            values = (grid.value(Row(*row), length, "acc") for grid in grids)
            cells.append(" · ".join("–" if x is None else format_number(x.mean, "acc") for x in values))
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "".join(f"{line}\n" for line in lines)


def load_fitted_models() -> list[FittedModel]:
    """Load every fitted temperature of which the raw file is here, one for all heads and keys."""
    beyond = collect_best_temperatures(load_grid(f"{STATUTES}/beyond"))
    read = {
        "llama, ReRoPE": "llama/calibrate-rerope", "llama, SelfExtend": "llama/calibrate-selfextend",
        "stories15M": "stories15M/calibrate", "SmolLM2": "smollm2/calibrate",
    }  # fmt: skip
    fits = {name: read_calibrated(HERE / folder / "calibrate.json") for name, folder in read.items()}
    return [
        FittedModel("GAU-α, statutes", 64, 128, {"RoPE": beyond["GAU-α"], "ReRoPE": beyond["ReRoPE"]}),
        FittedModel(
            "the Llama that ships", 256, 64, {"ReRoPE": fits["llama, ReRoPE"], "SelfExtend": fits["llama, SelfExtend"]}
        ),
        FittedModel("stories15M", 256, 48, {"SelfExtend": fits["stories15M"]}),
        FittedModel("SmolLM2-135M", 8192, 64, {"SelfExtend": fits["SmolLM2"]}),
    ]


def render_temperatures() -> str:
    """Print what each law leaves of ln τ*, by model and over all points."""
    models = load_fitted_models()
    residuals, names = compute_residuals(models), [*(model.name for model in models), "all"]
    counts = [sum(map(len, model.fits.values())) for model in models]
    points = " | ".join(map(str, (*counts, sum(counts))))
    lines = ["| RMS of ln τ* − ln τ | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    best = {name: min(row[name] for row in residuals.values()) for name in names}
    for law, row in residuals.items():
        cells = (f"**{row[name]:.3f}**" if row[name] == best[name] else f"{row[name]:.3f}" for name in names)
        lines.append(f"| {law} | {' | '.join(cells)} |")
    return "".join(f"{line}\n" for line in (*lines, f"| points | {points} |"))


def render_peaks(path: str) -> str:
    """Print the paper's theorem 1 with its verdicts, and each peak that decides them."""
    peaks = load_peaks(HERE / path)
    lines = ["| claim | verdict | what decides it |", "|---|---|---|"]
    lines += [f"| {x['text']} | **{x['verdict']}** | {x['words']} |" for x in decide_peaks(peaks)]
    heads = " | ".join(f"{peak.alpha:g}" for peak in peaks)
    lines += ["", f"| peak of cos θ before RoPE, α = | {heads} |", "|---" * (len(peaks) + 1) + "|"]
    for name, field in (("Eq. 18", "theory"), ("weighted by the softmax", "attended"), ("all pairs alike", "pairs")):
        lines.append(f"| {name} | " + " | ".join(f"{getattr(peak, field):.2f}" for peak in peaks) + " |")
    return "".join(f"{line}\n" for line in lines)
