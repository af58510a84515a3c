"""Write a card for every part of the recipe language: python docs/methods/make.py

A card has the part's formula and options from its class, a picture drawn from the library's own maps, what
`docs/results/frontier` measured, and the text of `texts.yaml`. Nothing on a card but that text is written by hand.
"""

from __future__ import annotations

import inspect
import json
import re
from functools import partial
from html import escape
from math import isfinite
from pathlib import Path
from typing import Any

import torch
import yaml

from isentrope.functional import attention
from isentrope.masks import Mask
from isentrope.parts import Part
from isentrope.positions.branch import Position
from isentrope.positions.rope import RoPE
from isentrope.recipe import Recipe
from isentrope.recipe.catalog import PartDescription, describe_part
from isentrope.recipe.kinds import KINDS
from isentrope.share import Share
from isentrope.temperatures.laws import Temperature

HERE = Path(__file__).parent
FRONTIER = HERE.parent / "results" / "frontier"
# rows of the pictures: a text four times as long as the training length
LENGTH, TRAINED, HEAD_DIM = 48, 12, 64
CELL, MARGIN = 5, 26
NEAR_COLOURS = ("#e8f1fa", "#0b3c6f")  # of distances 0 … n_tr - 1
UNTRAINED = ("#fde0c5", "#d1351b")  # of distances that no training had
LINE_COLOURS = ("#4477aa", "#228833", "#aa3377", "#ccbb44")
KIND_TITLES = {
    "position": "Positions", "temperature": "Temperatures", "score": "Scores", "mask": "Masks", "share": "Share",
    "retrieve": "Retrieve",
}  # fmt: skip


def main() -> None:
    """Write every card, picture and the index."""
    for name, content in build_files().items():
        (HERE / name).write_text(content, encoding="utf-8")


def build_files() -> dict[str, str]:
    """Return the content of every generated file by its name."""
    texts = yaml.safe_load((HERE / "texts.yaml").read_text("utf-8"))
    rows = read_measurements(FRONTIER)
    files: dict[str, str] = {}
    index = []
    for kind, parts in KINDS.items():
        index.append(f"\n## {KIND_TITLES[kind]}\n\n| part | formula | when |\n|---|---|---|\n")
        for part in parts:
            name, text = part.name(), texts[part.name()]
            picture = draw_picture(kind, text)
            if picture:
                files[f"{name}.svg"] = picture[0]
            caption = f"![{picture[1]}]({name}.svg)\n\n{picture[1]}\n\n" if picture else ""
            files[f"{name}.md"] = render_card(kind, part, text, caption, rows)
            index.append(f"| [`{name}`]({name}.md) | {escape_cell(summary(part))} | {escape_cell(text['use'])} |\n")
    head = (
        "# Methods\n\nEvery part of a recipe, on a card of its own. A recipe joins at most one of each kind with `+`; "
        "temperatures for near and for far keys may be two.\n"
    )
    files["index.md"] = head + "".join(index)
    return files


# --- cards ------------------------------------------------------------------------------------------------------------


def summary(part: type[Part]) -> str:
    """Return the first sentence of a part's docstring: its formula and source."""
    return " ".join((inspect.getdoc(part) or "").partition("\n\n")[0].split())


def render_card(kind: str, part: type[Part], text: dict[str, Any], picture: str, rows: list[dict[str, Any]]) -> str:
    """Render the card of one part."""
    lead, _, details = (inspect.getdoc(part) or "").partition("\n\n")
    details = details.partition("Attributes:")[0].strip()
    needs = "It breaks a model that was not trained with it.\n\n" if part.needs_training else ""
    return (
        f"# {part.__name__}\n\n{text['about'].strip()}\n\n> {escape_prose(' '.join(lead.split()))}\n\n"
        + (f"{escape_prose(details)}\n\n" if details else "")
        + picture
        + f"**Use it** {text['use'].strip()}\n\n**Avoid it** {text['avoid'].strip()}\n\n{needs}"
        + f"**Source** {text['source'].strip()}\n\n## Recipe\n\n    {text['recipe']}\n\n"
        + render_options(describe_part(kind, part))
        + render_measurements(part.name(), rows)
        + f"Kind: {kind}. [All methods](index.md)\n"
    )


def render_options(part: PartDescription) -> str:
    """Render a table of options, their defaults and meanings."""
    lines = []
    for option in part.options:
        value = "required" if option.required else f"`{format_default(option.default)}`"
        lines.append(f"| `{option.name}` | {value} | {escape_cell(option.meaning)} |\n")
    if not lines:
        return "It has no options.\n\n"
    return (
        "## Options\n\nOptions that are open follow from the model, the text or each other.\n\n"
        "| option | default | |\n|---|---|---|\n" + "".join(lines) + "\n"
    )


