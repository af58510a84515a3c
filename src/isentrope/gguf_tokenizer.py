"""Compare a tokenizer that transformers read from a GGUF file with what the file says of it."""

from __future__ import annotations

from typing import Any

import numpy as np

MAX_WORDS = 64  # of the vocabulary that are tokenized again
MIN_WORD_LETTERS = 4
SENTENCEPIECE = "llama"  # the kind of tokenizer that starts a text with a token unless the file says otherwise


def match_gguf(tokenizer: Any, path: str) -> Any:
    """Add the first and last tokens that a GGUF file asks for: transformers drops them, and models read worse without.

    Raises:
        ValueError: the tokenizer splits words of its own vocabulary, as versions of transformers do that miss merges.
    """
    from gguf import GGUFReader

    fields = GGUFReader(path).fields

    def read(name: str, default: Any) -> Any:
        return fields[f"tokenizer.ggml.{name}"].contents() if f"tokenizer.ggml.{name}" in fields else default

    first = bool(read("add_bos_token", read("model", "") == SENTENCEPIECE)) and tokenizer.bos_token is not None
    last = bool(read("add_eos_token", False)) and tokenizer.eos_token is not None
    ids = tokenizer("a", verbose=False)["input_ids"]
    if first and ids[0] != tokenizer.bos_token_id:
        tokenizer.add_bos_token = True
    if last and ids[-1] != tokenizer.eos_token_id:
        tokenizer.add_eos_token = True
    _check_words(tokenizer, path)
    return tokenizer


def _check_words(tokenizer: Any, path: str) -> None:
    """Check that most words of the vocabulary, each alone, are one token."""
    words = sorted(token for token in tokenizer.get_vocab() if token.isascii() and token.isalpha() and token.islower())
    words = [word for word in words if len(word) >= MIN_WORD_LETTERS]
    words = [words[i] for i in np.linspace(0, len(words) - 1, min(MAX_WORDS, len(words))).astype(int)]
    counts = [len(tokenizer(word, add_special_tokens=False, verbose=False)["input_ids"]) for word in words]
    if words and np.median(counts) > 2:  # a space before it may be a token of its own
        raise ValueError(
            f"{path}: this version of transformers reads a tokenizer from it that splits words into letters; "
            "load the model from a folder that has a tokenizer.json, or with another version"
        )
