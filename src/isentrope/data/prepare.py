"""A corpus made ready: read, tokenized, freed of duplicates and parted, with a manifest that says how."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from isentrope.data import duplicates, partition
from isentrope.data.prepared import FORMAT, MANIFEST, TOKENIZER
from isentrope.data.source import Source
from isentrope.data.store import TokenStore, files, tokenize
from isentrope.models.tokenizer import build_bert_tokenizer, build_character_tokenizer
from isentrope.pretrained import read_tokenizer
from isentrope.utils.files import BrokenFileError, read_fields, read_json, write_atomically
from isentrope.utils.progress import progress
from isentrope.utils.provenance import provenance

logger = logging.getLogger("isentrope")
CHARACTERS, VOCABULARY = "characters", 12000
MADE_FROM = "made_from.json"  # in the tokenizer's folder: of which corpus it holds the characters


@dataclass(frozen=True)
class Options:
    """How to make a corpus ready.

    tokenizer: `characters` of the corpus itself (vocab_size of them), a BERT vocabulary (.txt), a folder or a name on
    the hub. features: a model whose mean hidden states say what a document is like; pairs of tokens if None.
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


def prepare(source: Source, out: Path, options: Options, say: Callable[[str], None] = logger.info) -> Path:
    """Write tokens, tokenizer and `manifest.json` into the folder `out`; what an earlier run has done is kept."""
    fingerprint = source.fingerprint()
    head: dict[str, Any] = {
        "format": FORMAT,
        "source": {"name": source.word, "kind": source.kind, "fingerprint": fingerprint},
        "options": asdict(options) | {key: value for key, value in asdict(source).items() if key != "word"},
    }
    _refuse_another(out / MANIFEST, head)
    tokenizer = _tokenizer(source, fingerprint, out / TOKENIZER, options)
    digest = _sha256(tokenizer.backend_tokenizer.to_str())
    made_of = "characters of all documents" if options.tokenizer == CHARACTERS else options.tokenizer
    head["tokenizer"] = {"made_of": made_of, "sha256": digest, "vocab_size": len(tokenizer)}
    _refuse_another(out / MANIFEST, head)
    _save_tokenizer(tokenizer, out / TOKENIZER, fingerprint, options)
    head["tokens"] = _sha256(json.dumps([fingerprint, digest, options.longer_than]))
    store = _tokens(source, tokenizer, out, head["tokens"], options.longer_than, say)
    same, near = _near_duplicates(store)
    held = partition.held_out(same, store.groups, options.seed, options.train_share)
    features, described = _features(store, held, tokenizer, options.features)
    drawn = partition.draw(features, same[held], options.seed, options.test)
    rows, sets = _rows(store, same), np.full(len(store), partition.TRAIN, object)
    sets[held] = drawn.sets
    for index, label, place in zip(held.tolist(), drawn.labels.tolist(), drawn.coordinates.round(6), strict=True):
        rows[index] |= {"cluster": label, "pca": place.tolist()}
    manifest = head | {
        "features": described,
        "near_duplicates": near,
        "counts": store.counts | {"kept": len(store)},
        "statistics": {name: _statistics(store.lengths[sets == name]) for name in partition.SETS},
        "run": provenance(),
        "documents": [{"set": name} | row for name, row in zip(sets.tolist(), rows, strict=True)],
    }
    with write_atomically(out / MANIFEST) as partial:
        partial.write_text(json.dumps(manifest, indent=1, ensure_ascii=False), encoding="utf-8")
    return out / MANIFEST


def _refuse_another(path: Path, head: dict[str, Any]) -> None:
    """A partition that something may have been trained on is not replaced by another one."""
    if not path.exists():
        return
    held = _identity(read_fields(path, "delete it to prepare the corpus again", "options", "source"))
    for name, asked in _identity(head).items():
        if held.get(name) != asked:
            got = f"{name} {held.get(name)}, not {asked}"
            raise ValueError(f"{path}: holds a partition with {got}; choose another folder, or delete it")


def _identity(head: dict[str, Any]) -> dict[str, Any]:
    """What makes two partitions the same: content, not where it lies."""
    options = {name: value for name, value in head["options"].items() if name not in ("tokenizer", "vocab_size")}
    tokenizer = {"tokenizer": head["tokenizer"]["sha256"]} if "tokenizer" in head else {}
    return options | {"source": head["source"]["fingerprint"]} | tokenizer


