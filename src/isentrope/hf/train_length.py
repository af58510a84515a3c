"""The length that a model was trained at, by its config, and recipes that do not fit it."""

from __future__ import annotations

import warnings

from transformers import PreTrainedConfig

from isentrope.recipe import Recipe

# models whose learned positions begin after the padding token's
COUNT_FROM_PADDING = ("roberta", "xlm-roberta", "camembert")
OTHER_NAMES = ("seq_length", "max_seq_len")  # of BLOOM and MPT, which have no max_position_embeddings


def read_train_length(config: PreTrainedConfig) -> int | None:
    """Read the length that a model was trained at from its config; None where that states none.

    A config with scaled frequencies also states the length before scaling. Models are trained anew with llama3's and
    longrope's scaling; with the others' they mostly are not, and the length before is their training length.

    Args:
        config: of the text model (`config.get_text_config()`).
    """
    rope = getattr(config, "rope_parameters", None) or {}
    longest = getattr(config, "max_position_embeddings", None)
    if config.model_type in COUNT_FROM_PADDING and longest is not None:
        return longest - (config.pad_token_id or 0) - 1
    if rope.get("rope_type") in ("llama3", "longrope"):
        return longest
    before = rope.get("original_max_position_embeddings") or getattr(config, "original_max_position_embeddings", None)
    named = (before, longest, *(getattr(config, name, None) for name in OTHER_NAMES))
    return next(filter(None, named), None)


def check_windows(recipe: Recipe, config: PreTrainedConfig) -> None:
    """Warn of near windows beyond the training length, whose distances are as new to the model as without a method."""
    trained = read_train_length(config)
    methods = {str(one.position): one.position.near_window or 0 for one in recipe.recipes if one.position is not None}
    for method, window in methods.items():
        if trained is not None and window > trained:
            warnings.warn(
                f"{config.model_type}: was trained at {trained} tokens, and {method} leaves distances up to {window} "
                "as they are, so that longer text is read no better than by the plain model; choose "
                f"a window of at most {trained}, such as {trained // 2}",
                UserWarning,
                stacklevel=4,
            )
