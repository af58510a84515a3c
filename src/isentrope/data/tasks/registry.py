"""The table of retrieval tasks: how each is drafted, where its answer lies, what it is hidden in, when it is passed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from isentrope.data.tasks import facts, needles, variables, words
from isentrope.data.tasks.draw import Draw
from isentrope.data.tasks.example import ExampleDraft
from isentrope.data.tasks.fillers import load_filler
from isentrope.data.tasks.haystack import Haystack
from isentrope.data.tasks.needles import Niah


@dataclass(frozen=True)
class Task:
    """One retrieval task.

    Args:
        draft: Draws an example of open length.
        at_depth: Whether the answer lies at one depth, which is then varied; otherwise all over the text.
        filler: Name of the only text it is hidden in (`TASK_FILLERS`); None for any.
        pass_share: Share of the answers that a reply must name to pass. The score is the share named either way.
    """

    draft: Callable[[Draw], ExampleDraft]
    at_depth: bool = True
    filler: str | None = None
    pass_share: float = 1.0


ALL = {
    "passkey": Task(needles.draft_passkey),
    "needle": Task(needles.draft_needle),
    "multikey": Task(needles.draft_multikey),
    "multivalue": Task(needles.draft_multivalue, at_depth=False),
    "variables": Task(variables.draft_variables, at_depth=False),
    "words": Task(words.draft_words, at_depth=False, filler="list"),
    # RULER's (Hsieh et al., 2024), by its names; its essays are any filler here
    "niah_single_1": Task(Niah(), filler="noise"),
    "niah_single_2": Task(Niah()),
    "niah_single_3": Task(Niah(uuid_values=True)),
    "niah_multikey_1": Task(Niah(keys=4)),
    "niah_multikey_2": Task(Niah(long_keys=True), filler="needles"),
    "niah_multikey_3": Task(Niah(uuid_keys=True, uuid_values=True), filler="identifiers"),
    "niah_multivalue": Task(Niah(values=4, at_depth=False), at_depth=False),
    "niah_multiquery": Task(Niah(keys=4, queries=4, at_depth=False), at_depth=False),
    "vt": Task(variables.draft_ruler_variables, at_depth=False, filler="noise"),
    "cwe": Task(words.draft_common_words, at_depth=False, filler="list"),
    "fwe": Task(words.draft_frequent_words, at_depth=False, filler="list"),
    # facts as in BABILong (Kuratov et al., 2024)
    "facts1": Task(facts.draft_one_fact, at_depth=False),
    "facts2": Task(facts.draft_two_facts, at_depth=False),
    # passed with two of four found, as the field reports it (An et al., 2024)
    "fourneedles": Task(Niah(keys=4, queries=4, at_depth=False, anywhere=False), at_depth=False, pass_share=0.5),
}
TASKS = tuple(ALL)
DEPTH_TASKS = tuple(name for name, task in ALL.items() if task.at_depth)
# the first tasks there were; a hash of their examples identifies a results file
IDENTITY_TASKS = ("passkey", "needle", "multikey", "multivalue", "variables", "words")
GROUPS = {
    "ruler": (*(name for name in TASKS if name.startswith("niah_")), "vt", "cwe", "fwe"),
    "niah": tuple(name for name in TASKS if name.startswith("niah_")),
    "babilong": ("facts1", "facts2"),
    "all": TASKS,
}


def expand_tasks(names: Sequence[str]) -> tuple[str, ...]:
    """Replace groups such as `ruler` by their tasks, each task once.

    Args:
        names: Tasks and groups.
    """
    return tuple(dict.fromkeys(task for name in names for task in GROUPS.get(name, (name,))))


def choose_fillers(task: str, fillers: Sequence[str]) -> tuple[str, ...]:
    """Return the names of the texts that a task is hidden in: its own only one, or these.

    Args:
        task: One of `TASKS`.
        fillers: Names of the fillers wanted.
    """
    own = ALL[task].filler
    return tuple(fillers) if own is None else (own,)


def draft_example(
    task: str, length: int, depth: float | None, seed: int, index: int, haystack: Haystack
) -> ExampleDraft:
    """Draw the needles and the question of an example.

    Args:
        task: One of `TASKS`.
        length: Tokens that the example will be filled up to.
        depth: Of the needle, in percent of the text, for `DEPTH_TASKS`; None for the others.
        seed: Seed of the draw.
        index: Number of the example.
        haystack: The text around the needles; tasks with their own take that instead.
    """
    if task not in TASKS:
        raise ValueError(f"task: expected one of {', '.join(TASKS)}, got {task!r}")
    entry = ALL[task]
    if entry.at_depth == (depth is None) or not 0 <= (depth or 0) <= 100:
        raise ValueError(f"depth: expected {'0 … 100' if entry.at_depth else 'None'} for {task}, got {depth}")
    percent = "" if depth is None else f"{depth:g}"
    random = Random(f"{task} {length} {percent} {seed} {index}")
    text = haystack if entry.filler is None else load_filler(entry.filler)
    return entry.draft(Draw(random, text, (depth or 0) / 100))
