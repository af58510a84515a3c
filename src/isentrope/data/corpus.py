"""Read documents from text, JSON-lines, Parquet and FASTA files, plain or compressed, and from SymPy's sources."""

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
DECOMPRESSORS: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".xz": lzma.open, ".bz2": bz2.open}
BINARY_SUFFIXES = (*DECOMPRESSORS, ".parquet")  # files of bytes that nevertheless hold text
# SymPy 1.14.0: names and bytes of every module over MIN_SYMPY_CHARACTERS that is not a test
SYMPY_SHA256 = "c7a51730a4e3839a3b3e9848a5956abcdae2d3b2d346312bd81afb26adfc4ffb"
MIN_SYMPY_CHARACTERS = 4096


@dataclass(frozen=True)
class Document:
    """A text, or the tokens of one. Documents of the same `group` stay together when a corpus is split."""

    name: str
    text: str | None = None
    tokens: tuple[int, ...] | None = None
    group: str | None = None

    @property
    def sha256(self) -> str:
        content = self.text if self.text is not None else json.dumps(self.tokens)
        return hashlib.sha256(content.encode()).hexdigest()


class CorpusError(ValueError):
    """A file or a line that holds no document."""


def read_documents(paths: Iterable[Path], *, column: str = "text", skip_broken: bool = False) -> Iterator[Document]:
    """Yield every document of these files lazily.

    `.jsonl` holds one object a line, with `column` or `input_ids` and optionally `id` and `group`; `.parquet` the same
    by row; `.fasta`, `.fa` and `.fna` one record a document; any other file is one text. All but Parquet may be
    compressed as `.gz`, `.xz` or `.bz2`.

    Args:
        paths: The files.
        column: The field that holds the text.
        skip_broken: Warn about what cannot be read instead of raising.

    Raises:
        CorpusError: A file or line cannot be read; the message names it.
    """
    for path in paths:
        if not path.is_file():
            raise CorpusError(f"{path}: expected a file")
        for result in _catch_read_errors(path, _select_reader(path)(path, column)):
            if isinstance(result, Document):
                yield result
            elif skip_broken:
                logger.warning("skipped: %s", result)
            else:
                raise result


def read_sympy_documents(verify: bool = True) -> list[Document]:
    """Return the default corpus: SymPy's modules over 4096 characters, without tests, grouped by subpackage.

    torch depends on SymPy, so the sources are always installed.

    Args:
        verify: Check that the sources are those of version 1.14.0.
    """
    root = _find_sympy()
    names = sorted(path.relative_to(root).as_posix() for path in root.rglob("*.py"))
    documents, content = [], hashlib.sha256()
    for name in names:
        parts = name.split("/")
        text = (root / name).read_bytes().decode("utf-8")
        if "tests" not in parts and len(text) > MIN_SYMPY_CHARACTERS:
            content.update(name.encode() + b"\0" + text.encode() + b"\0")
            documents.append(Document(name, text=text, group=parts[0]))
    if verify and content.hexdigest() != SYMPY_SHA256:
        raise CorpusError("sympy: expected the sources of version 1.14.0, got others; pip install sympy==1.14.0")
    return documents


def read_sympy_module(name: str) -> Document:
    """Return one of SymPy's modules, such as geometry/point.py."""
    return Document(name, text=(_find_sympy() / name).read_bytes().decode("utf-8"), group=name.split("/")[0])


def _find_sympy() -> Path:
    spec = find_spec("sympy")
    if spec is None or not spec.submodule_search_locations:
        raise CorpusError("sympy: expected the package to be installed, got none")
    return Path(next(iter(spec.submodule_search_locations)))


ReadResult = Document | CorpusError


def _catch_read_errors(path: Path, results: Iterator[ReadResult]) -> Iterator[ReadResult]:
    """Yield a reader's results, then a CorpusError if the file is truncated or of another format."""
    try:
        yield from results
    except (OSError, EOFError, UnicodeDecodeError, lzma.LZMAError, ValueError) as error:
        if isinstance(error, CorpusError):
            raise
        if isinstance(error, UnicodeDecodeError):
            problem = f"expected text in UTF-8, got other bytes ({error.reason}); convert it: iconv -f latin1 -t utf-8"
        else:
            problem = f"cannot be read to its end: {error}"
        yield CorpusError(f"{path}: {problem}")


