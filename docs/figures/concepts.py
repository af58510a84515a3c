"""Draw the pictures of docs/concepts.md: python docs/figures/concepts.py

Every picture is computed: dilution and shares by `isentrope.theory`, distances by the position methods themselves.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import matplotlib
import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

import isentrope as ise
from isentrope import theory

TRAIN_LENGTH, WINDOW = 8192, 4096
SIGMA, RELEVANT = 2.0, 12.0  # spread of the scores of noise, and the score of the one key that matters
STRONG = 6.0  # the score of the key that matters among noise of deviation 1
NEAR, FAR, FOUND = "#4477AA", "#BBBBBB", "#EE6677"
SMALL, SMALL_WINDOW, SMALL_GROUP = 64, 16, 4  # tokens, window and group of the pictures of distances


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    out = parser.parse_args().out
    matplotlib.rcParams |= {"font.family": "DejaVu Sans", "font.size": 10, "svg.hashsalt": "isentrope"}
    matplotlib.rcParams |= {"axes.spines.top": False, "axes.spines.right": False}
    for name, draw in (("dilution", draw_dilution), ("branches", draw_branches), ("share", draw_share)):
        path = out / f"concept-{name}.svg"
        draw().savefig(path, metadata={"Date": None}, bbox_inches="tight")
        print(path)


def draw_dilution() -> Figure:
    """Draw the share of one key that matters among more and more others, and entropy against their number."""
    figure = Figure(figsize=(9.6, 3.3), layout="constrained")
    left, right = figure.subplots(1, 2)
    counts = (64, 512, 4096, 32768)
    share = [float(theory.shares(theory.KeySet(n - 1), theory.KeySet(1, STRONG, 0.0))[1]) for n in counts]
    rows = np.arange(len(counts))
    left.barh(rows, share, color=FOUND)
    left.barh(rows, 1 - np.array(share), left=share, color=FAR)
    for row, x in zip(rows, share, strict=True):
        left.text(x + 0.02, row, f"{x:.0%}", va="center", fontsize=9)
    left.set(title="share of the one key that matters", xlim=(0, 1), xlabel="share of attention")
    left.set_yticks(rows, [f"{n:,} keys" for n in counts])
    left.invert_yaxis()
    measured = json.loads((Path(__file__).parent / "laws.json").read_text(encoding="utf-8"))
    for law, label, colour in (
        ("constant", "plain", "#777777"),
        ("infoscale", "InfoScale", FOUND),
        ("exact_matched", "InfoScale, exact", NEAR),
    ):
        points = [(row["n"], row["entropy"]) for row in measured["rows"] if row["law"] == law]
        right.plot(*zip(*points, strict=True), marker="o", ms=3.5, color=colour, label=label)
    right.set(title="entropy of attention, random vectors", xscale="log", xlabel="keys", ylabel="nats", ylim=0)
    right.legend(frameon=False)
    return figure


def draw_branches() -> Figure:
    """Draw the rotary distance of every pair for three position methods."""
    methods = {
        "plain rotation: distance as it is": ise.RoPE(),
        f"ReRoPE: at most {SMALL_WINDOW}": ise.ReRoPE(SMALL_WINDOW),
        f"SelfExtend: far tokens in groups of {SMALL_GROUP}": ise.SelfExtend(SMALL_WINDOW, SMALL_GROUP),
    }
    figure = Figure(figsize=(9.6, 3.3), layout="constrained")
    axes = figure.subplots(1, 3)
    for ax, (title, method) in zip(axes, methods.items(), strict=True):
        image = ax.imshow(compute_distances(method), cmap="viridis", vmin=0, vmax=SMALL - 1)
        ax.set(title=title, xlabel="key", xticks=[], yticks=[])
        ax.title.set_size(9.5)
    for ax in axes[1:]:
        edge = np.array([[SMALL_WINDOW - 0.5, -0.5], [SMALL - 0.5, SMALL - SMALL_WINDOW - 0.5]])
        ax.plot(edge[:, 1], edge[:, 0], color=FOUND, lw=1.5)
        ax.text(SMALL * 0.60, SMALL * 0.70, "near", color="white", rotation=-45, ha="center", va="center")
        ax.text(SMALL * 0.18, SMALL * 0.78, "far", color="white", ha="center", va="center")
    axes[0].set_ylabel("query")
    trained = SMALL // 2
    axes[0].add_patch(Rectangle((-0.5, -0.5), trained, trained, fill=False, ec=FOUND, lw=1.5))
    axes[0].text(trained + 1, trained / 2, "seen in\ntraining", color=FOUND, va="center")
    figure.colorbar(image, ax=axes, label="rotary distance", shrink=0.85)
    return figure


def compute_distances(method: ise.RoPE | ise.ReRoPE | ise.SelfExtend) -> np.ndarray:
    """Return (query, key) distances of causal pairs, NaN ahead of the query."""
    positions = torch.arange(SMALL)[None]
    distances = np.full((SMALL, SMALL), np.nan)
    for branch in method.branches(positions, positions, 1, (SMALL, SMALL)):
        query, key = (torch.as_tensor(0 if x is None else x).expand(1, SMALL)[0] for x in (branch.query, branch.key))
        for span in branch.region.spans:
            for i in range(SMALL):
                for j in range(i + 1):
                    if span.contains(i, j):
                        distances[i, j] = float(query[i] - key[j])
    return distances


def draw_share() -> Figure:
    """Draw how attention divides between near keys, far noise and one far key that matters, law by law."""
    lengths = TRAIN_LENGTH * 2.0 ** np.arange(0, 6.01, 0.5)
    figure = Figure(figsize=(9.6, 3.3), layout="constrained")
    axes = figure.subplots(1, 3, sharey=True)
    for ax, (title, beta) in zip(axes, (("no law", 0.0), ("share, β = ½", 0.5), ("share, β = 1", 1.0)), strict=True):
        far = lengths - WINDOW
        bias = beta * np.log(far / (TRAIN_LENGTH - WINDOW))
        columns = [
            theory.shares(
                theory.KeySet(WINDOW, 1.5, SIGMA), theory.KeySet(m, -b, SIGMA), theory.KeySet(1, RELEVANT - b, 0.0)
            )
            for m, b in zip(far, bias, strict=True)
        ]
        near, noise, relevant = np.array(columns).T
        ax.stackplot(lengths, near, relevant, noise, colors=(NEAR, FOUND, FAR))
        ax.set(title=title, xscale="log", xlim=(lengths[0], lengths[-1]), ylim=(0, 1), xlabel="tokens")
        ax.set_xticks([8192, 32768, 131072, 524288], ["8k", "32k", "131k", "524k"])
        ax.minorticks_off()
    axes[0].set_ylabel("share of attention")
    for text, x, y in (("near keys", 9_000, 0.15), ("relevant far key", 9_000, 0.6), ("far noise", 90_000, 0.85)):
        axes[0].text(x, y, text, va="center", color="#333333" if text == "far noise" else "white", fontsize=9)
    return figure


if __name__ == "__main__":
    main()
