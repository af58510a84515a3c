"""make fuzz: random cases against the oracle, seeded and resumable.

    python -m tests.fuzz --out results/fuzz [--only attention,recipes,families,kills] [--seed 0] [--cases N]

Each kind keeps its counts and failures in OUT/KIND.json after every few cases; the same command resumes there. What
fails is listed with the seed that reproduces it, the rest is still tried, and the command then ends with 1.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from isentrope.utils.files import write_atomically

# cases by default; families are as many as transformers has, kills are of a training and of a study
CASES = {"attention": 4000, "recipes": 20000, "families": None, "kills": 20}
EVERY = 20.0  # seconds between lines of progress


class Tally:
    """Counts and failures of one kind, kept in a file."""

    def __init__(self, path: Path, seed: int, total: int) -> None:
        self.path, self.total = path, total
        fresh = {"seed": seed, "next": 0, "seconds": 0.0, "counts": {}, "failures": [], "torch": torch.__version__}
        known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else fresh
        self.data: dict[str, Any] = known if known["seed"] == seed else fresh
        self.saved = self.printed = time.monotonic()

    def run(self, judge: Callable[[int], dict[str, int]]) -> None:
        """Judge each case that is left; an AssertionError is a failure, anything else a fault of the fuzzer."""
        for index in range(self.data["next"], self.total):
            try:
                counts = judge(index)
            except AssertionError as error:
                counts = {"wrong": 1}
                self.data["failures"].append({"case": index, "why": str(error)[:2000]})
                print(f"{self.path.stem} {index}: WRONG: {str(error)[:400]}", flush=True)
            self.data["counts"] = dict(Counter(self.data["counts"]) + Counter(counts))
            self.data["next"] = index + 1
            self.save(time.monotonic())
        self.save(None)

    def save(self, now: float | None) -> None:
        if now is None or now - self.saved > 2:
            current = time.monotonic()
            self.data["seconds"] += current - self.saved
            self.saved = current
            with write_atomically(self.path) as partial:
                partial.write_text(json.dumps(self.data, indent=1), encoding="utf-8")
        if now is None or now - self.printed > EVERY:
            self.printed = time.monotonic()
            print(f"{self.path.stem}: {self.data['next']}/{self.total} {self.data['counts']}", flush=True)


def fuzz_attention(tally: Tally, seed: int) -> None:
    from tests.fuzz import attention

    tally.run(lambda index: attention.check(attention.case(seed + index)))


def fuzz_recipes(tally: Tally, seed: int) -> None:
    from tests.fuzz import recipes

    mutants = iter(enumerate(recipes.mutants(seed, tally.total)))

    def judge(index: int) -> dict[str, int]:
        mutant = next(mutant for at, mutant in mutants if at == index)
        return {recipes.check(mutant): 1}

    tally.run(judge)


def fuzz_families(tally: Tally, seed: int) -> None:
    from tests.fixtures import model_types
    from tests.fuzz import families

    names = model_types.names()

    def judge(index: int) -> dict[str, int]:
        with tempfile.TemporaryDirectory() as folder:
            return {families.check(names[index], Path(folder), seed): 1}

    tally.run(judge)


def fuzz_kills(tally: Tally, seed: int) -> None:
    from tests.fuzz import kills

    def judge(index: int) -> dict[str, int]:
        folder = Path(tempfile.mkdtemp())
        work = (kills.training, kills.study)[index]
        try:
            return {f"killed {work.__name__}, resumed to the same bytes": work(seed, folder, CASES["kills"] or 20)}
        finally:
            shutil.rmtree(folder)

    tally.run(judge)


KINDS = {"attention": fuzz_attention, "recipes": fuzz_recipes, "families": fuzz_families, "kills": fuzz_kills}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("results/fuzz"))
    parser.add_argument("--only", default=",".join(KINDS), help="kinds, separated by commas")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", type=int, help="of each kind, instead of the defaults")
    options = parser.parse_args(arguments)
    kinds = options.only.split(",")
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        parser.error(f"--only: expected {', '.join(KINDS)}, got {unknown[0]!r}")
    options.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)  # cases are small: several at a time, with other seeds, are the faster way
    failures = 0
    for kind in kinds:
        tally = Tally(options.out / f"{kind}.json", options.seed, _total(kind, options.cases))
        KINDS[kind](tally, options.seed)
        failures += len(tally.data["failures"])
    print(f"{failures} failures; counts and seeds are in {options.out}")
    return 1 if failures else 0


def _total(kind: str, cases: int | None) -> int:
    if kind == "kills":
        return 2
    if kind == "families":
        from tests.fixtures import model_types

        return min(cases or 10**9, len(model_types.names()))
    return cases or CASES[kind] or 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
