"""Numbers of `retrieval.json`: of each cell, of each recipe, task and length, and over all tasks; the ceiling."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from isentrope.data.tasks.registry import ALL
from isentrope.evaluation.clusters import ScoredExample, clustered_interval
from isentrope.evaluation.metrics import wilson_interval
from isentrope.evaluation.recipe_texts import PLAIN

Record = dict[str, Any]
SHARE, RECALLED = "share", "recalled"  # of the answers in the model's own reply, and with the answer given to it


def summarize_retrieval(results: Record) -> Record:
    """Add the numbers of each cell, and three lists over cells.

    `rows`: of a recipe, task and length over all fillers and depths; `filler_rows`: the same in each filler; `totals`:
    of a recipe and length over all tasks, each of the same weight. `score` is the share of answers in the reply, or
    without replies of those recalled; `interval` is clustered by filler and depth (`clusters.py`); `ceiling` is
    the plain model's own score inside its training length on the same tasks.

    Args:
        results: head and cells.
    """
    cells = [cell | summarize_examples(cell["examples"], cell["task"]) for cell in results["cells"]]
    metric = RECALLED if results["config"]["score"] == "forced" else SHARE
    ceiling_length = results["config"].get("ceiling")
    ceiling_cells = [cell for cell in cells if cell["recipe"] == PLAIN and cell["length"] == ceiling_length]
    lengths = {*results["config"]["lengths"]}
    # the ceiling's own length has no row unless it is one of those wanted
    wanted = [cell for cell in cells if cell["length"] in lengths]
    rows, filler_rows, totals = list[Record](), list[Record](), list[Record]()
    for (recipe, task, length), group in _group(wanted, "recipe", "task", "length"):
        row = {"recipe": recipe, "task": task, "length": length}
        same = [cell for cell in ceiling_cells if cell["task"] == task]
        rows.append(row | _summarize_group(group, metric) | _build_ceiling(same, group, metric))
        for (filler,), part in _group(group, "filler"):
            own = [cell for cell in same if cell.get("filler") == filler]
            filler_rows.append(
                row | {"filler": filler} | _summarize_group(part, metric) | _build_ceiling(own, part, metric)
            )
    for (recipe, length), group in _group(wanted, "recipe", "length"):
        total = {"recipe": recipe, "length": length, "tasks": len({cell["task"] for cell in group})}
        totals.append(total | _score(group, metric) | _build_ceiling(ceiling_cells, group, metric))
    return results | {"cells": cells, "rows": rows, "filler_rows": filler_rows, "totals": totals}


def _group(cells: Iterable[Record], *fields: str) -> list[tuple[tuple[Any, ...], list[Record]]]:
    groups: dict[tuple[Any, ...], list[Record]] = {}
    for cell in cells:
        groups.setdefault(tuple(cell.get(field) for field in fields), []).append(cell)
    return list(groups.items())


def _summarize_group(group: Sequence[Record], metric: str) -> Record:
    examples = [example for cell in group for example in cell["examples"]]
    failed = sum(cell["failed"] is not None for cell in group)
    return {"failed": failed} | summarize_examples(examples, group[0]["task"]) | _score(group, metric)


def _score(group: Sequence[Record], metric: str) -> Record:
    """Compute the mean score over examples, tasks of equal weight, with its clustered interval."""
    means, examples = list[float](), list[ScoredExample]()
    for _, cells in _group(group, "task"):
        count = sum(len(cell["examples"]) for cell in cells)
        scored = [
            ScoredExample(score, cell.get("filler"), cell["depth"], 1 / count)
            for cell in cells
            for example in cell["examples"]
            if (score := _example_score(example, metric)) is not None
        ]
        if len(scored) < count or not scored:
            return {"score": None, "interval": None}
        means.append(sum(example.score for example in scored) / count)
        examples += scored
    return {"score": sum(means) / len(means), "interval": clustered_interval(examples)}


def _example_score(example: Mapping[str, Any], metric: str) -> float | None:
    if metric == RECALLED and RECALLED not in example:
        # files of earlier versions: all of the answers or none
        return float(example["likeliest"] == example["answer"])
    value: float | None = example.get(metric)
    return value


def _build_ceiling(ceiling: Sequence[Record], group: Sequence[Record], metric: str) -> Record:
    """Score the plain model inside its training length on the tasks and fillers of these cells."""
    wanted = {(cell["task"], cell.get("filler"), cell["depth"]) for cell in group}
    same = [cell for cell in ceiling if (cell["task"], cell.get("filler"), cell["depth"]) in wanted]
    complete = len(same) == len(wanted) and all(cell["failed"] is None for cell in same)
    if not complete:
        return {"ceiling": None}
    scored = _score(same, metric)
    return {"ceiling": None if scored["score"] is None else {"length": same[0]["length"]} | scored}


def summarize_examples(examples: Sequence[Mapping[str, Any]], task: str) -> Record:
    """Count examples, and hits, which give all answers, with Wilson's 95 % interval of their share.

    share: of all answers given. passed: examples with as many answers as the task needs. forced: examples whose answer
    greedy decoding would give word for word. recalled: share of answers of which that is so. likeliest: share of the
    answer's tokens; logprob: the mean of them. tokens: the real lengths, the shortest and the longest.

    Args:
        examples: as they were measured.
        task: whose they are.
    """
    count = len(examples)
    shares = [example[SHARE] for example in examples if SHARE in example]
    generated = count > 0 and len(shares) == count
    hits = sum(share == 1 for share in shares) if generated else None
    low, high = (None, None) if hits is None else wilson_interval(hits, count)
    answer = sum(example["answer"] for example in examples)
    recalled = [_example_score(example, RECALLED) or 0.0 for example in examples]
    return {
        "count": count,
        "hits": hits,
        "low": low,
        "high": high,
        "share": sum(shares) / count if generated else None,
        "passed": _count_passed(shares if generated else recalled, task) if count else None,
        "forced": sum(example["likeliest"] == example["answer"] for example in examples) if count else None,
        "recalled": sum(recalled) / count if count else None,
        "likeliest": sum(example["likeliest"] for example in examples) / answer if count else None,
        "logprob": sum(example["logprob"] for example in examples) / answer if count else None,
        "tokens": [choose(example["tokens"] for example in examples) for choose in (min, max)] if count else None,
    }


def _count_passed(scores: Sequence[float], task: str) -> int:
    least = ALL[task].pass_share if task in ALL else 1.0
    return sum(score >= least for score in scores)
