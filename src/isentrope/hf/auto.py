"""The recipe `auto` for a model of transformers: what the rule in `recipe/auto.py` has to know of it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

from transformers import PreTrainedConfig

from isentrope.hf.introspection import LayerInfo
from isentrope.hf.layer_plan import takes_position
from isentrope.hf.train_length import read_scaled_length, read_train_length
from isentrope.recipe import PLAIN
from isentrope.recipe.auto import AutoRecipe, ModelFacts, choose_recipe, is_auto, read_auto_length
from isentrope.utils.parsing import parse_length


def choose_for_layers(layers: Sequence[LayerInfo], config: PreTrainedConfig, length: int | str) -> AutoRecipe:
    """Choose the recipe of a loaded model; warn of a length that it reads without any.

    Args:
        layers: the model's.
        config: of its text model.
        length: tokens to read, or such as "4x" times the training length.
    """
    if ropes := [layer.rope for layer in layers if layer.rope is not None and layer.rope.kind == "dynamic"]:
        raise ValueError(
            "recipe 'auto': not for rope_type 'dynamic', which follows the length of the text already; leave the model "
            f"as it is, or {ropes[0].as_model().unscaled_advice}"
        )
    spans = [[span for span in layer.region.spans if span.low > float("-inf")] for layer in layers]
    facts = ModelFacts(
        train_length=read_train_length(config),
        scaled_length=read_scaled_length(config),
        windows=tuple(int(max(1 - span.low for span in own)) if own else None for own in spans),
        is_causal=all(layer.causal for layer in layers),
        is_rotary=any(layer.rope is not None for layer in layers),
        has_window_frequencies=not any(
            own and takes_position(layer, layers) for layer, own in zip(layers, spans, strict=True)
        ),
    )
    chosen, trained = choose_recipe(facts, length), facts.train_length
    if trained is not None and (tokens := parse_length(length, trained)) <= trained:
        warnings.warn(
            f"recipe 'auto': {tokens} tokens are inside the training length of {trained}, so nothing changes; pass the "
            "length to read, such as length='4x', or leave the model as it is",
            UserWarning,
            stacklevel=4,
        )
    elif chosen.recipe == PLAIN:
        warnings.warn(f"recipe 'auto': nothing changes; {chosen.reasons[0]}", UserWarning, stacklevel=4)
    return chosen


def choose_for_config(config: PreTrainedConfig, length: int | str, train_length: int | None = None) -> AutoRecipe:
    """Choose the recipe of a causal model that is not loaded yet; windows are those that its config states.

    Args:
        config: the model's.
        length: tokens to read, or such as "4x" times the training length.
        train_length: in place of the one that the config states.
    """
    text_config = config.get_text_config()
    window = getattr(text_config, "sliding_window", None)
    if getattr(text_config, "use_sliding_window", True) is False:
        window = None
    kinds = getattr(text_config, "layer_types", None) or ["full" if window is None else "sliding"]
    windows = tuple(window if "sliding" in kind else None for kind in kinds)
    rope = getattr(text_config, "rope_parameters", None)
    facts = ModelFacts(
        train_length=train_length or read_train_length(text_config),
        scaled_length=None if train_length else read_scaled_length(text_config),
        windows=windows,
        is_rotary=rope is not None,
        has_window_frequencies="sliding_attention" in (rope or {}),
    )
    return choose_recipe(facts, length)


def resolve_auto(
    recipes: Sequence[str],
    config: PreTrainedConfig,
    length: int,
    notify: Callable[[str], None] = lambda line: None,
    train_length: int | None = None,
) -> tuple[str, ...]:
    """Replace `auto` among the texts of recipes by what it stands for, so that results name it.

    Args:
        recipes: texts of recipes.
        config: the model's.
        length: tokens to read, where the text itself has none.
        notify: called with the choice and each reason.
        train_length: in place of the one that the config states.
    """
    resolved = []
    for text in recipes:
        if is_auto(text):
            own = read_auto_length(text, None if ":" in text else length)
            text, reasons = choose_for_config(config, own, train_length)
            for line in (f"auto: {text}", *(f"  {reason}" for reason in reasons)):
                notify(line)
        resolved.append(text)
    return tuple(dict.fromkeys(resolved)) if any(map(is_auto, recipes)) else tuple(resolved)
