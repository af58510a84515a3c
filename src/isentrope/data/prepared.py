"""A corpus that `isentrope data prepare` wrote."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from isentrope.data.store import TokenStore

MANIFEST, TOKENIZER = "manifest.json", "tokenizer"
FORMAT = "isentrope partition 1"
SET_NAMES = ("train", "validation", "test")


@dataclass(frozen=True)
class Documents:
    """Tokenized documents: the i-th is `ids[starts[i] : starts[i] + lengths[i]]`, memory-mapped from disk."""

    names: list[str]
    lengths: NDArray[np.int64]
    starts: NDArray[np.int64]
    ids: NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> NDArray[np.int32]:
        start = self.starts[index]
        return self.ids[start : start + self.lengths[index]]


@dataclass(frozen=True)
class PreparedCorpus:
    """The tokens, tokenizer and manifest of one folder, opened by `PreparedCorpus.open(folder)`."""

    folder: Path
    manifest: dict[str, Any]
    store: TokenStore

    @classmethod
    def open(cls, folder: str | Path) -> PreparedCorpus:
        """Open a folder and check that its files belong together."""
        folder = Path(folder)
        path, remedy = folder / MANIFEST, f"run: isentrope data prepare SOURCE --out {folder}"
        if not path.is_file() and (folder.is_file() or (folder.is_dir() and any(folder.iterdir()))):
            prepared = folder.with_name(f"{folder.name.partition('.')[0]}-prepared")
            raise ValueError(
                f"{folder}: expected a prepared corpus, got text or other files; run: isentrope data prepare {folder} "
                f"--out {prepared}, then use {prepared}"
            )
        if not path.is_file():
            raise ValueError(f"{path}: expected a prepared corpus, got no such file; {remedy}")
        try:
            manifest = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{path}: expected JSON, got {error}; {remedy}") from error
        if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
            raise ValueError(f"{path}: expected the format {FORMAT!r}, got another file; {remedy}")
        if not (folder / TOKENIZER / "tokenizer.json").is_file():
            raise ValueError(f"{folder / TOKENIZER}: expected the tokenizer, got none; {remedy}")
        try:
            store = TokenStore.open(folder, manifest["tokens"])
        except FileNotFoundError as error:
            raise ValueError(f"{error.filename}: expected the corpus in tokens, got no such file; {remedy}") from None
        if store.sha256 != [row["sha256"] for row in manifest["documents"]]:
            raise ValueError(f"{path}: expected the documents of the token files beside it, got others; {remedy}")
        return cls(folder, manifest, store)

    def documents(self, set_name: str) -> Documents:
        """Return the documents of the set `train`, `validation` or `test`."""
        if set_name not in SET_NAMES:
            raise ValueError(f"set_name: expected one of {', '.join(SET_NAMES)}, got {set_name!r}")
        chosen = np.array([i for i, row in enumerate(self.manifest["documents"]) if row["set"] == set_name], np.int64)
        names = [self.store.names[i] for i in chosen.tolist()]
        return Documents(names, self.store.lengths[chosen], self.store.starts[chosen], self.store.ids)

    def hashes(self, set_name: str) -> list[str]:
        """Return the hash of each document of a set."""
        return [row["sha256"] for row in self.manifest["documents"] if row["set"] == set_name]

    @property
    def tokenizer_path(self) -> Path:
        return self.folder / TOKENIZER