def _select_reader(path: Path) -> Callable[[Path, str], Iterator[ReadResult]]:
    suffixes = [suffix for suffix in path.suffixes if suffix not in DECOMPRESSORS]
    kind = suffixes[-1] if suffixes else ""
    if kind in (".fasta", ".fa", ".fna"):
        return _read_fasta
    return {".jsonl": _read_json_lines, ".json": _read_json, ".parquet": _read_parquet}.get(kind, _read_text)


def _open_text(path: Path) -> TextIO:
    """Open a text file, dropping the byte-order mark that some editors write."""
    return DECOMPRESSORS.get(path.suffix, open)(path, "rt", encoding="utf-8-sig")


def _read_lines(path: Path) -> Iterator[tuple[int, str | CorpusError]]:
    """Yield numbered lines, each decoded by itself: an invalid byte breaks only its own line."""
    number = 0
    try:
        with _open_bytes(path) as lines:
            for line in chain.from_iterable(map(bytes.splitlines, lines)):  # old files end lines with a lone \r
                number += 1
                yield number, _decode(path, number, line.removeprefix(codecs.BOM_UTF8) if number == 1 else line)
    except (OSError, EOFError, lzma.LZMAError) as error:
        raise EOFError(f"past line {number}: {error}") from error


def _open_bytes(path: Path) -> BinaryIO:
    return DECOMPRESSORS.get(path.suffix, open)(path, "rb")


def _decode(path: Path, number: int, line: bytes) -> str | CorpusError:
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as error:
        return CorpusError(f"{path}:{number}: expected UTF-8, got {error}")


def _read_text(path: Path, column: str) -> Iterator[ReadResult]:
    with _open_text(path) as file:
        yield Document(path.name, text=file.read())


def _read_json_lines(path: Path, column: str) -> Iterator[ReadResult]:
    for number, line in _read_lines(path):
        if isinstance(line, CorpusError):
            yield line
            continue
        if not line.strip():
            continue
        try:
            data = json.loads(line)
        except (ValueError, RecursionError) as error:  # thousands of digits or nested brackets
            yield CorpusError(f"{path}:{number}: expected a JSON object a line, got {error}")
            continue
        yield parse_record(data, f"{path.name}:{number}", f"{path}:{number}", column)


def _read_json(path: Path, column: str) -> Iterator[ReadResult]:
    """Read a list of records, or one record a line as in .jsonl; any other JSON is one text."""
    with _open_text(path) as file:
        text = file.read()
    data = _try_parse(text)
    if isinstance(data, list) and data and all(_is_record(item, column) for item in data):
        for number, item in enumerate(data, 1):
            yield parse_record(item, f"{path.name}:{number}", f"{path}:{number}", column)
    elif data is None and _is_record(_try_parse(text.lstrip().partition("\n")[0]), column):
        yield from _read_json_lines(path, column)
    else:
        yield Document(path.name, text=text)


def _try_parse(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _is_record(data: Any, column: str) -> bool:
    return isinstance(data, dict) and bool({column, "input_ids"} & set(data))


def _read_parquet(path: Path, column: str) -> Iterator[ReadResult]:
    with name_missing_extras():
        from pyarrow.parquet import ParquetFile
    number = 0
    for batch in ParquetFile(path).iter_batches(64):
        for data in batch.to_pylist():
            number += 1
            yield parse_record(data, f"{path.name}:{number}", f"{path}:{number}", column)


def parse_record(data: Any, name: str, where: str, column: str) -> ReadResult:
    """Build the document of one record from its `column` or `input_ids` and its optional `id` and `group`."""
    if not isinstance(data, dict):
        return CorpusError(f"{where}: expected an object with {column!r}, got {type(data).__name__}")
    name = str(data.get("id", name))
    group = None if data.get("group") is None else str(data["group"])
    text = data.get(column)
    if isinstance(text, str):
        try:
            text.encode()
        except UnicodeEncodeError as error:  # JSON can hold half a surrogate pair
            return CorpusError(f"{where}: expected text, got {error}")
        return Document(name, text=text, group=group)
    tokens = data.get("input_ids")
    if isinstance(tokens, list) and all(isinstance(token, int) for token in tokens):
        return Document(name, tokens=tuple(tokens), group=group)
    got = ", ".join(f"{key}: null" if value is None else str(key) for key, value in data.items()) or "nothing"
    return CorpusError(f"{where}: expected {column!r} or 'input_ids', got {got}")


def _read_fasta(path: Path, column: str) -> Iterator[ReadResult]:
    name, parts, broken = None, list[str](), False
    for number, line in _read_lines(path):
        if isinstance(line, CorpusError):
            yield line
            name, broken = None, True  # skip the rest of the record
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
