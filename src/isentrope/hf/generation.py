"""Warnings of transformers about lengths: for extended models the length is that up to which distances are known."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet, ref

from transformers import PreTrainedModel
from transformers.generation.stopping_criteria import MaxLengthCriteria

_CRITERIA = "_get_stopping_criteria"  # the method of a model that `generate` calls
FindLimit = Callable[[PreTrainedModel], int | None]
_extended: WeakSet[PreTrainedModel] = WeakSet()


class _ExtendedCriteria:
    """The stopping criteria of a model whose warning of an exceeded length is for the recipe, or is left out.

    Args:
        model: the model.
        find_limit: returns the longest text that the recipe is for; None leaves the warning out.

    On the model itself, so that other models are warned: transformers logs the warning once in a process. The model is
    referred to weakly, since a cycle would keep it in memory until the next garbage collection.
    """

    def __init__(self, model: Any, find_limit: FindLimit) -> None:
        self.model, self.find_limit = ref(model), find_limit

    def __deepcopy__(self, memo: dict[int, Any]) -> _ExtendedCriteria:
        return _ExtendedCriteria(memo.get(id(self.model()), self.model()), self.find_limit)

    def __reduce__(self) -> tuple[Any, ...]:
        return _ExtendedCriteria, (self.model(), self.find_limit)

    def __call__(self, *args: Any, **options: Any) -> Any:
        model = self.model()
        criteria = getattr(type(model), _CRITERIA)(model, *args, **options)
        for one in criteria:
            if isinstance(one, MaxLengthCriteria):
                limit = one.max_position_embeddings
                is_longer = limit is not None and one.max_length > limit
                one.max_position_embeddings = self.find_limit(model) if is_longer and model is not None else None
        return criteria


def find_no_limit(model: PreTrainedModel) -> int | None:
    """For a model that reads beyond its length on purpose."""
    return None


def silence_length_warnings(model: PreTrainedModel, find_limit: FindLimit = find_no_limit) -> None:
    """Let a model generate, and its tokenizer encode, beyond its training length without a warning, up to a limit."""
    if hasattr(type(model), _CRITERIA):
        model.__dict__[_CRITERIA] = _ExtendedCriteria(model, find_limit)
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
