"""The recipe `auto`: which recipe a model gets, from its training length and the length that it is to read.

The whole rule is `choose_recipe` and the constants above it. It rests on docs/results/frontier (methods compared),
docs/results/share and docs/laws.md (laws for far keys). New evidence changes a constant, or one branch.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, log2
from typing import NamedTuple

from isentrope.core.choice import BlockChoice
from isentrope.utils.messages import advise_unscaled, format_value
from isentrope.utils.parsing import parse_length

AUTO = "auto"
WINDOW_FRACTION = 0.5  # of the training length: near keys with their own distances
RETRIEVE_FROM = 4.0  # times the training length: choosing far keys was measured to win from here on
RETRIEVE_BLOCKS = 16
MAX_BLOCK_SIZE = 128  # a block has the power of two at or above √n_tr keys: 16, 64, 128 at 256, 2048, 8192 tokens
MIN_TRAIN_LENGTH = 4


class AutoRecipe(NamedTuple):
    """What `auto` stands for: the text of a recipe, and a sentence for each choice in it."""

    recipe: str
    reasons: tuple[str, ...]


@dataclass(frozen=True)
class ModelFacts:
    """What the choice depends on.

    Attributes:
        train_length: tokens that the model was trained at; None where its config does not say.
        windows: of each layer with a window of its own its keys; None for a layer that sees all keys.
        is_causal: whether no query sees ahead.
        is_rotary: whether the model rotates queries and keys by their positions.
        has_window_frequencies: whether layers with windows rotate at frequencies of their own, and so stay as they are.
        scaled_length: tokens that its frequencies are for, where its config scales them.
    """

    train_length: int | None
    windows: tuple[int | None, ...] = (None,)
    is_causal: bool = True
    is_rotary: bool = True
    has_window_frequencies: bool = False
    scaled_length: int | None = None


def choose_recipe(model: ModelFacts, length: int | str) -> AutoRecipe:
    """Choose the recipe for reading `length` tokens without training.

    | tokens | recipe |
    |---|---|
    | up to n_tr, or every layer has a window of its own | `plain` |
    | up to s n_tr, where the config scales frequencies s times | `plain`; beyond, s n_tr is in place of n_tr |
    | below 4 n_tr | `rerope:window=n_tr/2+share` |
    | from 4 n_tr on | `rerope:window=n_tr/2+retrieve`, with `share` where n_tr is so short that it has an effect |

    Args:
        model: what is known of the model.
        length: tokens, or such as "4x" times the training length.

    Returns:
        The recipe and why.

    Raises:
        ValueError: the length is not one, or nothing is known that a choice could rest on.
    """
    trained = model.train_length
    if trained is None or trained < MIN_TRAIN_LENGTH:
        raise ValueError(
            f"recipe 'auto': expected a config that states the training length, got {trained}; name a recipe, such as "
            "rerope:window=2048+share:reference=2048"
        )
    tokens, known = parse_length(length, trained), model.scaled_length or trained
    if tokens <= trained:
        return AutoRecipe("plain", (f"plain: {tokens} tokens are inside the training length of {trained}",))
    unscaled = f"for a recipe in place of that scaling {advise_unscaled(trained)}"
    if tokens <= known:
        reason = f"its config scales the frequencies for {known} tokens already; {unscaled}"
        return AutoRecipe("plain", (f"plain: {reason}",))
    factor = tokens / known
    if not model.is_rotary:
        raise ValueError(
            "recipe 'auto': expected a model with rotary embeddings, which its methods are for; name a recipe of "
            "temperatures and masks, such as infoscale, or calibrate 'plain'"
        )
    if model.windows and None not in model.windows:
        widest = max(window for window in model.windows if window is not None)
        reason = f"plain: every layer has a window of its own, of {widest} keys at most, so that no distance is new"
        return AutoRecipe("plain", (reason,))
    window = int(known * WINDOW_FRACTION)
    refusal = _explain_no_retrieve(model, factor, window)
    length_name = "the training length" if known == trained else "the length that its config scales frequencies for"
    share = "share" if known == trained else f"share:reference={known - window}"
    parts = {
        f"rerope:window={window}": "keys beyond the window all have its distance, so that none is new to the model and "
        f"all of the text stays in reach; the window is half of {length_name}, {known}",
        share: f"{factor:.3g} times {length_name} has more far keys than the model was trained with, which "
        "would take over attention; β = ½ had a lower perplexity than InfoScale on every decoder measured "
        "(docs/laws.md)",
    }
    if refusal is None:
        parts[format_retrieve(known)] = (
            f"from {RETRIEVE_FROM:g} times the training length on, a query chooses the blocks of far keys that matter "
            "to it: SmolLM2, TinyLlama and Gemma-3-270M found more passkeys so than with share alone, at a lower "
            "perplexity; of two small models, without passkeys to find, the Llama that ships had a lower "
            "one, and stories15M a higher one on stories (docs/results/frontier)"
        )
    others = [] if refusal is None else [f"no retrieve: {refusal}"]
    most = _choose_blocks(known).count_most_far()
    if refusal is None and most <= known - window:
        del parts[share]
        others.append(f"no share: a query sees at most {most} far keys, no more than the {known - window} of before")
    if known != trained:
        others.append(unscaled)
    others.append("no temperature: near attention stays as it was trained, and far attention does without")
    if any(window is not None for window in model.windows):
        others.append("layers with a window of their own keep it")
    return AutoRecipe("+".join(parts), (*(f"{part}: {reason}" for part, reason in parts.items()), *others))


def format_retrieve(train_length: int) -> str:
    """Return the part that chooses far keys for a model of this training length."""
    choice = _choose_blocks(train_length)
    return f"retrieve:blocks={choice.blocks},size={choice.size}"


def _choose_blocks(train_length: int) -> BlockChoice:
    return BlockChoice(RETRIEVE_BLOCKS, min(MAX_BLOCK_SIZE, 1 << ceil(log2(train_length) / 2)))


def _explain_no_retrieve(model: ModelFacts, factor: float, window: int) -> str | None:
    """Return why far keys are not chosen; None where they are."""
    if factor < RETRIEVE_FROM:
        return f"below {RETRIEVE_FROM:g} times the training length all far keys are seen"
    if not model.is_causal:
        return "it chooses keys for causal attention alone, and this model looks ahead"
    if not model.has_window_frequencies and any(own is not None and own > window for own in model.windows):
        return f"layers with a window of their own of more than {window} keys have no far keys to choose from"
    return None


def is_auto(text: object) -> bool:
    """Return whether the text of a recipe is `auto`, with or without a length."""
    return isinstance(text, str) and text.partition(":")[0].strip() == AUTO


def read_auto_length(text: str, length: int | str | None = None) -> int | str:
    """Return the length that `auto` is for: that in `auto:length=…`, or the one given beside the text.

    Raises:
        ValueError: there is none, there are two, or the text has other options.
    """
    rest = text.partition(":")[2].strip()
    key, _, own = rest.partition("=")
    if rest and length is not None:
        raise ValueError(f"recipe {format_value(text)}: expected one length, got length={length!r} too; leave one out")
    if rest and (key.strip() != "length" or not own.strip()):
        raise ValueError(f"recipe {format_value(text)}: expected auto:length=4x or auto with a length beside it")
    if not rest and length is None:
        raise ValueError(
            "recipe 'auto': needs the length that the model is to read; write auto:length=4x, or pass length='4x' or "
            "a number of tokens to isentrope.extend"
        )
    return own.strip() if rest else length  # type: ignore[return-value]
