"""Decide what small Llamas say of the laws: python docs/results/share/small_llamas.py RESULTS/llamas

Nine configurations (training length 128, 256 and 512, heads of 32, 64 and 128), three seeds each, held-out modules of
SymPy at sixteen times the training length. Registered before any run: in each configuration, and over all of them,
perplexity in the last bucket under THIS is lower than under THAN. Superior after Holm's correction over all claims, by
the rule of isentrope.evaluation.decisions; a configuration's seeds are pre-trainings of their own. Until all are
measured the correction is over those that are.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np

from isentrope.evaluation.decisions import Array, decide_claims, estimate_effect

LENGTHS, SIZES, SEEDS = (128, 256, 512), (32, 64, 128), (0, 1, 2)
# this, than
CLAIMS = (
    ("rerope+share:beta=0.5", "rerope+infoscale"),
    ("rerope+share:beta=0.5", "rerope+power"),
    ("rerope+infoscale", "rerope"),
    ("selfextend+share:beta=0.5", "selfextend+infoscale"),
)
MARGIN = float(np.log1p(0.01))
TITLES = (
    "claim", "training length", "heads of", "lower by", "95 % interval", "modules", "seeds", "corrected p", "verdict"
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="of study.sh's step llamas")
    print(render_claims(parser.parse_args().folder), end="")


def render_claims(folder: Path) -> str:
    """Print a verdict for each claim that is measured, and which configurations are not."""
    gains = collect_gains(folder)
    if not gains:
        raise SystemExit(f"{folder}: expected results-d*-s*/small-llama-*/modules/perplexity.json, got none")
    effects = [estimate_effect(runs) for runs in gains.values()]
    decisions = decide_claims(effects, [MARGIN] * len(effects), [False] * len(effects))
    lines = [f"| {' | '.join(TITLES)} |", "|---" * len(TITLES) + "|"]
    for (claim, runs), effect, decision in zip(gains.items(), effects, decisions, strict=True):
        mean, low, high = (f"{-100 * np.expm1(-x):.1f}".replace("-", "−") for x in (effect.mean, *effect.interval()))
        every = np.concatenate(runs)
        texts = (f"{mean} %", f"{low} to {high} %", f"{(every > 0).sum()} of {every.size}", str(effect.pretrainings))
        lines.append(f"| {' | '.join((*claim, *texts, f'{decision.p_different:.2f}', decision.verdict))} |")
    return "\n".join([*lines, "", list_missing(folder)]) + "\n"


def collect_gains(folder: Path) -> dict[tuple[str, str, str], list[Array]]:
    """Read the gains of each claim in each configuration that is measured, and over all where all seeds of all are."""
    gains = {}
    for this, than in CLAIMS:
        name = f"`{this}` below `{than}`"
        every = {(n, d): read_gains(folder, n, d, this, than) for n in LENGTHS for d in SIZES}
        gains |= {(name, str(n), str(d)): runs for (n, d), runs in every.items() if runs}
        if all(len(runs) == len(SEEDS) for runs in every.values()):
            gains[name, "all", "all"] = [np.concatenate(runs).mean(0, keepdims=True) for runs in every.values()]
    return gains


def list_missing(folder: Path) -> str:
    """Write which configurations have fewer seeds than registered."""
    missing = []
    for n in LENGTHS:
        sizes = [d for d in SIZES if not all(get_path(folder, n, d, seed).is_file() for seed in SEEDS)]
        if sizes:
            missing.append(f"length {n} with heads of {', '.join(map(str, sizes))}")
    return f"Not measured in full: {'; '.join(missing) or 'none'}."


def get_path(folder: Path, length: int, size: int, seed: int) -> Path:
    return folder / f"results-d{size}-s{seed}" / f"small-llama-{length}" / "modules" / "perplexity.json"


def read_gains(folder: Path, length: int, size: int, this: str, than: str) -> list[Array]:
    """Read by how much the loss of each module is lower, an array (1, modules) for each seed that was measured."""
    runs = []
    for seed in SEEDS:
        path = get_path(folder, length, size, seed)
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
