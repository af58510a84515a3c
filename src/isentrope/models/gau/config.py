"""The configuration of GAU-α: sizes, and the recipe that its attention follows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from transformers import PreTrainedConfig

from isentrope.positions import RoPE
from isentrope.recipe import LayerRecipes, Recipe
from isentrope.recipe.layers import split_layers
from isentrope.scores import Cosine
from isentrope.temperatures import SoftmaxPlus

LEARNED_WEIGHTS = (".learned.",)  # parts of the names of weights that a recipe adds


class GAUAlphaConfig(PreTrainedConfig):
    """Sizes of GAU-α, and the recipe its attention follows.

    Args:
        max_position_embeddings: the length it was trained at.
        recipe: as `Recipe.to_dict` writes it, or its text (see `build_gau_recipe`). By default it is read from the keys
            of published checkpoints: RoPE on interleaved pairs, Softmax Plus where `normalization` is "softmax_plus",
            CosScale where `norm_method` or `my_info_dict` name it.
    """

    model_type = "gau_alpha"

    def __init__(
        self,
        vocab_size: int = 12000,
        hidden_size: int = 768,
        intermediate_size: int = 1536,
        num_hidden_layers: int = 24,
        attention_key_size: int = 128,
        type_vocab_size: int = 2,
        hidden_act: str = "swish",
        hidden_dropout_prob: float = 0.1,
        attention_probs_dropout_prob: float = 0.1,
        max_position_embeddings: int = 512,
        layer_norm_eps: float = 1e-12,
        initializer_range: float = 0.02,
        normalization: str = "softmax",
        recipe: dict[str, Any] | str | None = None,
        pad_token_id: int = 0,
        tie_word_embeddings: bool = True,
        **others: Any,
    ) -> None:
        self.vocab_size, self.hidden_size, self.intermediate_size = vocab_size, hidden_size, intermediate_size
        self.num_hidden_layers, self.attention_key_size = num_hidden_layers, attention_key_size
        self.type_vocab_size, self.hidden_act = type_vocab_size, hidden_act
        self.hidden_dropout_prob = hidden_dropout_prob
        self.attention_probs_dropout_prob = attention_probs_dropout_prob
        self.max_position_embeddings, self.layer_norm_eps = max_position_embeddings, layer_norm_eps
        self.initializer_range, self.normalization = initializer_range, normalization
        if recipe is None:
            recipe = read_published_recipe(normalization, others.get("norm_method"), others.get("my_info_dict"))
        self.recipe = build_gau_recipe(recipe, max_position_embeddings, attention_key_size).to_dict()
        others |= {"pad_token_id": pad_token_id, "tie_word_embeddings": tie_word_embeddings}
        super().__init__(**others)


def build_gau_recipe(recipe: dict[str, Any] | str, train_length: int, key_size: int) -> Recipe:
    """Build a recipe for GAU-α; a text takes from the model what it leaves out: interleaved RoPE, one head, length."""
    if not isinstance(recipe, str):
        return Recipe.from_dict(recipe)
    parsed = Recipe.parse(recipe, train_length=train_length, heads=1, dim=key_size)
    if isinstance(parsed, LayerRecipes):
        pairs = split_layers(recipe)
        return LayerRecipes((layers, build_gau_recipe(text, train_length, key_size)) for layers, text in pairs)
    parsed = replace(parsed, position=(parsed.position or RoPE()).resolve(train_length))
    data = parsed.to_dict()
    if hasattr(parsed.position, "layout") and "layout" not in recipe:
        data["position"]["layout"] = "interleaved"
    return Recipe.from_dict(data)


def read_published_recipe(normalization: str, norm_method: Any = None, info: Any = None) -> dict[str, Any]:
    """Return the recipe that the keys of a published config stand for."""
    laws = {"softmax": None, "softmax_plus": SoftmaxPlus(clamp=False, count="sequence")}
    if normalization not in laws:
        raise ValueError(f"normalization: expected one of {', '.join(laws)}, got {normalization!r}")
    alpha = _read_cosscale(norm_method, info)
    score = None if alpha is None else Cosine(alpha)
    return Recipe(score=score, position=RoPE(layout="interleaved"), temperature=laws[normalization]).to_dict()


def _read_cosscale(norm_method: Any, info: Any) -> float | None:
    """Read the CosScale of a published config, 128 where it is named without a value; None where it is not named.

    Unknown keys are errors: without the scale a model was trained with, attention would run and be wrong.
    """
    named = {str(key).lower().replace("_", ""): value for key, value in (info or {}).items()}
    method = str(norm_method or named.get("normmethod") or "").lower()
    value = named.get("cosscale")
    if method and "cos" not in method and method not in ("none", "softmax"):
        raise ValueError(f"norm_method: expected CosScale or none, got {norm_method!r}; pass recipe=… instead")
    if named and value is None and not method:
        raise ValueError(f"my_info_dict: expected CosScale and its value, got {info!r}; pass recipe=… instead")
    if value is None or value is True:
        return 128.0 if "cos" in method or value is True else None
    return float(value) if value is not False else None