def format_default(value: Any) -> str:
    return "open" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def read_measurements(folder: Path) -> list[dict[str, Any]]:
    """Return every measured recipe of every comparison: model, length, recipe, ratio, answers."""
    rows = []
    for path in sorted(folder.glob("*/leaderboard.json")):
        board = json.loads(path.read_text("utf-8"))
        for row in board["rows"]:
            names = {re.split("[:&|]", part)[0] for part in row["recipe"].split("+")}
            if row["ratio"] is None and row["retrieved"] is None:
                continue
            rows.append(row | {"names": names, "board": path.parent.name, "title": board["title"]})
    return rows


def render_measurements(name: str, rows: list[dict[str, Any]]) -> str:
    """Render what was measured of a part: perplexity past the training length, and answers."""
    own = [row for row in rows if name in row["names"]]
    if not own:
        return (
            "## Measured\n\nNot part of the [comparison of training-free methods](../results/frontier/README.md).\n\n"
        )
    tables = []
    for title in dict.fromkeys(row["title"] for row in own):
        shown = [row for row in rows if row["title"] == title and (row in own or is_baseline(row))]
        lines = [
            f"| `{row['recipe']}` | {'–' if row['ratio'] is None else format(row['ratio'], '.3g')} | "
            f"{format_answers(row['retrieved'])} |\n"
            for row in shown
        ]
        tables.append(f"{title}:\n\n| recipe | ratio | answers |\n|---|---|---|\n" + "".join(lines) + "\n")
    return (
        "## Measured\n\nFrom the [comparison of training-free methods](../results/frontier/README.md), beside the "
        "plain model and YaRN where they were measured. Ratio: perplexity in the last bucket over the plain model's "
        "inside its training length, below 1 is better. Answers: passkeys found, or of RULER's tasks. Few texts: "
        "directions, no sizes.\n\n" + "".join(tables)
    )


def is_baseline(row: dict[str, Any]) -> bool:
    """Return whether a recipe is shown beside all others."""
    return row["recipe"] == "plain" or row["names"] == {"yarn", "yarntemperature"}


def format_answers(answers: dict[str, Any] | None) -> str:
    return "–" if answers is None else f"{answers['hits']:.3g} of {answers['count']}"


def escape_cell(text: str) -> str:
    return escape_prose(text).replace("|", "\\|").replace("\n", " ").strip()


def escape_prose(text: str) -> str:
    """Keep characters of formulas from being read as markup, outside of code; exponents in braces are raised."""

    def replace(match: re.Match[str]) -> str:
        code, exponent, less = match.group("code", "exponent", "less")
        if exponent:
            return f"<sup>{exponent}</sup>"
        return code or ("&lt;" if less else f"\\{match[0]}")

    return re.sub(r"(?P<code>`[^`]*`)|\^\{(?P<exponent>[^{}]*)\}|(?P<less><)|[*_]", replace, text)


# --- pictures ---------------------------------------------------------------------------------------------------------


