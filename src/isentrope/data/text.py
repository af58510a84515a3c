"""Documents from files."""

from __future__ import annotations

import hashlib
import json
import lzma
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

JSON_LINES = (".jsonl", ".jsonl.xz")


@dataclass(frozen=True)
class Document:
    """A text, or the tokens it was turned into beforehand."""

    name: str
    text: str | None = None
    tokens: tuple[int, ...] | None = None

    @property
    def sha256(self) -> str:
        content = self.text if self.text is not None else json.dumps(self.tokens)
        return hashlib.sha256(content.encode()).hexdigest()


def documents(paths: Iterable[Path]) -> Iterator[Document]:
    """Every document of text files, and of JSON-lines files (`.jsonl`, `.jsonl.xz`) with `text` or `input_ids`."""
    for path in paths:
        if not path.is_file():
            raise ValueError(f"{path}: expected a file")
        if path.name.endswith(JSON_LINES):
            yield from _json_lines(path)
        else:
            yield Document(path.name, text=path.read_text(encoding="utf-8"))


def _json_lines(path: Path) -> Iterator[Document]:
    opener = lzma.open if path.suffix == ".xz" else open
    with opener(path, "rt", encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                data: Any = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}:{number}: expected a JSON object a line, got {error}") from error
            name = str(data.get("id", f"{path.name}:{number}"))
            if isinstance(data.get("text"), str):
                yield Document(name, text=data["text"])
            elif isinstance(data.get("input_ids"), list):
                yield Document(name, tokens=tuple(data["input_ids"]))
            else:
                raise ValueError(f"{path}:{number}: expected 'text' or 'input_ids', got {', '.join(data) or 'nothing'}")
