"""Results files: their schema, and the store that an interrupted run resumes from.

A file is complete or absent, and a broken one is measured again. Files have had one schema so far, VERSION 1, and do
not name it; a file that names a newer one is refused.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from isentrope.utils.files import BrokenFileError, read_fields, write_atomically

logger = logging.getLogger("isentrope")
VERSION = 1
AGAIN = "run the same command again, which measures anew"
MASKED_METRICS = ("ppl", "ppl_low", "ppl_high", "acc", "acc_low", "acc_high")
Cell = dict[str, Any]
Key = tuple[Any, ...]


class ModelRecord(TypedDict):
    """Which model was measured. weights, config: hashes of samples and of what attention reads of the config; files of
    early versions have none."""

    name: str
    type: str
    dtype: str
    weights: NotRequired[str]
    config: NotRequired[str]


class TextRecord(TypedDict):
    name: str
    sha256: str


class PerplexityCell(TypedDict):
    """One text under one recipe: losses in nats and bytes of text, summed over each bucket of positions."""

    recipe: str
    text: str
    loss: list[float]
    bytes: NotRequired[list[int] | None]
    seconds: float
    peak_bytes: NotRequired[int | None]


class PerplexityRow(TypedDict):
    """A recipe over all texts, bucket by bucket, with 95 % intervals."""

    recipe: str
    texts: int
    perplexity: list[float]
    low: list[float]
    high: list[float]
    bits_per_byte: NotRequired[list[float] | None]


class ChangeRow(TypedDict):
    """Perplexity of a recipe against another in per cent, with a 95 % interval: by bucket, or one number."""

    recipe: str
    against: str
    percent: Any
    low: Any
    high: Any


class PerplexityResults(TypedDict):
    """`perplexity.json`. inside: changes inside the training length; failed: cells of the last run without numbers."""

    model: ModelRecord
    config: dict[str, Any]
    texts: list[TextRecord]
    cells: list[PerplexityCell]
    rows: list[PerplexityRow]
    train_length: NotRequired[int | None]
    paired: NotRequired[list[ChangeRow]]
    inside: NotRequired[list[ChangeRow]]
    failed: NotRequired[list[dict[str, str]]]
    run: NotRequired[dict[str, Any]]
    version: NotRequired[int]


@dataclass(frozen=True)
class Schema:
    """What one kind of results file holds, and when a run may resume from it.

    Args:
        file: its name.
        cell_key: fields that identify a cell.
        identity: fields of the head, or of its `config` as `config.NAME`, that must be as in the earlier run.
        mismatch: what to call a file where they are not.
        needed: fields it must have, beside model, config and cells.
        merged: mappings of the head, to which the earlier run's entries are added; those in both must agree.
        accumulated: fields of `config` to which the earlier run's values are added, in their order.
        sorted: the same, sorted.
        ensure_ascii: names of files that are no UTF-8 can be written in ASCII alone.
        upgrade: turns results of earlier versions into what this one writes.
    """

    file: str
    cell_key: tuple[str, ...]
    identity: tuple[str, ...]
    mismatch: str
    needed: tuple[str, ...] = ()
    merged: tuple[str, ...] = ()
    accumulated: tuple[str, ...] = ()
    sorted: tuple[str, ...] = ()
    ensure_ascii: bool = False
    upgrade: Callable[[dict[str, Any]], dict[str, Any]] = dict

    def key(self, cell: Mapping[str, Any]) -> Key:
        """Return what identifies a cell."""
        return tuple(cell[name] for name in self.cell_key)


def upgrade_retrieval(results: dict[str, Any]) -> dict[str, Any]:
    """Name the filler in results of versions that had one alone: their plain sentences, or `text` for any other."""
    if "fillers" in results or "examples" not in results:
        return results
    from isentrope.data.tasks.fillers import SENTENCES, TEXT, load_filler  # only reports of old files need them

    name = SENTENCES if results.get("text") == load_filler(SENTENCES).sha256 else TEXT
    cells = [{"filler": name} | cell for cell in results["cells"]]
    config = {"fillers": [name]} | results["config"]
    others = {key: value for key, value in results.items() if key not in ("examples", "text")}
    return others | {"fillers": {name: results["examples"]}, "config": config, "cells": cells}


PERPLEXITY = Schema(
    "perplexity.json",
    cell_key=("recipe", "text"),
    identity=("config.edges", "config.seed"),
    mismatch="another model or other buckets",
    accumulated=("recipes",),
    ensure_ascii=True,
)
RETRIEVAL = Schema(
    "retrieval.json",
    cell_key=("recipe", "task", "length", "depth", "filler"),
    identity=("config.examples",),
    mismatch="another model, or other examples or more or fewer",
    needed=("fillers",),
    merged=("fillers", "texts"),
    accumulated=("recipes", "tasks", "fillers"),
    sorted=("lengths", "depths"),
    upgrade=upgrade_retrieval,
)
TIMES = Schema(
    "times.json",
    cell_key=("recipe",),
    identity=("config", "text", "device"),
    mismatch="times of another model, text, length or device",
    needed=("text", "device"),
)
CALIBRATION = Schema(
    "calibrate.json",
    cell_key=("key", "text"),
    identity=("config", "train_length", "knots", "texts"),
    mismatch="another model, recipe, length or other texts",
    needed=("fits", "seconds"),
)


# in messages, where the field is a hash
FIELD_NAMES = {"fillers": "prompts or tokenizer", "parts": "the files of your own parts"}


class ResultsStore:
    """The head and cells of one results file; cells of an earlier run of the same are there from the start.

    Args:
        folder: where the file is, or None to keep everything in memory.
        schema: which kind of results they are.
        head: all but the cells: `model`, `config` and what else identifies the run.

    Raises:
        ValueError: the folder holds results of another model or other data.
    """

    def __init__(self, folder: Path | None, schema: Schema, head: Mapping[str, Any]) -> None:
        self.schema = schema
        self.path = folder and folder / schema.file
        self.head: dict[str, Any] = json.loads(json.dumps(head))
        self.head |= hash_parts(self.head["config"])
        self._seen = self._identify_file()
        self.earlier = self._read_earlier()
        if self.earlier:
            earlier, config = self.earlier["config"], self.head["config"]
            for name in schema.accumulated:
                config[name] = list(dict.fromkeys((*earlier.get(name, ()), *config[name])))
            config |= {name: sorted({*earlier[name], *config[name]}) for name in schema.sorted}
            merged = [name for name in (*schema.merged, "parts") if name in self.earlier or name in self.head]
            self.head |= {name: self.earlier.get(name, {}) | self.head.get(name, {}) for name in merged}
        self.cells: dict[Key, Cell] = {schema.key(cell): cell for cell in self.earlier.get("cells", [])}

    def _read_earlier(self) -> dict[str, Any]:
        """Read the results of an earlier run; empty where there are none."""
        earlier = self.path and read_if_whole(self.path, "model", "config", "cells", schema=self.schema)
        if not earlier:
            return {}
        if differing := list_differences(self.schema, earlier, self.head):
            raise ValueError(f"{self.path}: holds {self.schema.mismatch} {describe_difference(differing)}")
        return earlier

    def results(self) -> dict[str, Any]:
        """Return head and cells as the file has them."""
        return self.head | {"cells": list(self.cells.values())}

    def write(self, results: Mapping[str, Any]) -> None:
        """Write results whole, or leave the file as it is.

        Raises:
            ValueError: another process has written to it, whose cells would be lost.
        """
        if self.path is None:
            return
        if self._identify_file() != self._seen:
            raise ValueError(
                f"{self.path}: another process has written to it meanwhile; run the same command again when that has "
                "ended, to resume from its results, or choose another folder"
            )
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_results(self.path, results, self.schema.ensure_ascii)
        self._seen = self._identify_file()

    def _identify_file(self) -> tuple[int, int, int] | None:
        """Return what changes whenever the file is written; None where there is none."""
        try:
            status = self.path.stat() if self.path is not None else None
        except FileNotFoundError:
            return None
        return status and (status.st_ino, status.st_mtime_ns, status.st_size)


def hash_parts(config: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """Return what a results file says of the files that define parts of a user's own; nothing without such parts.

    Args:
        config: with the recipes measured, by which the parts are chosen; all parts where it names no recipes.
    """
    from isentrope.recipe import OWN_PARTS, hash_own_parts  # imports PyTorch, which reports do without

    recipes = config.get("recipes") or config.get("recipe")
    parts = hash_own_parts(json.dumps(recipes)) if recipes else dict(OWN_PARTS)
    return {"parts": parts} if parts else {}


def list_differences(schema: Schema, earlier: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return the fields in which the heads of two runs differ that may not share a results file."""
    differing = [] if is_same_model(earlier["model"], now["model"]) else ["model"]
    differing += [field for field in schema.identity if _get(earlier, field) != _get(now, field)]
    return differing + find_conflicts(earlier, now, (*schema.merged, "parts"))


