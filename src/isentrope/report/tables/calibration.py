"""A calibration as a table for a terminal and as rows of a model card."""

from __future__ import annotations

from itertools import pairwise
from math import inf
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from isentrope.evaluation.results import read_results
from isentrope.report.tables.numbers import format_length, format_perplexity
from isentrope.report.tables.perplexity import style_perplexity
from isentrope.report.tables.style import TABLE_STYLE
from isentrope.utils.files import RERUN_REMEDY

MAX_RISE = 1.5  # of perplexity, past the training length over inside
CANDIDATE_LABELS = {
    "none": "none",
    "infoscale": "InfoScale",
    "logn": "LogN",
    "power": "Power",
    "closed": "closed law",
    "given": "law given",
    "scalar": "fitted, one for all",
    "layer": "fitted, per layer",
    "head": "fitted, per head",
    "near": "fitted, near keys too",
}


def read_calibration(results: Path) -> dict[str, Any]:
    """Read `calibrate.json`; passkeys of versions that counted them alone are left out."""
    data = read_results(results, RERUN_REMEDY, "candidates", "model", "recipe", "chosen")
    return data if "laws" in (data.get("passkeys") or {}) else data | {"passkeys": None}


def build_calibration_table(results: Path) -> Table:
    """Build a table of `calibrate.json`: a row for each candidate, a column for each bucket of positions."""
    data = read_calibration(results)
    rows, reference = data["candidates"], get_reference(data)
    interval = rows[0]["low"] is not None
    table = Table(
        title=f"Held-out perplexity: {data['model']['name']}, {count_held_out(data)} texts, {escape(data['recipe'])}",
        caption=(
            f"beyond: past {data['train_length']} tokens, buckets weighted equally.\n"
            f"%: change against {CANDIDATE_LABELS[reference]}"
            + (", with a 95 % interval over paired draws of the texts.\n" if interval else ".\n")
            + _describe_passkeys(data)
            + _describe_stops(data)
            + f"→ {escape(data['reason'])}"
            + _warn_of_lost_answers(data)
            + _warn_of_new_distances(data)
        ),
        **TABLE_STYLE,
    )
    table.add_column("", no_wrap=True)
    table.add_column("law", no_wrap=True)
    for name in (*bucket_labels(data), "beyond"):
        table.add_column(name, justify="right")
    table.add_column("% (95 %)", justify="right", no_wrap=True)
    if has_passkeys(data):
        table.add_column("passkeys", justify="right", no_wrap=True)
    best = [min(values) for values in zip(*(row["perplexity"] for row in rows), strict=True)]
    for row in rows:
        pairs = list(zip(row["perplexity"], best, strict=True))
        table.add_row(
            "→" if row["name"] == data["chosen"] else "",
            CANDIDATE_LABELS[row["name"]] + (" *" if row["name"] in count_stopped(data) else ""),
            format_perplexity(pairs[0][0]),  # the same for all candidates
            *(style_perplexity(x, bold=x == lowest) for x, lowest in pairs[1:]),
            "" if row["name"] == reference else _format_change(row["against"][reference]),
            *([_format_passkeys(row["retrieval"])] if has_passkeys(data) else []),
        )
    return table


def build_card_rows(results: Path) -> list[dict[str, Any]]:
    """Build rows of a model card: held-out perplexity of each candidate past the training length."""
    data = read_calibration(results)
    column, reference = f"held-out perplexity past {format_length(data['train_length'])} tokens", get_reference(data)
    return [
        {
            "law": _label_in_card(data, row["name"]),
            column: f"{row['perplexity'][-1]:.4g}",
            f"against {CANDIDATE_LABELS[reference]}": f"{row['against'][reference]['percent'][-1]:+.2f} %",
        }
        | ({"passkeys": _format_passkeys(row["retrieval"])} if has_passkeys(data) else {})
        for row in data["candidates"]
    ]


