"""Texts to measure a causal model on: from files, strings or token ids to tokens of the model's own tokenizer."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from glob import iglob
from operator import index
from pathlib import Path
from typing import Any, cast

import numpy as np
from torch import Tensor
from transformers import PreTrainedModel

from isentrope.data.corpus import Document, read_documents
from isentrope.data.source import find_text_files
from isentrope.evaluation.loading import load_tokenizer
from isentrope.utils.messages import format_value

MAX_PATH_CHARACTERS = 4096


@dataclass(frozen=True)
class Text:
    """A document in tokens. ends: bytes of the text up to the end of each token, where that is known."""

    name: str
    sha256: str
    tokens: tuple[int, ...]
    ends: tuple[int, ...] | None = None


TextInput = Text | Path | str | Sequence[int]  # a file, folder or glob; a string of text; token ids


def load_texts(paths: Sequence[Path], name: str, gguf_file: str | None, length: int, limit: int) -> list[Text]:
    """Read the first documents that have `length` tokens or more, cut to that length.

    Args:
        paths: files with documents.
        name: the model whose tokenizer is used, a folder or a name on the hub.
        gguf_file: a GGUF file in that folder, with the tokenizer.
        length: tokens read of each document.
        limit: the largest number of documents.
    """
    return tokenize_documents(read_documents(paths), lambda: load_tokenizer(name, gguf_file), length, limit)


def collect_texts(texts: TextInput | Sequence[TextInput], model_name: str, length: int, limit: int) -> list[Text]:
    """Tokenize inputs of a user; see `TextInput`.

    A `Path`, or a string that names a file, a folder or a glob, is read; any other string is a document itself.

    Args:
        texts: one input or several.
        model_name: the model whose tokenizer is used.
        length: tokens read of each document; shorter ones are left out.
        limit: the largest number of documents.
    """
    inputs = _as_sequence(texts)
    if ready := [text for text in inputs if isinstance(text, Text)]:
        check_texts(ready, length)
        return ready[:limit]
    return tokenize_documents(iterate_documents(inputs), lambda: load_tokenizer(model_name), length, limit)


def iterate_documents(inputs: TextInput | Sequence[TextInput]) -> Iterator[Document]:
    """Yield the documents of files, strings and lists of token ids."""
    for number, each in enumerate(_as_sequence(inputs), 1):
        if isinstance(each, str) and not _names_files(each):
            yield Document(f"text {number}", each)
        elif isinstance(each, str | Path):
            files = [each] if isinstance(each, Path) and not each.is_dir() else find_text_files(str(each))
            yield from read_documents(files)
        else:
            yield Document(f"text {number}", tokens=_read_ids(each, number))


def _as_sequence(inputs: Any) -> list[Any]:
    if isinstance(inputs, str | Path | Text):
        return [inputs]
    items = list(inputs) if isinstance(inputs, Iterable) else [inputs]
    return [items] if items and all(_is_id(item) for item in items) else items


def _is_id(item: Any) -> bool:
    """Whether something is a whole number, of Python, numpy or a tensor."""
    try:
        index(item)
    except TypeError:
        return False
    return True


def _read_ids(row: Any, number: int) -> tuple[int, ...]:
    try:
        return tuple(index(token) for token in row)
    except TypeError as error:
        raise ValueError(
            f"text {number}: expected a string, a path or a list of token ids, got {format_value(row)}"
        ) from error


def _names_files(text: str) -> bool:
    """Whether a string is meant as a location: a file or folder that exists, a glob that matches, or one word."""
    if "\n" in text or "\0" in text or len(text) > MAX_PATH_CHARACTERS:
        return False
    return os.path.exists(text) or len(text.split()) <= 1 or next(iglob(text, recursive=True), None) is not None


def tokenize_documents(
    documents: Iterable[Document], make_tokenizer: Callable[[], Any], length: int, limit: int
) -> list[Text]:
    """Tokenize the first documents that are long enough; the tokenizer is loaded once a text needs it."""
    if limit < 1:
        raise ValueError(f"documents: expected 1 or more, got {limit}")
    tokenizer: Any = None
    texts: list[Text] = []
    names: dict[str, str] = {}  # of documents by their content
    count, most, untokenized = 0, 0, ""
    for document in documents:
        if (content := document.sha256) in names:  # it would count twice, and narrow every interval
            warnings.warn(f"{document.name} is left out: the same text as {names[content]}", UserWarning, stacklevel=2)
            continue
        names[content] = document.name
        count += 1
        tokens, ends = document.tokens, None
        if tokens is None:
            if document.text is None or 4 * len(document.text) < length:  # a token has a byte or more
                untokenized = max(untokenized, document.text or "", key=len)
                continue
            if tokenizer is None:
                tokenizer = make_tokenizer()
            encoded = tokenizer(document.text, return_offsets_mapping=tokenizer.is_fast, verbose=False)
            tokens = tuple(encoded["input_ids"])
            ends = _byte_ends(document.text, encoded["offset_mapping"][:length]) if tokenizer.is_fast else None
        most = max(most, len(tokens))
        if len(tokens) >= length:
            texts.append(Text(document.name, content, tokens[:length], ends))
        if len(texts) == limit:
            break
    if not texts:
        if untokenized:  # too short for the length, and quickly tokenized
            most = max(most, len((tokenizer or make_tokenizer())(untokenized, verbose=False)["input_ids"]))
        got = f"none: the longest of {count} has {most} tokens" if count else "none at all"
        raise ValueError(
            f"texts: expected documents of {length} tokens or more, got {got}; choose longer texts or a smaller length"
        )
    return texts


def check_texts(texts: Sequence[Text], length: int) -> None:
    """Raise a ValueError unless there are texts and all have `length` tokens."""
    short = [text.name for text in texts if len(text.tokens) < length]
    if short or not texts:
        raise ValueError(f"texts: expected documents of {length} tokens or more, got {short or 'none'}")


def check_vocabulary(texts: Sequence[Text], model: PreTrainedModel) -> None:
    """Raise a ValueError unless a model has an embedding of every token, which that of another tokenizer may lack."""
    size = len(cast(Tensor, model.get_input_embeddings().weight))
    for text in texts:
        if text.tokens and not 0 <= min(text.tokens) <= max(text.tokens) < size:
            raise ValueError(
                f"{text.name}: expected tokens 0 … {size - 1}, which the model has, got {min(text.tokens)} … "
                f"{max(text.tokens)}; take the model's own tokenizer"
            )


def _byte_ends(text: str, offsets: Sequence[tuple[int, int]]) -> tuple[int, ...]:
    """Where tokens end in the text's UTF-8, from where they end in its characters."""
    code = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
    sizes = 1 + (code >= 0x80).astype(np.int64) + (code >= 0x800) + (code >= 0x10000)
    ends = np.concatenate(([0], np.cumsum(sizes)))[[end for _, end in offsets]]
    return tuple(np.maximum.accumulate(ends).tolist())  # a special token after the text has end 0
