"""Decide what small Llamas say of the laws: python docs/results/share/small_llamas.py RESULTS/llamas

Nine configurations (training length 128, 256 and 512, heads of 32, 64 and 128), three seeds each, held-out modules of
SymPy at sixteen times the training length. Registered before any run: in each configuration, and over all of them,
perplexity in the last bucket under THIS is lower than under THAN. Superior after Holm's correction over all claims, by
the rule of isentrope.evaluation.decisions; a configuration's seeds are pre-trainings of their own.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np

from isentrope.evaluation.decisions import decide_claims, estimate_effect

LENGTHS, SIZES, SEEDS = (128, 256, 512), (32, 64, 128), (0, 1, 2)
# this, than
CLAIMS = (
    ("rerope+share:beta=0.5", "rerope+infoscale"),
    ("rerope+share:beta=0.5", "rerope+power"),
    ("rerope+infoscale", "rerope"),
    ("selfextend+share:beta=0.5", "selfextend+infoscale"),
)
MARGIN = float(np.log1p(0.01))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="of study.sh's step llamas")
    folder = parser.parse_args().folder
    names, effects = [], []
    for this, than in CLAIMS:
        every = {(n, d): read_gains(folder, n, d, this, than) for n in LENGTHS for d in SIZES}
        measured = {key: runs for key, runs in every.items() if runs}
        groups = {f"n_tr {n}, heads of {d}": runs for (n, d), runs in measured.items()}
        for name, runs in groups.items():
            names.append(f"{this} below {than}, {name}")
            effects.append(estimate_effect(runs))
        if len(measured) == len(every):
            names.append(f"{this} below {than}, all")
            effects.append(estimate_effect([np.concatenate(runs).mean(0, keepdims=True) for runs in groups.values()]))
    decisions = decide_claims(effects, [MARGIN] * len(effects), [False] * len(effects))
    print("| claim | verdict | perplexity lower by | 95 % interval | pre-trainings |\n|---|---|---|---|---|")
    for name, effect, decision in zip(names, effects, decisions, strict=True):
        mean, low, high = (-100 * np.expm1(-x) for x in (effect.mean, *effect.interval()))
        print(
            f"| {name} | **{decision.verdict}** | {mean:+.2f} % | {low:+.2f} to {high:+.2f} % | {effect.pretrainings} |"
        )


def read_gains(folder: Path, length: int, size: int, this: str, than: str) -> list[np.ndarray]:
    """Read by how much the loss of each module is lower, an array (1, modules) for each seed that was measured."""
    runs = []
    for seed in SEEDS:
        path = folder / f"results-d{size}-s{seed}" / f"small-llama-{length}" / "modules" / "perplexity.json"
        if not path.is_file():
            continue
        data = json.loads(path.read_text(encoding="utf-8"))
        first, last = data["config"]["edges"][-2:]
        losses: dict[str, dict[str, float]] = {}
        for cell in data["cells"]:
            parts = cell["recipe"].split("+")
            name = "+".join([parts[0].partition(":")[0], *parts[1:]])
            losses.setdefault(name, {})[cell["text"]] = cell["loss"][-1] / (last - first)
        if {this, than} <= losses.keys():
            shared = sorted(losses[this].keys() & losses[than].keys())
            runs.append(np.array([[losses[than][text] - losses[this][text] for text in shared]]))
    return runs


if __name__ == "__main__":
    main()