def _tokenizer(source: Source, fingerprint: str, saved: Path, options: Options) -> Any:
    if options.tokenizer == CHARACTERS:
        mark = saved / MADE_FROM
        if _read_mark(mark) == _made_from(fingerprint, options):
            return read_tokenizer(saved)
        texts = (document.text for document in progress(source.documents(), "characters", source.limit))
        return build_character_tokenizer((text for text in texts if text is not None), options.vocab_size or VOCABULARY)
    if options.tokenizer.endswith(".txt"):
        return build_bert_tokenizer(options.tokenizer)
    found = read_tokenizer(options.tokenizer)
    if getattr(found, "backend_tokenizer", None) is None:
        raise ValueError(f"tokenizer: expected a fast one, got {type(found).__name__} in {options.tokenizer}")
    return found


def _read_mark(mark: Path) -> Any:
    """What a tokenizer was made from, by an earlier run; None where that is not known."""
    try:
        return read_json(mark, "the tokenizer is made again") if mark.exists() else None
    except BrokenFileError as error:
        logger.warning("%s", error)
        return None


def _save_tokenizer(tokenizer: Any, folder: Path, fingerprint: str, options: Options) -> None:
    mark = folder / MADE_FROM
    mark.unlink(missing_ok=True)
    tokenizer.save_pretrained(folder)
    if options.tokenizer == CHARACTERS:
        with write_atomically(mark) as partial:
            partial.write_text(json.dumps(_made_from(fingerprint, options)), encoding="utf-8")


def _made_from(fingerprint: str, options: Options) -> dict[str, Any]:
    return {"source": fingerprint, "vocab_size": options.vocab_size or VOCABULARY}


def _tokens(
    source: Source, tokenizer: Any, out: Path, key: str, longer_than: int, say: Callable[[str], None]
) -> TokenStore:
    if all(path.exists() for path in files(out, key)):
        say(f"tokens of an earlier run: {files(out, key)[0]}")
    store = tokenize(progress(source.documents(), "tokens", source.limit), tokenizer, out, key, longer_than)
    if not len(store):
        read = store.counts["read"]
        raise ValueError(f"source: expected documents longer than {longer_than} tokens, got none among {read}")
    return store


def _near_duplicates(store: TokenStore) -> tuple[NDArray[np.int64], dict[str, Any]]:
    """For each document the first of its near-duplicates, and how many there are."""
    k = duplicates.shingle_size(store.frequencies(), int(store.lengths.max()))
    same = duplicates.clusters(
        np.stack([duplicates.signature(tokens, k) for tokens in progress(store, "near-duplicates", len(store))]),
        duplicates.ALIKE,
    )
    sizes = np.bincount(same)
    found = {"clusters": int((sizes > 1).sum()), "documents": int(sizes[sizes > 1].sum())}
    return same, {"shingle": k, "threshold": duplicates.ALIKE} | found


def _features(
    store: TokenStore, held: NDArray[np.int64], tokenizer: Any, model: str | None
) -> tuple[NDArray[np.float64], dict[str, Any]]:
    documents = progress([store[index] for index in held.tolist()], "features")
    if model is None:
        found, kind = [partition.bigrams(tokens) for tokens in documents], "hashed token bigrams"
    else:
        from isentrope.data.features import hidden_states

        found, kind = list(hidden_states(model, documents, tokenizer)), "mean hidden states"
    features = np.stack(found)
    return features, {"kind": kind, "model": model, "size": features.shape[1]}


def _rows(store: TokenStore, same: NDArray[np.int64]) -> list[dict[str, Any]]:
    """What the manifest says of each document, in the order of the store."""
    rows = []
    for i, first in enumerate(same.tolist()):
        row = {
            "name": store.names[i],
            "sha256": store.sha256[i],
            "characters": store.characters[i],
            "tokens": int(store.lengths[i]),
            "group": store.groups[i],
        }
        rows.append(row | ({"near_duplicate_of": store.sha256[first]} if first != i else {}))
    return rows


def _statistics(lengths: NDArray[np.int64]) -> dict[str, Any]:
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


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
