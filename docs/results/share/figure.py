"""Draw attention-sinks.png, perplexity by position under laws for far keys: python docs/results/share/figure.py"""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path

from matplotlib.figure import Figure
from tables import METHODS, read_cells

from isentrope.report.figures.style import COLOURS, label_line_ends, save_figure, set_length_axis

HERE = Path(__file__).parent
PANELS = {"SmolLM2-135M, two novels": ("smollm2-131k", 8192), "TinyLlama-1.1B, two novels": ("tinyllama-32k", 2048)}
LAWS = {  # what follows ReRoPE, with its label
    "+infoscale": "InfoScale",
    "+share:beta=0.5": "share, β = ½",
    "+share:beta=0.5,sinks=4": "… sinks spared",
    "+share:beta=1,sinks=4": "share, β = 1, sinks spared",
}


def main() -> None:
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    for axes, (title, (plan, trained)) in zip(figure.subplots(1, 2), PANELS.items(), strict=True):
        results, cells = read_cells(plan, "novels", "perplexity.json")
        edges, base = results["config"]["edges"], METHODS[plan][0]
        counts = [last - max(first, 1) for first, last in pairwise(edges)]
        window = int(base.partition("=")[2])
        recipes = {base + law: label for law, label in LAWS.items()}
        recipes[f"sink:sinks=4,size={window - 4}"] = "StreamingLLM (forgets)"
        labels = []
        for colour, (recipe, label) in zip(COLOURS[1:], recipes.items(), strict=False):
            losses = [cell["loss"] for cell in cells if cell["recipe"] == recipe]
            sums = [sum(column) / len(losses) for column in zip(*losses, strict=True)]
            values = [math.exp(total / count) for total, count in zip(sums, counts, strict=True)]
            axes.plot(edges[1:], values, color=colour, marker="o", markersize=3)
            labels.append((values[-1], label, colour))
        axes.axvline(trained, color="#BBBBBB", linewidth=0.8)
        set_length_axis(axes, edges[1:])
        axes.set(title=title, xlabel="position, up to", ylabel="perplexity")
        label_line_ends(axes, edges[-1], labels)
    for path in save_figure(figure, HERE / "attention-sinks"):
        if path.suffix == ".svg":
            path.unlink()  # the page shows the other
        else:
            print(path)


if __name__ == "__main__":
    main()
