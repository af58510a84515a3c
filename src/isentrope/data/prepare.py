"""Prepare a corpus: read, tokenize, drop duplicates, partition, and write a manifest of it."""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from isentrope.data import duplicates, partition
from isentrope.data.prepared import FORMAT, MANIFEST, TOKENIZER
from isentrope.data.source import Source
from isentrope.data.store import TokenStore, store_paths, tokenize
from isentrope.models.tokenizer import build_bert_tokenizer, build_character_tokenizer
from isentrope.pretrained import read_tokenizer
from isentrope.utils.files import BrokenFileError, read_fields, read_json, write_atomically
from isentrope.utils.progress import track_progress
from isentrope.utils.provenance import collect_provenance

logger = logging.getLogger("isentrope")
CHARACTERS = "characters"
DEFAULT_VOCAB_SIZE = 12000
MADE_FROM = "made_from.json"  # beside the tokenizer: the corpus whose characters it has


@dataclass(frozen=True)
class PrepareOptions:
    """How to prepare a corpus.

    Args:
        tokenizer: `characters` of the corpus itself, a BERT vocabulary (.txt), a folder or a name on the hub.
        vocab_size: Tokens of the tokenizer `characters`; 12000 by default.
        longer_than: Keep documents of more tokens than this.
        seed: Seed of the partition.
        test: Number of test documents.
        train_share: Share of the documents to train on.
        features: A model whose mean hidden states are clustered; hashed token pairs if None.
    """

    tokenizer: str = CHARACTERS
    vocab_size: int | None = None
    longer_than: int = 4096
    seed: int = 0
    test: int = 10
    train_share: float = 0.8
    features: str | None = None

    def __post_init__(self) -> None:
        if self.vocab_size is not None and self.tokenizer != CHARACTERS:
            raise ValueError(f"vocab_size: expected it with the tokenizer {CHARACTERS!r}, got {self.tokenizer!r}")
        if self.longer_than < 1 or self.test < 1 or self.seed < 0:
            raise ValueError(
                f"longer_than, test, seed: expected 1, 1, 0 or more, got {self.longer_than}, {self.test}, {self.seed}"
            )
        if not 0 < self.train_share < 1:
            raise ValueError(f"train_share: expected a share between 0 and 1, got {self.train_share}")
        for option, name in (("tokenizer", self.tokenizer), ("features", self.features or "")):
            if name.startswith((".", "/", "~")) and not Path(name).exists():
                raise ValueError(f"{option}: expected a folder or a name on the hub, got no such folder as {name}")


def prepare(source: Source, out: Path, options: PrepareOptions, notify: Callable[[str], None] = logger.info) -> Path:
    """Write tokens, tokenizer and `manifest.json` into a folder, keeping what an earlier run wrote.

    Args:
        source: Where the documents come from.
        out: The folder.
        options: How to prepare them.
        notify: Receives messages about reused files.

    Returns:
        The path of the manifest.

    Raises:
        ValueError: The folder holds another partition, or there are too few documents.
    """
    fingerprint, is_new = source.fingerprint(), not out.exists()
    head: dict[str, Any] = {
        "format": FORMAT,
        "source": {"name": source.location, "kind": source.kind, "fingerprint": fingerprint},
        "options": asdict(options) | {key: value for key, value in asdict(source).items() if key != "location"},
    }
    _check_same_partition(out / MANIFEST, head)
    tokenizer = _build_tokenizer(source, fingerprint, out / TOKENIZER, options)
    digest = _hash_text(tokenizer.backend_tokenizer.to_str())
    made_of = "characters of all documents" if options.tokenizer == CHARACTERS else options.tokenizer
    head["tokenizer"] = {"made_of": made_of, "sha256": digest, "vocab_size": len(tokenizer)}
    _check_same_partition(out / MANIFEST, head)
    _save_tokenizer(tokenizer, out / TOKENIZER, fingerprint, options)
    head["tokens"] = _hash_text(json.dumps([fingerprint, digest, options.longer_than]))
    try:
        store = _tokenize(source, tokenizer, out, head["tokens"], options.longer_than, notify)
    except ValueError:
        if is_new:
            shutil.rmtree(out)
        raise
    first_copies, near_duplicates = _find_near_duplicates(store)
    held_out = partition.select_held_out(first_copies, store.groups, options.seed, options.train_share)
    features, features_info = _compute_features(store, held_out, tokenizer, options.features)
    try:
        split = partition.split_held_out(features, first_copies[held_out], options.seed, options.test)
    except ValueError as error:
        raise ValueError(f"{error} (the tokens are kept in {out})") from error
    rows, sets = _describe_documents(store, first_copies), np.full(len(store), partition.TRAIN, object)
    sets[held_out] = split.sets
    for index, label, point in zip(held_out.tolist(), split.labels.tolist(), split.coordinates.round(6), strict=True):
        rows[index] |= {"cluster": label, "pca": point.tolist()}
    manifest = head | {
        "features": features_info,
        "near_duplicates": near_duplicates,
        "counts": store.counts | {"kept": len(store)},
        "statistics": {name: _summarize_lengths(store.lengths[sets == name]) for name in partition.SETS},
        "run": collect_provenance(),
        "documents": [{"set": name} | row for name, row in zip(sets.tolist(), rows, strict=True)],
    }
    with write_atomically(out / MANIFEST) as partial:
        partial.write_text(json.dumps(manifest, indent=1, ensure_ascii=False), encoding="utf-8")
    return out / MANIFEST


