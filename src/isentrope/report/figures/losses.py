"""Training losses as a figure: one run, a few together, or many in two panels, with CosScale and without."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from isentrope.report.figures.laws import COLOURS, DASHES, GREY, RC, save
from isentrope.utils.files import read_fields

TOGETHER = 3  # runs that one panel shows; beyond, runs with CosScale get a panel of their own


def losses(runs: list[Path], out: Path) -> list[Path]:
    """The losses of these training folders, drawn as `out` with the suffixes .png and .svg.

    One run: training and validation against steps. Two or three: together, CosScale's solid and the others dashed,
    against epochs. More: CosScale's on the left and the others on the right, against steps.
    """
    found = [_read(run) for run in runs]
    if not found:
        raise ValueError("runs: expected one or more folders, got none")
    cosine, dot = ([run for run in found if run["cosine"] is has] for has in (True, False))
    apart = len(found) > TOGETHER and cosine and dot
    panels = [("with CosScale", cosine), ("without CosScale", dot)] if apart else [("", found)]
    with matplotlib.rc_context(RC):
        figure = Figure(figsize=(5.2 * len(panels) + 2, 4.2), layout="constrained")
        row = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
        for axes, (title, shown) in zip(row, panels, strict=True):
            for run, colour in zip(shown, COLOURS[1:] * (1 + len(shown) // 9), strict=False):
                dashed = DASHES if not apart and len(found) > 1 and not run["cosine"] else "solid"
                _curve(axes, run, "epoch" if 1 < len(found) <= TOGETHER else "step", colour, dashed, len(found) == 1)
            axes.set_title(title)
            axes.legend(frameon=False)
        row[0].set_ylabel("loss, nats a predicted token")
        return [save(figure, out.with_name(out.name + suffix)) for suffix in (".png", ".svg")]


def _read(run: Path) -> dict[str, Any]:
    told, log = run / "train.json", run / "log.jsonl"
    if not told.is_file() or not log.is_file():
        raise ValueError(f"{run}: expected a folder that isentrope train wrote, with train.json and log.jsonl")
    config = read_fields(told, "train again in another folder", "config")["config"]
    # the last line of a run that is being written may be half of one
    lines = log.read_bytes().splitlines(keepends=True)
    rows = [_row(log, number, line) for number, line in enumerate(lines, 1) if line.endswith(b"\n")]
    if not rows:
        raise ValueError(f"{log}: expected losses, got none yet")
    label = config["recipe"] + (f" + PoSE {config['pose']}" if config["pose"] else "")
    return {"label": label, "cosine": "cosine" in config["recipe"], "rows": rows}


def _row(log: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{log}, line {number}: broken ({error}); delete that line and those after it") from None
    if not isinstance(row, dict) or not {"step", "epoch", "loss"} <= set(row):
        raise ValueError(f"{log}, line {number}: broken, without a loss; delete that line and those after it")
    return row


def _curve(axes: Axes, run: dict[str, Any], against: str, colour: str, dashed: Any, alone: bool) -> None:
    rows = run["rows"]
    x, y = [row[against] for row in rows], [row["loss"] for row in rows]
    axes.plot(x, y, color=colour, linestyle=dashed, linewidth=1.6, label=run["label"])
    if alone:
        checked = [row for row in rows if "validation" in row]
        axes.plot(
            [row[against] for row in checked], [row["validation"] for row in checked],
            color=GREY, marker="o", markersize=4, linestyle=DASHES, linewidth=1, label="validation",
        )  # fmt: skip
    axes.set_xlabel(against)
    axes.set_ylim(bottom=0)
    axes.grid(axis="y", color="#EEEEEE")
