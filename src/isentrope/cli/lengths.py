"""Lengths on a command line: numbers of tokens, or multiples of a model's training length such as 4x."""

from __future__ import annotations

import re
from typing import Any

MULTIPLE = re.compile(r"(\d+(?:\.\d+)?)[x×](?:train)?")


def read_known_train_length(model: str, gguf_file: str | None = None) -> int | None:
    """Read the training length from a causal model's config; None for GAU-α and where a config states none.

    Args:
        model: a folder, or a name on the hub.
        gguf_file: a GGUF file in that folder.
    """
    from isentrope.evaluation.loading import read_causal_config
    from isentrope.hf.layer_plan import read_train_length

    config = read_causal_config(model, gguf_file)
    if config is None:
        return None
    text_config: Any = config.get_text_config()
    named = (
        read_train_length(text_config),
        *(getattr(text_config, name, None) for name in ("seq_length", "max_seq_len")),
    )
    return next(filter(None, named), None)  # BLOOM and MPT name it otherwise


def resolve_lengths(
    name: str, text: str, model: str, gguf_file: str | None = None, trained: int | None = None
) -> list[int]:
    """Parse lengths separated by commas, each in tokens or as a multiple of the training length.

    Args:
        name: the option, for the error message.
        text: such as "8192", "4x" or "1x,2x,16384".
        model: the model whose config states the training length, read only if a multiple needs it.
        gguf_file: a GGUF file in the model's folder.
        trained: the training length, in place of the config's.

    Raises:
        ValueError: an entry is neither, or a multiple of an unknown length.
    """
    tokens = []
    for word in map(str.strip, text.split(",")):
        match = MULTIPLE.fullmatch(word)
        if match is None and not (word.isascii() and word.isdigit()):
            raise ValueError(f"{name}: expected tokens such as 8192, or 4x the training length, got {text!r}")
        trained = trained or (read_known_train_length(model, gguf_file) if match else None)
        if match and trained is None:
            raise ValueError(f"{name}: {model} states no training length; expected tokens, got {text!r}")
        tokens.append(int(float(match[1]) * (trained or 0)) if match else int(word))
    return tokens


def resolve_length(text: str, model: str, gguf_file: str | None = None, trained: int | None = None) -> int:
    """Parse one length as `resolve_lengths` does."""
    tokens = resolve_lengths("length", text, model, gguf_file, trained)
    if len(tokens) > 1:
        raise ValueError(f"length: expected one, got {text!r}")
    return tokens[0]
