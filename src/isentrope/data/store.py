"""Documents in tokens, on disk: one flat array and an index of what lies where."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from isentrope.data.corpus import CorpusError, Document
from isentrope.utils.files import read_fields, write_atomically

TEXTS, CHARACTERS = 64, 1 << 19  # tokenized at once, at most; one longer text goes alone
AT_ONCE = 1 << 22  # tokens counted


@dataclass(frozen=True)
class TokenStore:
    """Documents in tokens, mapped from disk: `store[i]` is a view of the i-th.

    counts: documents read, `too_short` ones and exact `duplicates` among them, which are not kept.
    """

    ids: NDArray[np.int32]
    names: list[str]
    sha256: list[str]
    groups: list[str | None]
    characters: list[int | None]
    lengths: NDArray[np.int64]
    counts: dict[str, int]

    @classmethod
    def open(cls, folder: Path, key: str) -> TokenStore:
        """What `tokenize` wrote for this key; FileNotFoundError where it has not."""
        flat, index = files(folder, key)
        again = f"delete it and {flat.name}, and prepare the corpus again"
        data = read_fields(index, again, "lengths", "names", "sha256", "groups", "characters", "counts")
        lengths = np.array(data.pop("lengths"), np.int64)
        total = int(lengths.sum())
        try:
            ids = np.load(flat, mmap_mode="r") if total else np.empty(0, np.int32)  # nothing cannot be mapped
        except (ValueError, EOFError) as error:
            raise CorpusError(f"{flat}: broken ({error}); delete it and {index.name}, and prepare again") from error
        if ids.dtype != np.int32 or ids.shape != (total,):
            raise CorpusError(
                f"{flat}: expected {total} tokens, got {ids.dtype} {ids.shape}; delete it and {index.name}"
            )
        return cls(ids=ids, lengths=lengths, **data)

    @cached_property
    def starts(self) -> NDArray[np.int64]:
        return np.cumsum(self.lengths) - self.lengths

    def frequencies(self) -> NDArray[np.int64]:
        """How often each token occurs, (largest token + 1,)."""
        counts = np.zeros(0, np.int64)
        for at in range(0, len(self.ids), AT_ONCE):
            part = np.bincount(self.ids[at : at + AT_ONCE], minlength=len(counts))
            counts = part + np.pad(counts, (0, len(part) - len(counts)))
        return counts

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> NDArray[np.int32]:
        start = self.starts[index]
        return self.ids[start : start + self.lengths[index]]

    def __iter__(self) -> Iterator[NDArray[np.int32]]:
        return (self[index] for index in range(len(self)))


def files(folder: Path, key: str) -> tuple[Path, Path]:
    """The array and the index. The index is written last: where it is, all is."""
    return folder / f"tokens-{key[:16]}.npy", folder / f"tokens-{key[:16]}.json"


def tokenize(
    documents: Iterable[Document], tokenizer: Any, folder: Path, key: str, longer_than: int = 4096
) -> TokenStore:
    """Documents of more than `longer_than` tokens, without special tokens, written as they come and mapped back.

    What is written for `key` (the content and the tokenizer) is taken as it is, and `documents` is not read. Only a few
    documents are in memory at a time; a text that was seen before is dropped.
    """
    flat, index = files(folder, key)
    if index.exists() and flat.exists():
        return TokenStore.open(folder, key)
    folder.mkdir(parents=True, exist_ok=True)
    for path in (flat, index):
        _sweep(path)
    rows: dict[str, list[Any]] = {name: [] for name in ("names", "sha256", "groups", "characters", "lengths")}
    counts, seen = {"read": 0, "too_short": 0, "duplicates": 0}, set[str]()
    with write_atomically(flat) as partial, partial.open("wb") as file:
        _header(file, 0)
        for document, ids in _in_tokens(documents, tokenizer):
            digest = document.sha256
            counts["read"] += 1
            if len(ids) <= longer_than:
                counts["too_short"] += 1
            elif digest in seen:
                counts["duplicates"] += 1
            else:
                seen.add(digest)
                file.write(ids.data)
                characters = None if document.text is None else len(document.text)
                row = (document.name, digest, document.group, characters, len(ids))
                for column, value in zip(rows.values(), row, strict=True):
                    column.append(value)
        _header(file, sum(rows["lengths"]))
    with write_atomically(index) as partial:
        partial.write_text(json.dumps(rows | {"counts": counts}), encoding="utf-8")
    return TokenStore.open(folder, key)


def _in_tokens(documents: Iterable[Document], tokenizer: Any) -> Iterator[tuple[Document, NDArray[np.int32]]]:
    """Documents and their tokens, in their order, several texts at once as fast tokenizers like it."""
    waiting, size, vocabulary = list[Document](), 0, len(tokenizer)
    for document in documents:
        waiting.append(document)
        size += len(document.text or "")
        if len(waiting) == TEXTS or size >= CHARACTERS:
            yield from _batch(waiting, tokenizer, vocabulary)
            waiting, size = [], 0
    yield from _batch(waiting, tokenizer, vocabulary)


def _batch(batch: list[Document], tokenizer: Any, vocabulary: int) -> Iterator[tuple[Document, NDArray[np.int32]]]:
    texts = [document.text for document in batch if document.text is not None]
    found: Iterator[Any] = iter(())
    if texts:
        # "[MASK]" in a text is text; long ones are what we are here for, so no word about the model's length
        options = {"add_special_tokens": False, "split_special_tokens": True, "verbose": False}
        only_ids = {"return_attention_mask": False, "return_token_type_ids": False}
        found = iter(tokenizer(texts, **options, **only_ids)["input_ids"])
    for document in batch:
        if document.text is not None:
            yield document, np.array(next(found), np.int32)
            continue
        ids = np.array(document.tokens, np.int64)
        if ids.size and not 0 <= ids.min() <= ids.max() < vocabulary:
            got = f"{ids.min()} … {ids.max()}"
            raise CorpusError(f"{document.name}: expected tokens of the tokenizer, 0 … {vocabulary - 1}, got {got}")
        yield document, ids.astype(np.int32)


def _header(file: BinaryIO, tokens: int) -> None:
    """That of a .npy file; numpy leaves room in it for the length to grow."""
    file.seek(0)
    np.lib.format.write_array_header_1_0(
        file, {"descr": np.lib.format.dtype_to_descr(np.dtype(np.int32)), "fortran_order": False, "shape": (tokens,)}
    )


def _sweep(path: Path) -> None:
    """Remove what killed runs left of this file: it may be as large as the corpus."""
    for left in path.parent.glob(f".{path.name}.*.partial"):
        process = left.suffixes[-2][1:]
        if process.isdigit() and not _runs(int(process)):
            left.unlink(missing_ok=True)


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass
    return True
