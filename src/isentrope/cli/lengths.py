"""Lengths on a command line: numbers of tokens, or multiples of a model's training length such as 4x."""

from __future__ import annotations

from isentrope.utils.parsing import is_multiple, parse_length


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
    from isentrope.evaluation.loading import read_known_train_length

    words = text.split(",")
    if trained is None and any(map(is_multiple, words)):
        trained = read_known_train_length(model, gguf_file)
    return [parse_length(word, trained, name) for word in words]


def resolve_length(text: str, model: str, gguf_file: str | None = None, trained: int | None = None) -> int:
    """Parse one length as `resolve_lengths` does."""
    tokens = resolve_lengths("length", text, model, gguf_file, trained)
    if len(tokens) > 1:
        raise ValueError(f"length: expected one, got {text!r}")
    return tokens[0]
