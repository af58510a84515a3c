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
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from isentrope.evaluation.decisions import SUPERIOR, UNDECIDED, Array, Decision, decide_claims, estimate_effect

LENGTHS, SIZES, SEEDS = (128, 256, 512), (32, 64, 128), (0, 1, 2)
# this, than
CLAIMS = (
    ("rerope+share:beta=0.5", "rerope+infoscale"),
    ("rerope+share:beta=0.5", "rerope+power"),
    ("rerope+infoscale", "rerope"),
    ("selfextend+share:beta=0.5", "selfextend+infoscale"),
)
MARGIN = float(np.log1p(0.01))
CONFIGURATION_TITLES = ("training length, heads of", *(f"`{this}` below `{than}`" for this, than in CLAIMS))
OVERALL_TITLES = ("over all configurations", "lower by", "95 % interval", "modules", "corrected p", "verdict")
ALL = (0, 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="of study.sh's step llamas")
    print(render_claims(parser.parse_args().folder), end="")


def render_claims(folder: Path) -> str:
    """Return tables of a verdict for each claim that is measured, and which configurations are not."""
    gains = {claim: collect_gains(folder, *claim) for claim in CLAIMS}
    keys = [(claim, configuration) for claim in CLAIMS for configuration in gains[claim]]
    if not keys:
        raise SystemExit(f"{folder}: expected results-d*-s*/small-llama-*/modules/perplexity.json, got none")
    effects = [estimate_effect(gains[claim][configuration]) for claim, configuration in keys]
    decisions = decide_claims(effects, [MARGIN] * len(keys), [False] * len(keys))
    texts, overall = {}, []
    for (claim, configuration), effect, decision in zip(keys, effects, decisions, strict=True):
        lower, *interval = (f"{-100 * np.expm1(-x):.1f}".replace("-", "−") for x in (effect.mean, *effect.interval()))
        words = f"{lower} %", f"{' to '.join(interval)} %"
        if configuration == ALL:
            every = np.concatenate(gains[claim][configuration])
            count = f"{(every > 0).sum()} of {every.size}"
            name = f"`{claim[0]}` below `{claim[1]}`"
            overall.append((name, *words, count, f"{decision.p_different:.2f}", f"**{name_verdict(decision)}**"))
        else:
            verdict = "" if decision.verdict == UNDECIDED else f" **{name_verdict(decision)}**"
            texts[claim, configuration] = f"{words[0]} ({words[1]}){verdict}"
    rows = [
        (f"{n}, {d}", *(texts.get((claim, (n, d)), "") for claim in CLAIMS))
        for n in LENGTHS
        for d in SIZES
        if any((claim, (n, d)) in texts for claim in CLAIMS)
    ]
    tables = ([render_table(OVERALL_TITLES, overall)] if overall else []) + [render_table(CONFIGURATION_TITLES, rows)]
    return "\n\n".join([*tables, list_missing(folder)]) + "\n"


def name_verdict(decision: Decision) -> str:
    return "holds" if decision.verdict == SUPERIOR else decision.verdict


def render_table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join([f"| {' | '.join(titles)} |", "|---" * len(titles) + "|", *(f"| {' | '.join(r)} |" for r in rows)])


def collect_gains(folder: Path, this: str, than: str) -> dict[tuple[int, int], list[Array]]:
    """Read a claim's gains in each configuration that is measured, and over all where all seeds of all are."""
    every = {(n, d): read_gains(folder, n, d, this, than) for n in LENGTHS for d in SIZES}
    gains = {configuration: make_arrays(runs) for configuration, runs in every.items() if runs}
    if all(len(runs) == len(SEEDS) for runs in every.values()):
        # modules that are long enough for every training length; a configuration is the mean of its seeds
        arrays = iter(make_arrays([run for runs in every.values() for run in runs]))
        gains[ALL] = [np.concatenate([next(arrays) for _ in runs]).mean(0, keepdims=True) for runs in every.values()]
    return gains


def make_arrays(runs: list[dict[str, float]]) -> list[Array]:
    """Return gains by module as an array (1, modules) for each run, of the modules that all runs have."""
    shared = sorted(set.intersection(*(set(run) for run in runs)))
    return [np.array([[run[text] for text in shared]]) for run in runs]


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


def read_gains(folder: Path, length: int, size: int, this: str, than: str) -> list[dict[str, float]]:
    """Read by how much the loss of each module is lower, for each seed that was measured."""
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
            shared = losses[this].keys() & losses[than].keys()
            runs.append({text: losses[than][text] - losses[this][text] for text in shared})
    return runs


if __name__ == "__main__":
    main()
