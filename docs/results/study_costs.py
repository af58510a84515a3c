"""What each step of study.sh costs on one H200: python docs/results/study_costs.py

Trainings take as many seconds a token as those of the study, at 512 and at 64 tokens; cells as those of the study at
the same length, or as those of the archive with one token masked at a time. Both were measured with several processes
on the GPU, so that JOBS of them side by side take their sum divided by JOBS.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable
from pathlib import Path
from statistics import median

from isentrope.experiments.masked_plan import MaskedPlan, override_plan
from isentrope.experiments.plan import load_plan
from isentrope.training.config import build_config

HERE = Path(__file__).parent
JOBS = 6
DOCUMENTS, ARCHIVE_DOCUMENTS, ARCHIVE_POSITIONS = 100, 10, 128
TABLES = "study-main study-ablation study-sweep study-softmax study-softmax-cosine study-clex study-anchor"
# step of study.sh: its plans, and their seeds where not the plan's
STEPS = {
    "seeds": (["study"], "5,6,7"),
    "tables": (TABLES.split(), None),
    "why": (["study-why"], None),
    "novels, books, code: each": (["study-texts"], None),
}
TRAINING_PRESETS = {512: "pretrain", 64: "train"}


def read_lines(path: Path) -> list[dict[str, object]]:
    content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    return [json.loads(line) for line in content.splitlines()]


def measure_training() -> dict[int, float]:
    """Return seconds a token of the study's trainings, by the length of their crops."""
    checkpoints = json.loads((HERE / "study" / "plan.json").read_text(encoding="utf-8"))["checkpoints"].values()
    rates: dict[int, list[float]] = {}
    for row in checkpoints:
        config = row["config"]
        rates.setdefault(config["length"], []).append(
            row["seconds"] / (config["steps"] * config["batch"] * config["length"])
        )
    return {length: median(values) for length, values in rates.items()}


def measure_cells(folder: str, file: str) -> dict[int, float]:
    """Return the median seconds of a cell by length."""
    timings = {row["key"]: row["seconds"] for row in read_lines(HERE / folder / "timings.jsonl")}
    seconds: dict[int, list[float]] = {}
    for row in read_lines(HERE / folder / file):
        seconds.setdefault(int(str(row["length"])), []).append(float(str(timings[row["key"]])))
    return {length: median(values) for length, values in seconds.items()}


def interpolate(values: dict[int, float], length: int) -> float:
    """Return the value at a length, or at the next one above."""
    return values[min(known for known in values if known >= length)]


def estimate(plan: MaskedPlan, trained: Iterable[str] = ()) -> tuple[int, float, int, float]:
    """Return how many trainings and cells a plan has, and the seconds of both, one after another."""
    rates, done = measure_training(), set(trained)
    trainings, training = 0, 0.0
    for spec in plan.required_checkpoints():
        if spec.train and spec.name not in done:
            options = dict(spec.train)
            config = build_config(options.pop("preset", "train"), **options)
            count = len(plan.seeds_of(spec.name))
            trainings += count
            training += count * rates[config.length] * config.steps * config.batch * config.length
    if plan.protocol.name == "single":
        share = DOCUMENTS * (plan.protocol.positions or 1) / (ARCHIVE_DOCUMENTS * ARCHIVE_POSITIONS)
        cells = {n: share * x for n, x in measure_cells("archive/statutes/main", "results.jsonl").items()}
    else:
        cells = measure_cells("study", "results.jsonl.gz")
    each = sum(interpolate(cells, length) for length in plan.lengths)
    return trainings, training, plan.num_cells, each * sum(len(plan.seeds_of(row.checkpoint)) for row in plan.rows)


def render_costs() -> str:
    """Print what each step of study.sh costs."""
    lines = [
        f"| step | trainings | seconds | cells | seconds | **seconds with {JOBS} jobs** |",
        "|---|---|---|---|---|---|",
    ]
    for step, (names, seeds) in STEPS.items():
        total, done = [0.0, 0.0, 0.0, 0.0], set[str]()
        for name in names:
            plan = load_plan(name)
            assert isinstance(plan, MaskedPlan)
            plan = override_plan(plan, None, None, seeds)
            total = [a + b for a, b in zip(total, estimate(plan, done), strict=True)]
            done |= {spec.name for spec in plan.required_checkpoints()}
        trainings, training, cells, evaluation = total
        both = (training + evaluation) / JOBS
        lines.append(f"| {step} | {trainings:.0f} | {training:.0f} | {cells:.0f} | {evaluation:.0f} | **{both:.0f}** |")
    return "".join(f"{line}\n" for line in lines)


if __name__ == "__main__":
    print(render_costs(), end="")