def find_conflicts(earlier: Mapping[str, Any], now: Mapping[str, Any], fields: Collection[str]) -> list[str]:
    """Return the fields, mappings all, in which both have an entry that differs."""

    def differ(before: Mapping[str, Any], after: Mapping[str, Any]) -> bool:
        return any(before[name] != after[name] for name in before.keys() & after.keys())

    return [field for field in fields if differ(earlier.get(field, {}), now.get(field, {}))]


def describe_difference(fields: Collection[str]) -> str:
    """Say in an error what of an earlier run is not as now, and what to do."""
    words = " and ".join(FIELD_NAMES.get(field, field.removeprefix("config.")) for field in fields)
    return f"({words} differ); choose another folder"


def _get(results: Mapping[str, Any], field: str) -> Any:
    name, _, inner = field.partition(".")
    value = results.get(name)
    return value.get(inner) if inner and isinstance(value, dict) else value


def is_same_model(stored: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    """Whether results are of the model wanted, by the fields they have: early versions had fewer."""
    return {**wanted, **stored} == wanted


def read_results(path: Path, remedy: str, *needed: str) -> dict[str, Any]:
    """Read a results file.

    Args:
        path: the file.
        remedy: what to do about a broken one, for the error.
        needed: fields it must have.

    Raises:
        BrokenFileError: it is no JSON, or lacks a field.
        ValueError: a newer version of isentrope has written it.
    """
    results = read_fields(path, remedy, *needed)
    if (version := results.get("version", VERSION)) != VERSION:
        raise ValueError(f"{path}: results of version {version!r}, this isentrope reads version {VERSION}; upgrade it")
    return results


def read_if_whole(path: Path, *needed: str, schema: Schema | None = None) -> dict[str, Any] | None:
    """Read a results file; None where there is none, or after a warning where it is broken.

    Args:
        path: the file.
        needed: fields it must have.
        schema: what it holds; results of earlier versions are brought up to it.
    """
    if not path.exists():
        return None
    remedy = "all is measured again"
    try:
        results = read_results(path, remedy, *needed)
        if schema is not None:
            results = schema.upgrade(results)
            if lacking := [name for name in schema.needed if name not in results]:
                raise BrokenFileError(f"{path}: expected {', '.join(lacking)}, got a file without; {remedy}")
        return results
    except BrokenFileError as error:
        logger.warning("%s", error)
        return None


def write_results(path: Path, results: Mapping[str, Any], ensure_ascii: bool = False) -> None:
    """Write a JSON file whole, or leave the one that is there."""
    with write_atomically(path) as partial:
        partial.write_text(json.dumps(results, indent=1, ensure_ascii=ensure_ascii), encoding="utf-8")


def list_failures(path: Path, recipes: Collection[str], cells: Collection[Key] | None = None) -> list[str]:
    """Say why cells have no numbers, one line for each.

    Args:
        path: `perplexity.json` or `retrieval.json`.
        recipes: whose cells.
        cells: in `retrieval.json` the (task, length, depth, filler) to look at; all by default.
    """
    results = upgrade_retrieval(read_results(path, AGAIN, "cells"))
    measured = {(cell["recipe"], cell.get("text")) for cell in results["cells"] if not cell.get("failed")}
    failed = [cell for cell in results["cells"] if cell.get("failed")]
    failed += [cell for cell in results.get("failed", []) if (cell["recipe"], cell["text"]) not in measured]
    lines = []
    for cell in failed:
        key = tuple(cell.get(name) for name in RETRIEVAL.cell_key[1:])
        if cell["recipe"] in recipes and (cells is None or key in cells):
            where = f"{cell['task']} at {cell['length']}: " if "task" in cell else ""
            lines.append(f"{cell['recipe']}: {where}{cell['failed']}")
    return lines


def cell_path(out: Path, key: str) -> Path:
    """Return the file of a masked-token cell: one each, since several processes write them side by side."""
    return out / "cells" / f"{key}.json"


def is_done(out: Path, key: str) -> bool:
    """Whether a masked-token cell has its numbers; one that failed has none, and is tried again."""
    cell = read_cell(out, key)
    return cell is not None and cell["result"]["failed"] is None


def read_cell(out: Path, key: str) -> Cell | None:
    """Read a masked-token cell; None where there is none, or after a warning where it is broken."""
    path, remedy = cell_path(out, key), "it has to be measured again"
    if not path.exists():
        return None
    try:
        cell = read_results(path, remedy, "result", "timing")
        if not isinstance(cell["result"], dict) or not {"failed", *MASKED_METRICS} <= set(cell["result"]):
            raise BrokenFileError(f"{path}: broken, without all of its numbers; {remedy}")
    except BrokenFileError as error:
        logger.warning("%s", error)
        return None
    return cell


def write_cell(out: Path, key: str, cell: Cell) -> None:
    """Write a masked-token cell, whole or not at all."""
    path = cell_path(out, key)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_results(path, cell)
