"""A corpus by its location: SymPy, files, or a data set on the hub."""

from __future__ import annotations

import glob
import hashlib
import json
import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

from isentrope.data import corpus
from isentrope.data.corpus import CorpusError, Document, parse_record, read_documents, read_sympy_documents
from isentrope.data.prepared import MANIFEST
from isentrope.utils.extras import name_missing_extras

logger = logging.getLogger("isentrope")
HUB_PREFIX = "hub:"


@dataclass(frozen=True)
class Source:
    """Where documents come from, and which of them to read.

    Args:
        location: `sympy`; a file, a folder or a glob; or `owner/name`, a data set on the hub (`hub:` before it forces
            that).
        column: The field that holds the text.
        subset: Configuration of a hub data set.
        split: Split of a hub data set; `train` by default.
        data_files: A glob inside a hub data set.
        skip_broken: Warn about what cannot be read instead of raising.
        limit: Read only the first so many documents.
    """

    location: str
    column: str = "text"
    subset: str | None = None
    split: str | None = None
    data_files: str | None = None
    skip_broken: bool = False
    limit: int | None = None

    def __post_init__(self) -> None:
        if self.limit is not None and self.limit < 1:
            raise ValueError(f"limit: expected 1 or more, got {self.limit}")
        if self.kind != "hub":
            given = [name for name in ("subset", "split", "data_files") if getattr(self, name) is not None]
            if given:
                raise ValueError(f"{given[0]}: expected a data set on the hub, got {self.location!r}")

    @cached_property
    def kind(self) -> str:
        """Return `sympy`, `files` or `hub`."""
        if self.location == "sympy":
            return "sympy"
        if self.location.startswith(HUB_PREFIX):
            return "hub"
        if self.location and (Path(self.location).exists() or glob.has_magic(self.location)):
            return "files"
        if re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", self.location):
            return "hub"
        expected = "'sympy', a file, a folder, a glob, or a data set on the hub as owner/name"
        raise ValueError(f"source: expected {expected}, got {self.location!r}")

    def documents(self) -> Iterator[Document]:
        """Yield the documents lazily."""
        return islice(self._read_all(), self.limit)

    def _read_all(self) -> Iterator[Document]:
        if self.kind == "sympy":
            yield from read_sympy_documents()
        elif self.kind == "files":
            yield from read_documents(self.paths, column=self.column, skip_broken=self.skip_broken)
        else:
            yield from self._read_rows()

    def fingerprint(self) -> str:
        """Return a hash of the content (of its revision, on the hub) and of the part that is read."""
        if self.kind == "sympy":
            content: Any = corpus.SYMPY_SHA256
        elif self.kind == "files":
            content = [[path.name, _hash_file(path)] for path in self.paths]
        else:
            content = self._revision()
        part = [self.column, self.subset, self.split, self.data_files, self.skip_broken, self.limit]
        return hashlib.sha256(json.dumps([content, part]).encode()).hexdigest()

    @cached_property
    def paths(self) -> list[Path]:
        """The files of a folder (searched recursively) or of a glob, sorted by name.

        In a folder, hidden files are skipped, and binary files with a warning.
        """
        root = Path(self.location)
        if root.is_file():
            if _is_binary(root):
                raise CorpusError(
                    f"{root}: expected text in UTF-8, got a file with zeros in it; convert it or name others"
                )
            return [root]
        if root.is_dir():
            matches = [path for path in root.rglob("*") if not _is_hidden(path.relative_to(root)) and not _skips(path)]
        else:
            matches = [Path(path) for path in glob.glob(self.location, recursive=True)]
        files = sorted(path for path in matches if path.is_file())
        if not files:
            raise CorpusError(f"{self.location}: expected files, got none")
        return files

    @cached_property
    def _builder(self) -> Any:
        with name_missing_extras():
            from datasets import load_dataset_builder
        name = self.location.removeprefix(HUB_PREFIX)
        try:
            return load_dataset_builder(name, self.subset, data_files=self.data_files)
        except (OSError, ValueError) as error:  # no such data set, subset or files, or no network
            raise CorpusError(f"{name}: cannot be loaded: {error}") from error

    def _revision(self) -> list[list[str]]:
        """List the data files with their revision, or with their content hash if they are local as in `hub:/folder`."""
        revision = []
        for split, files in sorted((self._builder.config.data_files or {}).items(), key=lambda item: str(item[0])):
            for path, origin in zip(files, files.origin_metadata, strict=True):
                local = Path(path).is_file()
                revision.append(
                    [str(split), *((Path(path).name, _hash_file(Path(path))) if local else (path, *origin))]
                )
        return revision or [[self._builder.hash]]

    def _read_rows(self) -> Iterator[Document]:
        name, split = self.location.removeprefix(HUB_PREFIX), self.split or "train"
        try:
            rows = self._builder.as_streaming_dataset(split=split)
        except ValueError as error:
            raise CorpusError(f"{name}: expected a split it has, got {split!r}: {error}") from error
        columns, number = rows.column_names, 0
        if columns is not None and not {self.column, "input_ids"} & set(columns):
            raise CorpusError(f"{name}: expected a column {self.column!r}, got {', '.join(columns)}")
        try:
            for number, row in enumerate(rows, 1):
                result = parse_record(row, f"{name}:{number}", f"{name}: row {number}", self.column)
                if isinstance(result, Document):
                    yield result
                else:
                    self._raise_or_warn(result)
        except (OSError, EOFError, ValueError) as error:
            if isinstance(error, CorpusError):
                raise
            self._raise_or_warn(CorpusError(f"{name}: cannot be read past row {number}: {error}"))

    def _raise_or_warn(self, error: CorpusError) -> None:
        if not self.skip_broken:
            raise error
        logger.warning("skipped: %s", error)


def find_text_files(location: str) -> list[Path]:
    """Return the text files at a file, folder or glob, for a causal model.

    Raises:
        ValueError: Nothing is there, or it is a corpus prepared for GAU-α.
    """
    if (Path(location) / MANIFEST).is_file():
        raise ValueError(f"data: expected text for a causal model, got {location}, prepared for GAU-α")
    if not Path(location).exists() and not glob.has_magic(location):
        raise ValueError(f"data: expected a file, a folder or a glob, got {location!r}, which is not there")
    return Source(location).paths


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _is_binary(path: Path) -> bool:
    """Return whether a file of no known format has a zero among its first bytes, which text never has."""
    if not path.is_file() or path.suffix in corpus.BINARY_SUFFIXES:
        return False
    with path.open("rb") as file:
        return b"\0" in file.read(4096)


def _skips(path: Path) -> bool:
    """Return whether a file of a folder is left out, with a warning."""
    if binary := _is_binary(path):
        logger.warning("skipped %s: not a text file", path)
    return binary


def _hash_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
