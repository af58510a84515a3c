"""Training losses as an inline SVG in the page's colours."""

from __future__ import annotations

from math import ceil, floor, log10
from typing import Any

from isentrope.report.html.fragments import render

WIDTH, HEIGHT, LEFT, BOTTOM = 640, 260, 44, 30
MAX_POINTS = 240  # more would not be visible
# Paul Tol's "bright", readable on white and on near-black
COLOURS = ("#4477AA", "#EE6677", "#228833", "#CCBB44", "#66CCEE", "#AA3377", "#999999")
DASHES = ("", "6 3", "2 3")


def render_losses(logs: dict[str, list[dict[str, Any]]]) -> str:
    """Render loss against step for each log, with a legend; empty if no log has two rows."""
    points = {name: _thin_rows(rows) for name, rows in logs.items()}
    points = {name: pairs for name, pairs in points.items() if len(pairs) > 1}
    if not points:
        return ""
    step_ticks = _round_ticks(max(step for pairs in points.values() for step, _ in pairs))
    loss_ticks = _round_ticks(max(loss for pairs in points.values() for _, loss in pairs))
    scale = Scale(step_ticks[-1], loss_ticks[-1])
    curves = [
        {
            "name": name,
            "points": " ".join(f"{scale.x(step)},{scale.y(loss)}" for step, loss in pairs),
            "colour": COLOURS[index % len(COLOURS)],
            "dash": DASHES[index // len(COLOURS) % len(DASHES)],
        }
        for index, (name, pairs) in enumerate(points.items())
    ]
    losses = [{"at": scale.y(value), "text": f"{value:g}"} for value in loss_ticks]
    steps = [{"at": scale.x(value), "text": f"{value:g}"} for value in step_ticks]
    size = {"width": WIDTH, "height": HEIGHT, "left": LEFT}
    return render("chart.html", losses=losses, steps=steps, curves=curves, **size)


class Scale:
    """Maps steps and losses to coordinates of the SVG."""

    def __init__(self, steps: float, top: float) -> None:
        self.steps, self.top = steps or 1.0, top or 1.0

    def x(self, step: float) -> float:
        return round(LEFT + (WIDTH - LEFT) * step / self.steps, 1)

    def y(self, loss: float) -> float:
        return round(10 + (HEIGHT - BOTTOM - 10) * (1 - loss / self.top), 1)


def _thin_rows(rows: list[dict[str, Any]]) -> list[tuple[float, float]]:
    """Return about MAX_POINTS (step, loss) pairs, the last included."""
    points = [(float(row["step"]), float(row["loss"])) for row in rows if "step" in row and "loss" in row]
    points = [(step, loss) for step, loss in points if 0 <= loss < float("inf")]
    stride = max(1, ceil(len(points) / MAX_POINTS))
    return points[::stride] + (points[-1:] if (len(points) - 1) % stride else [])


def _round_ticks(maximum: float) -> list[float]:
    """Return round numbers from 0 to the first at or above the maximum."""
    if maximum <= 0:
        return [0.0, 1.0]
    power = 10 ** floor(log10(maximum / 4))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power * 5 >= maximum)
    return [step * i for i in range(ceil(maximum / step) + 1)]
