"""Training losses: one run, a few together, or many in two panels, with CosScale and without."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from isentrope.report.figures.style import COLOURS, DASHES, GREY, RC_PARAMS, save_figure
from isentrope.utils.files import read_fields

MAX_RUNS_PER_PANEL = 3  # with more, runs with CosScale have a panel of their own


def draw_losses(runs: list[Path], out: Path) -> list[Path]:
    """Draw the losses of training folders as `out` with the suffixes .png and .svg.

    One run: training and validation against steps. Two or three: in one panel against epochs, those with CosScale
    solid and the others dashed. More: those with CosScale on the left and the others on the right, against steps.
    """
    logs = [read_run(run) for run in runs]
    if not logs:
        raise ValueError("runs: expected one or more folders, got none")
    cosine, dot = ([log for log in logs if log["cosine"] is has] for has in (True, False))
    apart = len(logs) > MAX_RUNS_PER_PANEL and cosine and dot
    panels = [("with CosScale", cosine), ("without CosScale", dot)] if apart else [("", logs)]
    with matplotlib.rc_context(RC_PARAMS):
        figure = Figure(figsize=(5.2 * len(panels) + 2, 4.2), layout="constrained")
        row = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
        for axes, (title, panel) in zip(row, panels, strict=True):
            for log, colour in zip(panel, COLOURS[1:] * (1 + len(panel) // 9), strict=False):
                style = DASHES if not apart and len(logs) > 1 and not log["cosine"] else "solid"
                unit = "epoch" if 1 < len(logs) <= MAX_RUNS_PER_PANEL else "step"
                _draw_curve(axes, log, unit, color=colour, linestyle=style)
                if len(logs) == 1:
                    _draw_validation(axes, log, unit)
            axes.set_title(title)
            axes.legend(frameon=False)
        row[0].set_ylabel("loss, nats per predicted token")
        return save_figure(figure, out)


def read_run(run: Path) -> dict[str, Any]:
    """Read a training folder: the `label` of its curve, whether scores are `cosine`, and the `rows` of its log."""
    metadata, log = run / "train.json", run / "log.jsonl"
    if not metadata.is_file() or not log.is_file():
        raise ValueError(f"{run}: expected a folder that isentrope train wrote, with train.json and log.jsonl")
    config = read_fields(metadata, "train again in another folder", "config")["config"]
    # the last line of a running training may be incomplete
    lines = log.read_bytes().splitlines(keepends=True)
    rows = [_parse_row(log, number, line) for number, line in enumerate(lines, 1) if line.endswith(b"\n")]
    if not rows:
        raise ValueError(f"{log}: expected losses, got none yet")
    label = config["recipe"] + (f" + PoSE {config['pose']}" if config["pose"] else "")
    return {"label": label, "cosine": "cosine" in config["recipe"], "rows": rows}


def _parse_row(log: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{log}, line {number}: broken ({error}); delete that line and those after it") from None
    if not isinstance(row, dict) or not {"step", "epoch", "loss"} <= set(row):
        raise ValueError(f"{log}, line {number}: broken, without a loss; delete that line and those after it")
    return row


def _draw_curve(axes: Axes, log: dict[str, Any], unit: str, **style: Any) -> None:
    rows = log["rows"]
    x, y = [row[unit] for row in rows], [row["loss"] for row in rows]
    axes.plot(x, y, linewidth=1.6, label=log["label"], **style)
    axes.set_xlabel(unit)
    axes.set_ylim(bottom=0)
    axes.grid(axis="y", color="#EEEEEE")


def _draw_validation(axes: Axes, log: dict[str, Any], unit: str) -> None:
    rows = [row for row in log["rows"] if "validation" in row]
    axes.plot(
        [row[unit] for row in rows], [row["validation"] for row in rows],
        color=GREY, marker="o", markersize=4, linestyle=DASHES, linewidth=1, label="validation",
    )  # fmt: skip
    axes.set_ylim(bottom=0)