def draw_picture(kind: str, text: dict[str, Any]) -> tuple[str, str] | None:
    """Return the SVG of a part and its caption; None where there is nothing to see."""
    if text.get("picture") is None:
        return None
    recipe = Recipe.parse(text["picture"], train_length=TRAINED, heads=4, dim=HEAD_DIM)
    part: Any = getattr(recipe, kind)
    if isinstance(part, tuple):
        (part,) = part
    if isinstance(part, Position):
        part = part.resolve(TRAINED)
    if isinstance(part, Position) and part.rotates and not has_own_map(part) and (ratio := one_ratio(part)) is None:
        curves = frequency_curves(part)
        return draw_curves(curves, "true distance", "distance as the pair turns"), (
            f"What a distance is to the fastest, a middle and the slowest pair of `{text['picture']}`, "
            f"head size {HEAD_DIM}, training length {TRAINED}."
        )
    if isinstance(part, Position) and part.rotates and not has_own_map(part):
        return draw_grid(lambda i, j: (i - j) * (ratio or 1.0) if j <= i else None), grid_caption(text["picture"])
    if isinstance(part, Position) and part.rotates:
        distances = compute_distances(part)
        return draw_grid(lambda i, j: distances[i][j]), grid_caption(text["picture"])
    if isinstance(part, Position):
        return (
            draw_grid(partial(bias, part), bias_colour),
            f"The bias of each pair under `{text['picture']}`, in the first head; darker is lower. "
            "Rows are queries, columns keys.",
        )
    if isinstance(part, Temperature):
        lengths = [2**e for e in range(4, 18)]
        values = part.scale(torch.tensor([[lengths]], dtype=torch.float64), HEAD_DIM).reshape(-1, len(lengths))[0]
        points = [(float(e), value) for e, value in zip(range(4, 18), values.tolist(), strict=True)]
        return draw_curves(
            {text["picture"]: points}, "log2 of n", "τ"
        ), f"τ against n, 16 to 131072 keys, head size {HEAD_DIM}: `{text['picture']}`."
    if isinstance(part, Share):
        curves = {f"β = {b:g}": share_points(b) for b in (0.25, 0.5, 1.0)}
        return draw_curves(
            curves, "n_far / n_ref", "added to far logits"
        ), "The bias of far logits against the number of far keys."
    seen = visible_pairs(recipe) if not isinstance(part, Mask) else None
    causal = part.region(True) if isinstance(part, Mask) else None

    def visible(i: int, j: int) -> float | None:
        if causal is not None:
            return 0.0 if any(span.contains(i, j) for span in causal.spans) else None
        assert seen is not None
        return 0.0 if seen[i][j] else None

    return draw_grid(visible, lambda value: "#4477aa"), (
        f"The keys (columns) that each query (row) sees under `{text['picture']}`, {LENGTH} tokens."
    )


def grid_caption(recipe: str) -> str:
    return (
        f"The distance of each query (row) and key (column) under `{recipe}` in {LENGTH} tokens, training length "
        f"{TRAINED}: darker blue is farther, orange to red is beyond what was trained."
    )


def has_own_map(part: Position) -> bool:
    """Return whether a method moves positions, in branches, in place of frequencies."""
    steps = torch.arange(LENGTH)[None]
    branches = part.branches(steps, steps, 1, (LENGTH, LENGTH))
    return len(branches) > 1


def compute_distances(part: Position) -> list[list[float | None]]:
    """Return the distance at which each query sees each key, from the branches of the method; of the slowest pairs."""
    steps = torch.arange(LENGTH)[None]
    branches = part.branches(steps, steps, 1, (LENGTH, LENGTH))

    def distance(i: int, j: int) -> float:
        branch = next(each for each in branches if any(span.contains(i, j) for span in each.region.spans))
        return position_of(branch.query, i) - position_of(branch.key, j)

    return [[distance(i, j) if j <= i else None for j in range(LENGTH)] for i in range(LENGTH)]


def position_of(at: Any, index: int) -> float:
    if at is None:
        return 0.0
    if not isinstance(at, torch.Tensor):
        return float(at)
    return float(at[0, index] if at.ndim == 2 else at[0, index, -1])


def frequency_ratios(part: Position) -> list[float]:
    """Return each pair's frequency over that of plain RoPE."""
    exact, device = torch.float64, torch.device("cpu")
    own = part.frequencies(HEAD_DIM, LENGTH, exact, device).reshape(-1)
    ratios: list[float] = (own / RoPE().frequencies(HEAD_DIM, LENGTH, exact, device)).tolist()
    return ratios


def one_ratio(part: Position) -> float | None:
    """Return the factor of distances of a method that has one for all pairs."""
    ratios = frequency_ratios(part)
    return ratios[0] if max(ratios) - min(ratios) < 1e-9 else None


def frequency_curves(part: Position) -> dict[str, list[tuple[float, float]]]:
    """Return what a distance is to three pairs: Δ times the pair's frequency over that of plain RoPE."""
    ratio = frequency_ratios(part)
    pairs = {"fastest pair": 0, "middle pair": len(ratio) // 2, "slowest pair": len(ratio) - 1}
    return {label: [(float(d), d * ratio[m]) for d in range(LENGTH)] for label, m in pairs.items()}


def bias(part: Position, i: int, j: int) -> float | None:
    steps = torch.arange(LENGTH)[None]
    (branch,) = part.branches(steps, steps, 8, (LENGTH, LENGTH))
    slope = 0.0 if branch.slopes is None else branch.slopes.reshape(-1)[0].item()
    return slope * (i - j) if j <= i else None


def bias_colour(value: float) -> str:
    return mix(NEAR_COLOURS, min(1.0, value / (LENGTH / 2)))


def share_points(beta: float) -> list[tuple[float, float]]:
    far = torch.arange(1, 65, dtype=torch.float64).reshape(1, 1, -1)
    values = Share(beta=beta, reference=4).bias(far).flatten().tolist()
    return [(n / 4, value) for n, value in zip(range(1, 65), values, strict=True)]


def visible_pairs(recipe: Any) -> list[list[bool]]:
    """Return which keys queries see, from the weights of a call with random queries and keys."""
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, 1, LENGTH, HEAD_DIM, generator=generator, dtype=torch.float64) for _ in range(2))
    weights: Any = attention(q, k, torch.eye(LENGTH, dtype=torch.float64)[None, None], recipe, causal=True)
    return [[weight > 0 for weight in row] for row in weights[0, 0].tolist()]


