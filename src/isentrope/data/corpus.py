"""Documents: from text, JSON-lines, Parquet and FASTA files, plain or compressed, and from SymPy's own sources."""

from __future__ import annotations

import bz2
import codecs
import gzip
import hashlib
import json
import logging
import lzma
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from isentrope.utils.extras import name_missing_extras

logger = logging.getLogger("isentrope")
COMPRESSED: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".xz": lzma.open, ".bz2": bz2.open}
PACKED = (*COMPRESSED, ".parquet")  # text that does not look like it
# SymPy 1.14.0: names and bytes of every module over SHORTEST characters that is not a test
SYMPY_SHA256 = "c7a51730a4e3839a3b3e9848a5956abcdae2d3b2d346312bd81afb26adfc4ffb"
SHORTEST = 4096


@dataclass(frozen=True)
class Document:
    """A text, or the tokens it was turned into beforehand. group: what belongs together when documents are split."""

    name: str
    text: str | None = None
    tokens: tuple[int, ...] | None = None
    group: str | None = None

    @property
    def sha256(self) -> str:
        content = self.text if self.text is not None else json.dumps(self.tokens)
        return hashlib.sha256(content.encode()).hexdigest()


class CorpusError(ValueError):
    """A file, or a line of one, that holds no document."""


def documents(paths: Iterable[Path], *, column: str = "text", skip_broken: bool = False) -> Iterator[Document]:
    """Every document of these files, one after another, read as they are asked for.

    `.jsonl` (one object a line with `column` or `input_ids`, and `id` and `group` where it has them), `.parquet` (the
    same by row), `.fasta`, `.fa`, `.fna` (one record a document), and anything else as one text; all but Parquet also
    as `.gz`, `.xz` or `.bz2`. What cannot be read is an error that names the file and the line, or with `skip_broken` a
    warning.
    """
    for path in paths:
        if not path.is_file():
            raise CorpusError(f"{path}: expected a file")
        for found in _guarded(path, _reader(path)(path, column)):
            if isinstance(found, Document):
                yield found
            elif skip_broken:
                logger.warning("skipped: %s", found)
            else:
                raise found


def sympy_documents(verify: bool = True) -> list[Document]:
    """The default corpus: SymPy's modules over 4096 characters, without tests, grouped by subpackage.

    torch installs SymPy, so they are on every machine; `verify` makes sure that they are those of version 1.14.0.
    """
    spec = find_spec("sympy")
    if spec is None or not spec.submodule_search_locations:
        raise CorpusError("sympy: expected the package to be installed, got none")
    root = Path(next(iter(spec.submodule_search_locations)))
    names = sorted(path.relative_to(root).as_posix() for path in root.rglob("*.py"))
    found, content = [], hashlib.sha256()
    for name in names:
        parts = name.split("/")
        text = (root / name).read_bytes().decode("utf-8")
        if "tests" not in parts and len(text) > SHORTEST:
            content.update(name.encode() + b"\0" + text.encode() + b"\0")
            found.append(Document(name, text=text, group=parts[0]))
    if verify and content.hexdigest() != SYMPY_SHA256:
        raise CorpusError("sympy: expected the sources of version 1.14.0, got others; pip install sympy==1.14.0")
    return found


Found = Document | CorpusError


def _guarded(path: Path, found: Iterator[Found]) -> Iterator[Found]:
    """What a reader finds, and where it broke off as a file that is cut short or of another kind."""
    try:
        yield from found
    except (OSError, EOFError, UnicodeDecodeError, lzma.LZMAError, ValueError) as error:
        if isinstance(error, CorpusError):
            raise
        yield CorpusError(f"{path}: cannot be read to its end: {error}")


def _reader(path: Path) -> Callable[[Path, str], Iterator[Found]]:
    suffixes = [suffix for suffix in path.suffixes if suffix not in COMPRESSED]
    kind = suffixes[-1] if suffixes else ""
    if kind in (".fasta", ".fa", ".fna"):
        return _fasta
    return {".jsonl": _json_lines, ".json": _json, ".parquet": _parquet}.get(kind, _whole)


def _open(path: Path) -> TextIO:
    """Without the byte-order mark that some editors put before a text."""
    return COMPRESSED.get(path.suffix, open)(path, "rt", encoding="utf-8-sig")


