"""Where documents come from: SymPy, files, or a data set on the hub, named by one word of a command line."""

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
from isentrope.data.corpus import CorpusError, Document, documents, record, sympy_documents
from isentrope.utils.extras import name_missing_extras

logger = logging.getLogger("isentrope")
HUB = "hub:"


@dataclass(frozen=True)
class Source:
    """`sympy`; a file, a folder or a glob; or `owner/name`, a data set on the hub (`hub:` before it forces that).

    column: what holds the text. subset, split (`train` unless named) and data_files (a glob inside the data set) choose
    a part of a hub data set. skip_broken: what cannot be read is a warning, not an error. limit: the first so many.
    """

    word: str
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
                raise ValueError(f"{given[0]}: expected a data set on the hub, got {self.word!r}")

    @cached_property
    def kind(self) -> str:
        """`sympy`, `files` or `hub`."""
        if self.word == "sympy":
            return "sympy"
        if self.word.startswith(HUB):
            return "hub"
        if self.word and (Path(self.word).exists() or glob.has_magic(self.word)):
            return "files"
        if re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", self.word):
            return "hub"
        expected = "'sympy', a file, a folder, a glob, or a data set on the hub as owner/name"
        raise ValueError(f"source: expected {expected}, got {self.word!r}")

    def documents(self) -> Iterator[Document]:
        """The documents, read as they are asked for."""
        return islice(self._all(), self.limit)

    def _all(self) -> Iterator[Document]:
        if self.kind == "sympy":
            yield from sympy_documents()
        elif self.kind == "files":
            yield from documents(self.paths, column=self.column, skip_broken=self.skip_broken)
        else:
            yield from self._rows()

    def fingerprint(self) -> str:
        """sha256 of the content (of the revision, where the hub has it) and of what is taken from it."""
        if self.kind == "sympy":
            content: Any = corpus.SYMPY_SHA256
        elif self.kind == "files":
            content = [[path.name, _sha256(path)] for path in self.paths]
        else:
            content = self._revision()
        part = [self.column, self.subset, self.split, self.data_files, self.skip_broken, self.limit]
        return hashlib.sha256(json.dumps([content, part]).encode()).hexdigest()

    @cached_property
    def paths(self) -> list[Path]:
        """The files of a folder and the folders in it, or those of a glob, by name.

        Of a folder, hidden files are left out, and with a warning what is no text, such as pictures beside it.
        """
        whole = Path(self.word)
        if whole.is_file():
            return [whole]
        if whole.is_dir():
            found = [path for path in whole.rglob("*") if not _hidden(path.relative_to(whole)) and not _binary(path)]
        else:
            found = [Path(path) for path in glob.glob(self.word, recursive=True)]
        files = sorted(path for path in found if path.is_file())
        if not files:
            raise CorpusError(f"{self.word}: expected files, got none")
        return files

    @cached_property
    def _builder(self) -> Any:
        with name_missing_extras():
            from datasets import load_dataset_builder
        name = self.word.removeprefix(HUB)
        try:
            return load_dataset_builder(name, self.subset, data_files=self.data_files)
        except (OSError, ValueError) as error:  # no such data set, subset or files; no network
            raise CorpusError(f"{name}: cannot be loaded: {error}") from error

    def _revision(self) -> list[list[str]]:
        """Data files and their revision; of files that are local, as in `hub:/folder`, their content."""
        found = []
        for split, files in sorted((self._builder.config.data_files or {}).items(), key=lambda item: str(item[0])):
            for path, origin in zip(files, files.origin_metadata, strict=True):
                local = Path(path).is_file()
                found.append([str(split), *((Path(path).name, _sha256(Path(path))) if local else (path, *origin))])
        return found or [[self._builder.hash]]

    def _rows(self) -> Iterator[Document]:
        name, split = self.word.removeprefix(HUB), self.split or "train"
        try:
            rows = self._builder.as_streaming_dataset(split=split)
        except ValueError as error:
            raise CorpusError(f"{name}: expected a split it has, got {split!r}: {error}") from error
        columns, number = rows.column_names, 0
        if columns is not None and not {self.column, "input_ids"} & set(columns):
            raise CorpusError(f"{name}: expected a column {self.column!r}, got {', '.join(columns)}")
        try:
            for number, row in enumerate(rows, 1):
                found = record(row, f"{name}:{number}", f"{name}: row {number}", self.column)
                if isinstance(found, Document):
                    yield found
                else:
                    self._broken(found)
        except (OSError, EOFError, ValueError) as error:
            if isinstance(error, CorpusError):
                raise
            self._broken(CorpusError(f"{name}: cannot be read past row {number}: {error}"))

    def _broken(self, error: CorpusError) -> None:
        if not self.skip_broken:
            raise error
        logger.warning("skipped: %s", error)


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _binary(path: Path) -> bool:
    """Whether a file is of no kind that is known, and has a zero among its first bytes, as text does not."""
    if not path.is_file() or path.suffix in corpus.PACKED:
        return False
    with path.open("rb") as file:
        binary = b"\0" in file.read(4096)
    if binary:
        logger.warning("left out %s: it is no text", path)
    return binary


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