def mix(ends: tuple[str, str], share: float) -> str:
    """Return the colour between two, as #rrggbb."""
    low, high = ([int(end[at : at + 2], 16) for at in (1, 3, 5)] for end in ends)
    return "#" + "".join(f"{round(a + (b - a) * share):02x}" for a, b in zip(low, high, strict=True))


def distance_colour(value: float) -> str:
    size = abs(value)
    if size < TRAINED:
        return mix(NEAR_COLOURS, round(size) / (TRAINED - 1))
    return mix(UNTRAINED, min(1.0, round(size - TRAINED) / (LENGTH - TRAINED)))


def draw_grid(value: Any, colour: Any = distance_colour) -> str:
    """Draw a value of each pair: queries downwards, keys to the right, one path for each colour."""
    paths: dict[str, list[str]] = {}
    for i in range(LENGTH):
        j = 0
        while j < LENGTH:
            entry = value(i, j)
            if entry is None:
                j += 1
                continue
            shade, start = colour(entry), j
            while j < LENGTH and (entry := value(i, j)) is not None and colour(entry) == shade:
                j += 1
            paths.setdefault(shade, []).append(f"M{start} {i}h{j - start}v1h{start - j}z")
    size = LENGTH * CELL + MARGIN
    body = "".join(f'<path fill="{shade}" d="{"".join(parts)}"/>' for shade, parts in paths.items())
    labels = label(MARGIN, 14, "keys →") + label(0, 0, "queries →", f' transform="translate(14,{MARGIN}) rotate(90)"')
    grid = f'<g transform="translate({MARGIN},{MARGIN - 6}) scale({CELL})" shape-rendering="crispEdges">{body}</g>'
    return wrap(size, size, labels + grid)


def draw_curves(curves: dict[str, list[tuple[float, float]]], x_label: str, y_label: str) -> str:
    """Draw lines with their names, and the ends of both axes."""
    width, height = 360, 240
    left, right, top, bottom = 46, 12, 14 + 15 * len(curves), 34
    xs = [x for points in curves.values() for x, _ in points]
    ys = [y for points in curves.values() for _, y in points if isfinite(y)]
    low, high = min(ys), max(ys)
    if high - low < 1e-9:
        low, high = low - 0.5, high + 0.5

    def place(x: float, y: float) -> str:
        across = left + (x - min(xs)) / (max(xs) - min(xs)) * (width - left - right)
        return f"{across:.1f},{height - bottom - (y - low) / (high - low) * (height - top - bottom):.1f}"

    body = f'<path d="M{left} {top}V{height - bottom}H{width - right}" fill="none" stroke="#888"/>'
    for index, (name, points) in enumerate(curves.items()):
        shade = LINE_COLOURS[index % len(LINE_COLOURS)]
        line = " ".join(place(x, y) for x, y in points)
        body += f'<polyline points="{line}" fill="none" stroke="{shade}" stroke-width="2"/>'
        body += label(left + 8, 14 + 15 * index, name, f' style="fill:{shade}"')
    body += label(left, height - 18, f"{min(xs):g}") + label(
        width - right, height - 18, f"{max(xs):g}", ' text-anchor="end"'
    )
    body += label((width + left) / 2, height - 6, f"{x_label} →", ' text-anchor="middle"')
    for y, at in ((low, height - bottom), (high, top + 8)):
        body += label(left - 5, at, f"{y:.3g}", ' text-anchor="end"')
    body += label(0, 0, f"{y_label} →", f' transform="translate(12,{height - bottom}) rotate(-90)"')
    return wrap(width, height, body)


def label(x: float, y: float, text: str, extra: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}"{extra}>{escape(text)}</text>'


def wrap(width: int, height: int, body: str) -> str:
    style = "text{font:11px sans-serif;fill:#777}"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">'
    return f"{head}<style>{style}</style>{body}</svg>\n"


if __name__ == "__main__":
    main()
