"""Warnings of transformers about lengths, which do not hold for extended models."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet, ref

from transformers import PreTrainedModel
from transformers.generation.stopping_criteria import MaxLengthCriteria

_CRITERIA = "_get_stopping_criteria"  # the method of a model that `generate` calls
_extended: WeakSet[PreTrainedModel] = WeakSet()


class _UnlimitedCriteria:
    """The stopping criteria of a model without the warning that its training length was exceeded.

    On the model itself, so that other models are warned: transformers logs the warning once in a process. The model is
    referred to weakly, since a cycle would keep it in memory until the next garbage collection.
    """

    def __init__(self, model: Any) -> None:
        self.model = ref(model)

    def __deepcopy__(self, memo: dict[int, Any]) -> _UnlimitedCriteria:
        return _UnlimitedCriteria(memo.get(id(self.model()), self.model()))

    def __reduce__(self) -> tuple[Any, ...]:
        return _UnlimitedCriteria, (self.model(),)

    def __call__(self, *args: Any, **options: Any) -> Any:
        model = self.model()
        criteria = getattr(type(model), _CRITERIA)(model, *args, **options)
        for one in criteria:
            if isinstance(one, MaxLengthCriteria):
                one.max_position_embeddings = None
        return criteria


def silence_length_warnings(model: PreTrainedModel) -> None:
    """Let a model generate, and its tokenizer encode, beyond its training length without a warning."""
    if hasattr(type(model), _CRITERIA):
        model.__dict__[_CRITERIA] = _UnlimitedCriteria(model)
    _extended.add(model)
    logger = logging.getLogger("transformers.tokenization_utils_base")
    if _is_still_true not in logger.filters:
        logger.addFilter(_is_still_true)


def restore_length_warnings(model: PreTrainedModel) -> None:
    """Undo `silence_length_warnings`."""
    model.__dict__.pop(_CRITERIA, None)
    _extended.discard(model)


@contextmanager
def without_length_warnings(model: PreTrainedModel) -> Iterator[PreTrainedModel]:
    """Silence the warnings in a block, for a plain model that reads beyond its training length on purpose."""
    if model in _extended:
        yield model
        return
    silence_length_warnings(model)
    try:
        yield model
    finally:
        restore_length_warnings(model)


def _is_still_true(record: logging.LogRecord) -> bool:
    """A filter: whether a tokenizer's warning of a maximum length is not that of an extended model.

    Tokenizers do not know their model: the one with that length is taken for it.
    """
    match = re.search(r"longer than the specified maximum sequence length.*\(\d+ > (\d+)\)", record.getMessage())
    if match is None:
        return True
    lengths = {getattr(model.config.get_text_config(), "max_position_embeddings", None) for model in _extended}
    return int(match[1]) not in lengths