def get_reference(data: dict[str, Any]) -> str:
    """Return the candidate that others are compared with: the closed law, InfoScale where there is none."""
    return "closed" if any(row["name"] == "closed" for row in data["candidates"]) else "infoscale"


def count_stopped(data: dict[str, Any]) -> dict[str, int]:
    """Return the fitted laws that the budget stopped, each with the evaluations that it had."""
    fits = {row["name"]: data["fits"].get(row["name"]) for row in data["candidates"]}
    return {name: len(fit["losses"]) for name, fit in fits.items() if fit is not None and fit["ended"] == "budget"}


def has_passkeys(data: dict[str, Any]) -> bool:
    return data.get("retrieval_weight") is not None


def _warn_of_lost_answers(data: dict[str, Any]) -> str:
    """Say what a law fitted to the loss alone finds, or that it may find less, where passkeys were not put to it."""
    chosen = data["chosen"]
    if chosen not in data["fits"] or has_passkeys(data):
        return ""
    advice = "--with-retrieval judges by these as well."
    if (passkeys := data.get("passkeys")) is not None:
        labels = [CANDIDATE_LABELS[name] if name != chosen else "law selected" for name in passkeys["laws"]]
        scores = [_format_passkeys(score) for score in passkeys["laws"].values()]
        pairs = "; ".join(f"{label} {score}" for label, score in zip(labels, scores, strict=True))
        text = f"Passkeys found in held-out texts, and -ln p for a token: {pairs}. {passkeys['warning'] or advice}"
    elif any(row["name"] == "closed" for row in data["candidates"]):
        text = f"It may find fewer answers far back; {advice}"
    else:
        return ""
    return f"\nFitted to the loss alone. {text}"


def _warn_of_new_distances(data: dict[str, Any]) -> str:
    """Say where distances are new to a model that a temperature alone does not help."""
    chosen = next(row for row in data["candidates"] if row["name"] == data["chosen"])
    inside, last = chosen["perplexity"][0], chosen["perplexity"][-2]
    rise = inf if last is None else last / inside
    if get_reference(data) == "closed" or rise < MAX_RISE:
        return ""
    return (
        f"\nStill {rise:.3g} times the perplexity inside: a temperature does not repair distances that are "
        f"new to a model; fit --recipe rerope:window={data['train_length'] // 2} instead."
    )


def _describe_stops(data: dict[str, Any]) -> str:
    stopped = [f"{CANDIDATE_LABELS[name]}: {count}" for name, count in count_stopped(data).items()]
    return f"*: the budget stopped it, evaluations so far: {'; '.join(stopped)}.\n" if stopped else ""


def _label_in_card(data: dict[str, Any], name: str) -> str:
    label = CANDIDATE_LABELS[name]
    if (count := count_stopped(data).get(name)) is not None:
        label += f", stopped by the budget after {count} evaluation{'s' * (count > 1)}"
    return label + (" (saved)" if name == data["chosen"] else "")


def _describe_passkeys(data: dict[str, Any]) -> str:
    if not has_passkeys(data):
        return ""
    weight = f"{data['retrieval_weight']:g}"
    return f"passkeys: found, and -ln p for a token of the answer, which counts {weight} of a token's loss.\n"


def _format_passkeys(score: dict[str, Any]) -> str:
    return f"{score['hits']} of {score['count']}, {score['loss']:.3f}"


def _format_change(change: dict[str, Any]) -> str:
    """Format a change in per cent with its interval, where the texts carry one."""
    low, high = change["low"], change["high"]
    interval = "—" if low is None else f"{low[-1]:+.2f} … {high[-1]:+.2f}"
    return f"{change['percent'][-1]:+.2f} ({interval})"


def bucket_labels(data: dict[str, Any]) -> list[str]:
    return [f"{format_length(a)}–{format_length(b)}" for a, b in pairwise((0, *data["knots"]))]


def count_held_out(data: dict[str, Any]) -> int:
    return sum(text["part"] == "held-out" for text in data["texts"])