def _check_same_partition(path: Path, head: dict[str, Any]) -> None:
    """Refuse to replace a partition that models may have been trained on by another one."""
    if not path.exists():
        return
    existing = _identity(read_fields(path, "delete it to prepare the corpus again", "options", "source"))
    for name, expected in _identity(head).items():
        if existing.get(name) != expected:
            got = f"{name} {existing.get(name)}, not {expected}"
            raise ValueError(f"{path}: holds a partition with {got}; choose another folder, or delete it")


def _identity(head: dict[str, Any]) -> dict[str, Any]:
    """Return what makes two partitions the same: content, not location."""
    options = {name: value for name, value in head["options"].items() if name not in ("tokenizer", "vocab_size")}
    tokenizer = {"tokenizer": head["tokenizer"]["sha256"]} if "tokenizer" in head else {}
    return options | {"source": head["source"]["fingerprint"]} | tokenizer


def _build_tokenizer(source: Source, fingerprint: str, saved: Path, options: PrepareOptions) -> Any:
    if options.tokenizer == CHARACTERS:
        if _read_origin(saved / MADE_FROM) == _describe_origin(fingerprint, options):
            return read_tokenizer(saved)
        texts = (document.text for document in track_progress(source.documents(), "characters", source.limit))
        return build_character_tokenizer(
            (text for text in texts if text is not None), options.vocab_size or DEFAULT_VOCAB_SIZE
        )
    if options.tokenizer.endswith(".txt"):
        return build_bert_tokenizer(options.tokenizer)
    tokenizer = read_tokenizer(options.tokenizer)
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        raise ValueError(f"tokenizer: expected a fast one, got {type(tokenizer).__name__} in {options.tokenizer}")
    return tokenizer


def _read_origin(path: Path) -> Any:
    """Return what an earlier run made a tokenizer from; None if unknown."""
    try:
        return read_json(path, "the tokenizer is made again") if path.exists() else None
    except BrokenFileError as error:
        logger.warning("%s", error)
        return None


def _save_tokenizer(tokenizer: Any, folder: Path, fingerprint: str, options: PrepareOptions) -> None:
    origin = folder / MADE_FROM
    origin.unlink(missing_ok=True)
    tokenizer.save_pretrained(folder)
    if options.tokenizer == CHARACTERS:
        with write_atomically(origin) as partial:
            partial.write_text(json.dumps(_describe_origin(fingerprint, options)), encoding="utf-8")


def _describe_origin(fingerprint: str, options: PrepareOptions) -> dict[str, Any]:
    return {"source": fingerprint, "vocab_size": options.vocab_size or DEFAULT_VOCAB_SIZE}


def _tokenize(
    source: Source, tokenizer: Any, out: Path, key: str, longer_than: int, notify: Callable[[str], None]
) -> TokenStore:
    if all(path.exists() for path in store_paths(out, key)):
        notify(f"reusing tokens of an earlier run: {store_paths(out, key)[0]}")
    store = tokenize(track_progress(source.documents(), "tokens", source.limit), tokenizer, out, key, longer_than)
    if not len(store):
        read = store.counts["read"]
        for path in store_paths(out, key):
            path.unlink()
        raise ValueError(f"source: expected documents longer than {longer_than} tokens, got none among {read}")
    return store


def _find_near_duplicates(store: TokenStore) -> tuple[NDArray[np.int64], dict[str, Any]]:
    """Return the first near-duplicate of each document, and the manifest's summary."""
    k = duplicates.choose_shingle_size(store.count_tokens(), int(store.lengths.max()))
    documents = track_progress(store, "near-duplicates", len(store))
    signatures = np.stack([duplicates.compute_signature(tokens, k) for tokens in documents])
    first_copies = duplicates.cluster_near_duplicates(signatures, duplicates.MIN_JACCARD)
    sizes = np.bincount(first_copies)
    counts = {"clusters": int((sizes > 1).sum()), "documents": int(sizes[sizes > 1].sum())}
    return first_copies, {"shingle": k, "threshold": duplicates.MIN_JACCARD} | counts


def _compute_features(
    store: TokenStore, indices: NDArray[np.int64], tokenizer: Any, model: str | None
) -> tuple[NDArray[np.float64], dict[str, Any]]:
    documents = track_progress([store[index] for index in indices.tolist()], "features")
    if model is None:
        rows, kind = [partition.bigram_features(tokens) for tokens in documents], "hashed token bigrams"
    else:
        from isentrope.data.features import mean_hidden_states

        rows, kind = list(mean_hidden_states(model, documents, tokenizer)), "mean hidden states"
    features = np.stack(rows)
    return features, {"kind": kind, "model": model, "size": features.shape[1]}


def _describe_documents(store: TokenStore, first_copies: NDArray[np.int64]) -> list[dict[str, Any]]:
    """Return the manifest's entry of each document, in the order of the store."""
    rows = []
    for i, first in enumerate(first_copies.tolist()):
        row = {
            "name": store.names[i],
            "sha256": store.sha256[i],
            "characters": store.characters[i],
            "tokens": int(store.lengths[i]),
            "group": store.groups[i],
        }
        rows.append(row | ({"near_duplicate_of": store.sha256[first]} if first != i else {}))
    return rows


def _summarize_lengths(lengths: NDArray[np.int64]) -> dict[str, Any]:
    if not len(lengths):
        return {"documents": 0, "tokens": 0}
    return {
        "documents": len(lengths),
        "tokens": int(lengths.sum()),
        "mean": float(lengths.mean()),
        "median": float(np.median(lengths)),
        "min": int(lengths.min()),
        "max": int(lengths.max()),
    }


def _hash_text(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
