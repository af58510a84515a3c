"""Tokenized documents on disk: one flat array and an index."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from isentrope.data.corpus import CorpusError, Document
from isentrope.utils.files import read_fields, write_atomically

MAX_BATCH_TEXTS, MAX_BATCH_CHARACTERS = 64, 1 << 19  # tokenized at once; a longer text goes alone
TOKENS_PER_COUNT = 1 << 22  # counted at once


@dataclass(frozen=True)
class TokenStore:
    """Tokenized documents, memory-mapped from disk: `store[i]` is a view of the i-th.

    `counts` has the documents read and, among them, those dropped as `too_short` or as exact `duplicates`.
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
        """Open what `tokenize` wrote for this key.

        Raises:
            FileNotFoundError: Nothing was written for it.
            CorpusError: The files are broken.
        """
        flat, index = store_paths(folder, key)
        remedy = f"delete it and {flat.name}, and prepare the corpus again"
        data = read_fields(index, remedy, "lengths", "names", "sha256", "groups", "characters", "counts")
        lengths = np.array(data.pop("lengths"), np.int64)
        total = int(lengths.sum())
        try:
            ids = np.load(flat, mmap_mode="r") if total else np.empty(0, np.int32)  # an empty file cannot be mapped
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

    def count_tokens(self) -> NDArray[np.int64]:
        """Count the occurrences of each token, (largest token + 1,)."""
        counts = np.zeros(0, np.int64)
        for at in range(0, len(self.ids), TOKENS_PER_COUNT):
            part = np.bincount(self.ids[at : at + TOKENS_PER_COUNT], minlength=len(counts))
            counts = part + np.pad(counts, (0, len(part) - len(counts)))
        return counts

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> NDArray[np.int32]:
        start = self.starts[index]
        return self.ids[start : start + self.lengths[index]]

    def __iter__(self) -> Iterator[NDArray[np.int32]]:
        return (self[index] for index in range(len(self)))


def store_paths(folder: Path, key: str) -> tuple[Path, Path]:
    """Return the paths of the array and of the index, which is written last."""
    return folder / f"tokens-{key[:16]}.npy", folder / f"tokens-{key[:16]}.json"


def tokenize(
    documents: Iterable[Document], tokenizer: Any, folder: Path, key: str, longer_than: int = 4096
) -> TokenStore:
    """Write the tokens of documents, a few in memory at a time and exact duplicates dropped, and map them back.

    Args:
        documents: Not read if files for `key` exist already.
        tokenizer: Adds no special tokens here.
        folder: Where the files go.
        key: Identifies the content and the tokenizer.
        longer_than: Keep documents of more tokens than this.
    """
    flat, index = store_paths(folder, key)
    if index.exists() and flat.exists():
        return TokenStore.open(folder, key)
    folder.mkdir(parents=True, exist_ok=True)
    for path in (flat, index):
        _remove_stale_partials(path)
    rows: dict[str, list[Any]] = {name: [] for name in ("names", "sha256", "groups", "characters", "lengths")}
    counts, seen = {"read": 0, "too_short": 0, "duplicates": 0}, set[str]()
    with write_atomically(flat) as partial, partial.open("wb") as file:
        _write_header(file, 0)
        for document, ids in _tokenize_in_batches(documents, tokenizer):
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
        _write_header(file, sum(rows["lengths"]))
    with write_atomically(index) as partial:
        partial.write_text(json.dumps(rows | {"counts": counts}), encoding="utf-8")
    return TokenStore.open(folder, key)


def _tokenize_in_batches(documents: Iterable[Document], tokenizer: Any) -> Iterator[tuple[Document, NDArray[np.int32]]]:
    """Yield documents and their tokens in order, several texts at once for fast tokenizers."""
    batch, size, vocabulary = list[Document](), 0, len(tokenizer)
    for document in documents:
        batch.append(document)
        size += len(document.text or "")
        if len(batch) == MAX_BATCH_TEXTS or size >= MAX_BATCH_CHARACTERS:
            yield from _tokenize_batch(batch, tokenizer, vocabulary)
            batch, size = [], 0
    yield from _tokenize_batch(batch, tokenizer, vocabulary)


def _tokenize_batch(
    batch: list[Document], tokenizer: Any, vocabulary: int
) -> Iterator[tuple[Document, NDArray[np.int32]]]:
    texts = [document.text for document in batch if document.text is not None]
    encoded: Iterator[Any] = iter(())
    if texts:
        # "[MASK]" in a text is text, and texts longer than the model reads are expected here.
        options = {"add_special_tokens": False, "split_special_tokens": True, "verbose": False}
        only_ids = {"return_attention_mask": False, "return_token_type_ids": False}
        encoded = iter(tokenizer(texts, **options, **only_ids)["input_ids"])
    for document in batch:
        if document.text is not None:
            yield document, np.array(next(encoded), np.int32)
            continue
        ids = np.array(document.tokens, np.int64)
        if ids.size and not 0 <= ids.min() <= ids.max() < vocabulary:
            got = f"{ids.min()} … {ids.max()}"
            raise CorpusError(f"{document.name}: expected tokens of the tokenizer, 0 … {vocabulary - 1}, got {got}")
        yield document, ids.astype(np.int32)


def _write_header(file: BinaryIO, tokens: int) -> None:
    """Write the header of a .npy file, in which numpy reserves space for a longer shape."""
    file.seek(0)
    np.lib.format.write_array_header_1_0(
        file, {"descr": np.lib.format.dtype_to_descr(np.dtype(np.int32)), "fortran_order": False, "shape": (tokens,)}
    )


def _remove_stale_partials(path: Path) -> None:
    """Remove partial files of killed processes, which may be as large as the corpus."""
    for partial in path.parent.glob(f".{path.name}.*.partial"):
        process = partial.suffixes[-2][1:]
        if process.isdigit() and not _process_exists(int(process)):
            partial.unlink(missing_ok=True)


def _process_exists(process: int) -> bool:
    if sys.platform == "win32":  # signal 0 is Ctrl-C there
        return True
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass
    return True
