"""Training losses as an inline SVG in the page's colours."""

from __future__ import annotations

from html import escape
from math import ceil, floor, log10
from typing import Any

WIDTH, HEIGHT, LEFT, BOTTOM = 640, 260, 44, 30
MAX_POINTS = 240  # more would not be visible
# Paul Tol's "bright", readable on white and on near-black
COLOURS = ("#4477AA", "#EE6677", "#228833", "#CCBB44", "#66CCEE", "#AA3377", "#999999")
DASHES = ("", "6 3", "2 3")


def render_losses(logs: dict[str, list[dict[str, Any]]]) -> str:
    """Render loss against step for each log, with a legend; empty if no log has two rows."""
    curves = {name: _thin_rows(rows) for name, rows in logs.items()}
    curves = {name: points for name, points in curves.items() if len(points) > 1}
    if not curves:
        return ""
    step_ticks = _round_ticks(max(step for points in curves.values() for step, _ in points))
    loss_ticks = _round_ticks(max(loss for points in curves.values() for _, loss in points))
    scale = Scale(step_ticks[-1], loss_ticks[-1])
    parts = [f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="Training loss against step">']
    for value in loss_ticks:
        y = scale.y(value)
        parts.append(f'<line class="rule" x1="{LEFT}" x2="{WIDTH}" y1="{y}" y2="{y}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4}" text-anchor="end">{value:g}</text>')
    for value in step_ticks:
        anchor = "end" if value == step_ticks[-1] else "middle"
        parts.append(f'<text x="{scale.x(value)}" y="{HEIGHT - 10}" text-anchor="{anchor}">{value:g}</text>')
    legend = []
    for index, (name, points) in enumerate(curves.items()):
        colour = COLOURS[index % len(COLOURS)]
        dash = DASHES[index // len(COLOURS) % len(DASHES)]
        path = " ".join(f"{scale.x(step)},{scale.y(loss)}" for step, loss in points)
        stroke = f'stroke="{colour}" stroke-dasharray="{dash}"'
        parts.append(f'<polyline class="curve" points="{path}" {stroke}><title>{escape(name)}</title></polyline>')
        key = f'<svg viewBox="0 0 24 8" aria-hidden="true"><line x1="0" x2="24" y1="4" y2="4" {stroke}/></svg>'
        legend.append(f"<li>{key}{escape(name)}</li>")
    return f'{"".join(parts)}</svg><ul class="legend">{"".join(legend)}</ul>'


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
