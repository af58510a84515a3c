"""The length that a model was trained at, by its config, and recipes that do not fit it."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from isentrope.hf.introspection import LayerInfo
from isentrope.masks import Lambda, Sink, Window
from isentrope.positions.branch import TRAINED_SCALED, TRAINED_SCALINGS
from isentrope.recipe import Recipe
from isentrope.temperatures import Fitted
from isentrope.utils.messages import truncate

# models whose learned positions begin after the padding token's
COUNT_FROM_PADDING = ("roberta", "xlm-roberta", "camembert")
STATIC_SCALINGS = ("linear", "yarn")  # by the same factor at every length
POSITION_TABLES = ("position_embeddings", "embed_positions", "wpe")  # of BERT, OPT and GPT-2
OTHER_NAMES = ("seq_length", "max_seq_len")  # of BLOOM and MPT, which have no max_position_embeddings
CONFIG_IS_WRONG = "unless its config is wrong"  # ends the warning of a length that a config does not state
_given: WeakKeyDictionary[PreTrainedModel, set[str]] = WeakKeyDictionary()  # warnings of each model


def read_train_length(config: PreTrainedConfig) -> int | None:
    """Read the length that a model was trained at from its config; None where that states none.

    A config with scaled frequencies also states the length before scaling. Models are trained anew with llama3's and
    longrope's scaling; with the others' most are not, and the length before is their training length.

    Args:
        config: of the text model (`config.get_text_config()`).
    """
    longest = getattr(config, "max_position_embeddings", None)
    if config.model_type in COUNT_FROM_PADDING and longest is not None:
        return longest - (config.pad_token_id or 0) - 1
    scalings = [one for one in _list_scalings(config) if one.get("rope_type", "default") != "default"]
    before = None  # a length before scaling means nothing where nothing is scaled
    if config.model_type not in TRAINED_SCALED and scalings and scalings[0]["rope_type"] not in TRAINED_SCALINGS:
        name = "original_max_position_embeddings"
        before = scalings[0].get(name) or getattr(config, name, None)
    named = (before, longest, *(getattr(config, name, None) for name in OTHER_NAMES))
    return next(filter(None, named), None)


def read_scaled_length(config: PreTrainedConfig) -> int | None:
    """Read the length that a model's frequencies are for: the training length times the factor of a scaling.

    Args:
        config: of the text model.

    Returns:
        The length; None where it is not known, or frequencies follow the length.
    """
    trained, scalings = read_train_length(config), _list_scalings(config)
    if any(one.get("rope_type") == "dynamic" for one in scalings):
        return None
    scalings = [one for one in scalings if one.get("rope_type") in STATIC_SCALINGS]
    if trained is None or not scalings or config.model_type in TRAINED_SCALED:
        return trained
    before = scalings[0].get("original_max_position_embeddings")
    return trained if before is None else max(trained, round(before * scalings[0]["factor"]))


def check_lengths(recipe: Recipe, model: PreTrainedModel) -> None:
    """Warn of a recipe that is for another training length than a model's config states, once for each model."""
    config = model.config.get_text_config()
    trained = read_train_length(config)
    if trained is None:
        return
    given = _given.setdefault(model, set())
    problems = _find_other_lengths(recipe, config, trained), _find_wide_windows(recipe, read_scaled_length(config))
    for problem in (*chain(*problems), *_find_position_tables(recipe, model, trained)):
        message = f"{config.model_type}: was trained at {trained} tokens, {problem}"
        if message not in given:
            given.add(message)
            warnings.warn(message, UserWarning, stacklevel=4)


