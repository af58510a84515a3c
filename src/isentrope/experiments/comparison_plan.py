"""Plans that compare many recipes on one causal model, on several kinds of text and of filler.

A plan names neither the model nor where the texts are, so that one file serves every copy of a model:

    title: A model at four times its training length of 8192 tokens
    dtype: bfloat16                                   # the model's own by default
    perplexity:
      edges: [0, 4096, 8192, 16384, 32768]
      documents: 3                                    # of each kind, at most
      texts: {novels: novels.jsonl}                   # kind: file, folder or glob in the folder of texts
    retrieval:
      tasks: [passkey]
      lengths: [32768]
      ceiling: 8192                                   # also ask the plain model here, inside its training length
      depths: [0, 50, 100]
      examples: 2                                     # of each task, length and depth
      texts: {novels: novels-filler.jsonl, repetitive: null}     # null: plain sentences, repeated
      recipes: [plain, "rerope:window=4096"]          # where not all of the plan's are wanted
    recipes: [plain, "rerope:window=4096", …]
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from isentrope.data.tasks import SENTENCES, expand_tasks
from isentrope.data.tasks.fillers import TEXT
from isentrope.data.tasks.registry import ALL
from isentrope.evaluation.retrieval import Cell, RetrievalConfig
from isentrope.experiments.plan_schema import ComparisonFile, ComparisonRetrieval

PARTS = ("perplexity", "retrieval")
TIME = "time"  # of passes over the first text, in a run of its own
DEPTH_ORDER = (50, 0, 25, 75, 100)  # the middle of a text is the hardest, so that it is asked about first
PLAIN = "plain"


@dataclass(frozen=True)
class PerplexityPart:
    """Documents to read.

    Args:
        edges: Of the buckets of positions.
        documents: Of each kind, at most.
        texts: Files, folders or globs by kind of text.
    """

    edges: tuple[int, ...]
    documents: int
    texts: dict[str, str]


@dataclass(frozen=True)
class RetrievalPart:
    """Questions to ask.

    Args:
        config: Tasks, lengths, depths and examples; its recipes are not used.
        texts: The same by kind of filler; None for plain sentences.
        ceiling: Length inside the training length at which the plain model is asked the same, if at all.
        recipes: Those to ask under; None for all of the plan's.
    """

    config: RetrievalConfig
    texts: dict[str, str | None]
    ceiling: int | None
    recipes: tuple[str, ...] | None

    def configure(self, cell: Cell, recipes: tuple[str, ...]) -> RetrievalConfig:
        """Build the configuration that measures one cell under some recipes."""
        task, length, depth, filler = cell
        depths = self.config.depths if depth is None else (depth,)
        options: dict[str, Any] = {"tasks": (task,), "lengths": (length,), "depths": depths, "fillers": (filler,)}
        return replace(self.config, recipes=recipes, **options)

    def place(self, cell: Cell, kind: str) -> Cell | None:
        """Put a cell into a kind of filler; None for a task with a text of its own, which the first kind has."""
        task, length, depth, _ = cell
        if ALL[task].filler is not None:
            return cell if kind == next(iter(self.texts)) else None
        return task, length, depth, TEXT if self.texts[kind] else SENTENCES

    def cells(self) -> list[Cell]:
        """List tasks, lengths and depths: the middle of the text first, then the ceiling before the longest."""
        order: dict[float, int] = {depth: index for index, depth in enumerate(DEPTH_ORDER)}
        lengths = self.config.lengths if self.ceiling is None else (*self.config.lengths, self.ceiling)
        cells = replace(self.config, lengths=tuple(dict.fromkeys(lengths))).cells
        return sorted(cells, key=lambda cell: (order.get(cell[2] or 0, len(order)), cell[1] != self.ceiling, -cell[1]))

    def select_recipes(self, cell: Cell, recipes: tuple[str, ...]) -> tuple[str, ...]:
        """Select the recipes of a cell: the plain model alone where only the ceiling is asked."""
        if cell[1] not in self.config.lengths:
            return (PLAIN,)
        return tuple(recipe for recipe in recipes if self.recipes is None or recipe in self.recipes)


@dataclass(frozen=True)
class ComparisonPlan:
    """A comparison of recipes on one causal model.

    Args:
        name: Of the plan, and of its folder of results.
        title: Of the leaderboard.
        recipes: Texts of recipes, unchecked: a build may not know some of them yet.
        perplexity: Documents to read; None for none.
        retrieval: Questions to ask; None for none.
        dtype: Of the model; auto is bfloat16 on a GPU and float32 on a CPU.
        timed: Time passes over the first document of `perplexity`, and measure nothing else.
    """

    name: str
    title: str
    recipes: tuple[str, ...]
    perplexity: PerplexityPart | None
    retrieval: RetrievalPart | None
    dtype: str = "auto"
    timed: bool = False

    def select(
        self, only: str | None = None, kinds: Collection[str] = (), without: Collection[str] = ()
    ) -> ComparisonPlan:
        """Narrow a plan.

        Args:
            only: `perplexity`, `retrieval` or `time`; None for the first two.
            kinds: Kinds of text and of filler; all if empty.
            without: Leave out recipes with one of these in their text.

        Returns:
            The narrower plan.

        Raises:
            ValueError: Nothing is left, a kind is unknown, or a text in `without` is in no recipe.
        """
        given = [kind for part in (self.perplexity, self.retrieval) if part for kind in part.texts]
        if strangers := [kind for kind in kinds if kind not in given]:
            names = ", ".join(dict.fromkeys(given))
            raise ValueError(f"kinds: expected some of plan {self.name}'s, {names}, got {strangers[0]!r}")
        parts: dict[str, Any] = {}
        wanted = PARTS if only is None else ("perplexity",) if only == TIME else (only,)
        for name in PARTS:
            part: Any = getattr(self, name) if name in wanted else None
            texts = {k: v for k, v in part.texts.items() if not kinds or k in kinds} if part else {}
            parts[name] = replace(part, texts=texts) if texts else None
        known = (*self.recipes, PLAIN) if only == TIME else self.recipes
        if unknown := [text for text in without if not any(text in recipe for recipe in known)]:
            raise ValueError(
                f"without: expected part of a recipe in plan {self.name}, got {unknown[0]!r}; see its recipes"
            )
        recipes = tuple(recipe for recipe in self.recipes if not any(text in recipe for text in without))
        if only == TIME and parts["perplexity"] is None:
            raise ValueError(f"plan {self.name}: time is that of reading a text of its perplexity, and none is left")
        if not recipes or parts == dict.fromkeys(PARTS):
            raise ValueError(f"plan {self.name}: nothing is left to measure; choose other parts, kinds or recipes")
        if only == TIME:
            kind, file = next(iter(parts["perplexity"].texts.items()))
            parts["perplexity"] = replace(parts["perplexity"], documents=1, texts={kind: file})
            if not any(text in PLAIN for text in without):
                recipes = tuple(dict.fromkeys((PLAIN, *recipes)))  # what times are relative to
        return replace(self, recipes=recipes, timed=only == TIME, **parts)


def load_comparison(path: Path) -> ComparisonPlan:
    """Load a plan from a YAML file.

    Raises:
        ValueError: There is no such file, or it has an unknown key or a wrong value.
    """
    if not path.is_file():
        raise ValueError(f"{path}: expected a file with a plan")
    where = f"plan {path.stem}"
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"{where}: expected YAML, got {error}") from None
    file = ComparisonFile.read(where, data)
    recipes, perplexity, retrieval = file.recipes, file.perplexity, file.retrieval
    if not recipes or len(set(recipes)) != len(recipes):
        raise ValueError(f"{where}: recipes: expected one or more, each once, got {list(recipes)}")
    if perplexity is None and retrieval is None:
        raise ValueError(f"{where}: expected perplexity, retrieval or both, got neither")
    return ComparisonPlan(
        path.stem,
        file.title or path.stem,
        recipes,
        PerplexityPart(**perplexity.given()) if perplexity else None,
        _parse_retrieval(f"{where}: retrieval", retrieval, recipes) if retrieval else None,
        file.dtype,
    )


def _parse_retrieval(where: str, entry: ComparisonRetrieval, recipes: tuple[str, ...]) -> RetrievalPart:
    options = entry.given("texts", "ceiling", "recipes") | {"tasks": expand_tasks(entry.tasks)}
    if others := [recipe for recipe in entry.recipes or () if recipe not in recipes]:
        raise ValueError(f"{where}: recipes: expected some of the plan's, got {others[0]!r}")
    config = RetrievalConfig((PLAIN,), **options, score="forced")
    return RetrievalPart(config, entry.texts, entry.ceiling, entry.recipes)