def _lines(path: Path) -> Iterator[tuple[int, str | CorpusError]]:
    """Lines by number, each decoded by itself: a wrong byte breaks its own line, and no other."""
    number = 0
    try:
        with _open_bytes(path) as lines:
            for line in chain.from_iterable(map(bytes.splitlines, lines)):  # an old end of line is a lone \r
                number += 1
                yield number, _decoded(path, number, line.removeprefix(codecs.BOM_UTF8) if number == 1 else line)
    except (OSError, EOFError, lzma.LZMAError) as error:
        raise EOFError(f"past line {number}: {error}") from error


def _open_bytes(path: Path) -> BinaryIO:
    return COMPRESSED.get(path.suffix, open)(path, "rb")


def _decoded(path: Path, number: int, line: bytes) -> str | CorpusError:
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as error:
        return CorpusError(f"{path}:{number}: expected UTF-8, got {error}")


def _whole(path: Path, column: str) -> Iterator[Found]:
    with _open(path) as file:
        yield Document(path.name, text=file.read())


def _json_lines(path: Path, column: str) -> Iterator[Found]:
    for number, line in _lines(path):
        if isinstance(line, CorpusError):
            yield line
            continue
        if not line.strip():
            continue
        try:
            data = json.loads(line)
        except (ValueError, RecursionError) as error:  # of numbers with thousands of digits, of brackets in brackets
            yield CorpusError(f"{path}:{number}: expected a JSON object a line, got {error}")
            continue
        yield record(data, f"{path.name}:{number}", f"{path}:{number}", column)


def _json(path: Path, column: str) -> Iterator[Found]:
    """A list of documents, or one a line, as .jsonl has them; any other JSON is a text like others."""
    with _open(path) as file:
        text = file.read()
    data = _parsed(text)
    if isinstance(data, list) and data and all(_is_record(each, column) for each in data):
        for number, each in enumerate(data, 1):
            yield record(each, f"{path.name}:{number}", f"{path}:{number}", column)
    elif data is None and _is_record(_parsed(text.lstrip().partition("\n")[0]), column):
        yield from _json_lines(path, column)
    else:
        yield Document(path.name, text=text)


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _is_record(data: Any, column: str) -> bool:
    return isinstance(data, dict) and bool({column, "input_ids"} & set(data))


def _parquet(path: Path, column: str) -> Iterator[Found]:
    with name_missing_extras():
        from pyarrow.parquet import ParquetFile
    number = 0
    for batch in ParquetFile(path).iter_batches(64):
        for data in batch.to_pylist():
            number += 1
            yield record(data, f"{path.name}:{number}", f"{path}:{number}", column)


def record(data: Any, name: str, where: str, column: str) -> Found:
    """The document of one object: its `column` or `input_ids`, and its `id` and `group` where it has them."""
    if not isinstance(data, dict):
        return CorpusError(f"{where}: expected an object with {column!r}, got {type(data).__name__}")
    name = str(data.get("id", name))
    group = None if data.get("group") is None else str(data["group"])
    text = data.get(column)
    if isinstance(text, str):
        try:
            text.encode()
        except UnicodeEncodeError as error:  # half a surrogate pair, which JSON can write
            return CorpusError(f"{where}: expected text, got {error}")
        return Document(name, text=text, group=group)
    tokens = data.get("input_ids")
    if isinstance(tokens, list) and all(isinstance(token, int) for token in tokens):
        return Document(name, tokens=tuple(tokens), group=group)
    return CorpusError(f"{where}: expected {column!r} or 'input_ids', got {', '.join(map(str, data)) or 'nothing'}")


def _fasta(path: Path, column: str) -> Iterator[Found]:
    name, parts, broken = None, list[str](), False
    for number, line in _lines(path):
        if isinstance(line, CorpusError):
            yield line
            name, broken = None, True  # and with it the record
        elif line.startswith(">"):
            if name is not None:
                yield Document(name, text="".join(parts))
            name, parts = line[1:].split(maxsplit=1)[0] if line[1:].strip() else f"{path.name}:{number}", []
            broken = False
        elif line.strip() and not broken:
            if name is None:
                yield CorpusError(f"{path}:{number}: expected a record that begins with '>', got {line[:20]!r}")
                return
            parts.append(line.strip())
    if name is not None:
        yield Document(name, text="".join(parts))