@contextmanager
def ignore_other_lengths() -> Iterator[None]:
    """Say nothing of lengths that a config does not state: laws are fitted for the one that the user gives."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", f".*{CONFIG_IS_WRONG}")
        yield


def _find_other_lengths(recipe: Recipe, config: PreTrainedConfig, trained: int) -> Iterator[str]:
    """Find training lengths that the config does not state, then references beyond all that it states.

    A recipe fills lengths that it leaves out from those that it has, so that each is reported once.
    """
    stated = _list_stated_lengths(config) | {trained}
    laws = [law for one in recipe.recipes for law in one.temperatures]
    positions = [one.position for one in recipe.recipes if one.position is not None]
    others: dict[int, Any] = {}
    for part in (*laws, *positions):
        for length in _list_lengths(part):
            if length not in stated:
                others.setdefault(length, part)
    for length, part in others.items():
        fix = "fit it to this model" if isinstance(part, Fitted) else "leave that length out to use the model's own"
        yield f"and {truncate(str(part))} is for {length}; {fix}, {CONFIG_IS_WRONG}"
    if others:
        return
    shares = [one.share for one in recipe.recipes if one.share is not None]
    references = {getattr(share, "reference", None): share for share in shares}
    for reference, share in references.items():
        if reference is not None and reference > max(stated):
            yield f"and no query saw the {reference} keys of {truncate(str(share))}; leave reference out"


def _list_lengths(part: Any) -> list[int]:
    """List the training lengths that a part names; a table's is the last up to which it is 1 for all heads."""
    if isinstance(part, Fitted):
        if not part.clamp:  # then its first length has no such meaning
            return []
        table = torch.tensor(part.table).reshape(-1, len(part.lengths))
        changed = (table != 1).any(0).tolist()
        return [part.lengths[max(0, changed.index(True) - 1)]] if True in changed else []
    lengths = (getattr(part, name, None) for name in ("train_length", "original_length"))
    return [length for length in lengths if length is not None]


def _find_wide_windows(recipe: Recipe, known: int | None) -> Iterator[str]:
    """Find windows beyond the distances that a model knows: farther ones are as new to it as without a recipe."""
    if known is None:
        return
    windows: dict[str, int] = {}
    for one in recipe.recipes:
        if one.position is not None:
            windows[str(one.position)] = one.position.near_window or 0
        elif isinstance(one.mask, Window | Sink | Lambda):
            windows[str(one.mask)] = one.mask.window if isinstance(one.mask, Lambda) else one.mask.size
    for part, window in windows.items():
        if window > known:
            yield (
                f"and {part} leaves distances up to {window} as they are, of which those beyond {known} are new to "
                f"it, as without a recipe; choose a window of at most {known}, such as {known // 2}"
            )


def warn_of_hidden_sinks(recipe: Recipe, layers: Sequence[LayerInfo], model_type: str) -> None:
    """Warn of first keys that a recipe keeps and no layer sees, since all that it is for have windows of their own."""
    kept = [(layer.region, recipe.for_layer(layer.index).mask) for layer in layers]
    masks = {mask: region for region, mask in kept if isinstance(mask, Sink | Lambda) and mask.sinks}
    for mask in masks:
        regions = [region for region, other in kept if other == mask]
        if all(span.low > -math.inf for region in regions for span in region.spans):
            warnings.warn(
                f"{model_type}: all layers have windows of their own, beyond which the first {mask.sinks} keys of "
                f"{mask} are not seen; load the model without its windows (sliding_window=None), or leave it as it is",
                UserWarning,
                stacklevel=4,
            )


def _find_position_tables(recipe: Recipe, model: PreTrainedModel, trained: int) -> Iterator[str]:
    """Find a recipe that acts beyond the training length alone, in a model whose learned positions end there."""
    if not recipe.parts or not recipe.idle(trained):
        return
    tables = (name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, nn.Embedding))
    if any(name in POSITION_TABLES for name in tables):
        text = truncate(str(recipe))
        yield f"where its learned positions end, so that {text} changes nothing; give it more positions first"


def _list_stated_lengths(config: PreTrainedConfig) -> set[int]:
    """List the lengths that a model may have been trained at: before and after scaling, and in windows."""
    scalings = _list_scalings(config)
    names = ["max_position_embeddings", "original_max_position_embeddings", *OTHER_NAMES]
    if set(getattr(config, "layer_types", None) or ()) <= {"sliding_attention"}:
        names.append("sliding_window")
    lengths = {getattr(config, name, None) for name in names}
    lengths |= {one.get("original_max_position_embeddings") for one in scalings}
    factors = {one["factor"] for one in scalings if one.get("factor")}
    return {round(n * factor) for n in lengths if n is not None for factor in (1, *factors)}


def _list_scalings(config: PreTrainedConfig) -> list[dict[str, Any]]:
    """List the parameters of rotations: one for all layers, or one for each kind of layer."""
    rope = getattr(config, "rope_parameters", None) or {}
    return [rope, *(value for value in rope.values() if isinstance(value, dict))]
