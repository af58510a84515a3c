"""GAU-α: a bidirectional encoder of gated attention units with one head (Su et al., 2022), under any recipe."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.activations import ACT2FN
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import (
    BaseModelOutput,
    MaskedLMOutput,
    SequenceClassifierOutput,
    TokenClassifierOutput,
)

from isentrope.attention import attention
from isentrope.layout import Layout, layout_of, token_frames
from isentrope.positions import RoPE
from isentrope.precision import wide
from isentrope.recipe import Recipe
from isentrope.scores import Cosine
from isentrope.temperatures import SoftmaxPlus


class GAUAlphaConfig(PreTrainedConfig):
    """Sizes of GAU-α, and the recipe its attention follows.

    recipe: as `Recipe.to_dict` writes it, or its text. Left out, it is read from the keys of published checkpoints:
    RoPE on interleaved pairs, Softmax Plus where `normalization` is "softmax_plus", CosScale where `norm_method` or
    `my_info_dict` name it.
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
            recipe = published_recipe(normalization, others.get("norm_method"), others.get("my_info_dict"))
        given = Recipe.parse(recipe) if isinstance(recipe, str) else Recipe.from_dict(recipe)
        self.recipe = given.to_dict()
        others |= {"pad_token_id": pad_token_id, "tie_word_embeddings": tie_word_embeddings}
        super().__init__(**others)


def published_recipe(normalization: str, norm_method: Any = None, info: Any = None) -> dict[str, Any]:
    """The recipe that the keys of a published config stand for."""
    laws = {"softmax": None, "softmax_plus": SoftmaxPlus(clamp=False, count="sequence")}
    if normalization not in laws:
        raise ValueError(f"normalization: expected one of {', '.join(laws)}, got {normalization!r}")
    alpha = _cosscale(norm_method, info)
    score = None if alpha is None else Cosine(alpha)
    return Recipe(score=score, position=RoPE(layout="interleaved"), temperature=laws[normalization]).to_dict()


def _cosscale(norm_method: Any, info: Any) -> float | None:
    """The CosScale of a published config: by its name, with its value beside it, 128 by default; None without.

    What is not understood is an error: attention without the scale a model was trained with would run, and be wrong.
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


class ScaleOffset(nn.Module):
    """x ⊙ γ."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class Embeddings(nn.Module):
    """Word + type, normalised."""

    def __init__(self, config: GAUAlphaConfig) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size, padding_idx=config.pad_token_id)
        self.token_type_embeddings = nn.Embedding(config.type_vocab_size, config.hidden_size)
        self.dropout, self.eps = nn.Dropout(config.hidden_dropout_prob), config.layer_norm_eps

    def forward(self, ids: Tensor | None, types: Tensor | None, embeds: Tensor | None) -> Tensor:
        words = self.word_embeddings(ids) if embeds is None else embeds
        if types is None:
            types = torch.zeros(words.shape[:2], dtype=torch.int64, device=words.device)
        return self.dropout(norm(words + self.token_type_embeddings(types), self.eps))


class GatedAttentionUnit(nn.Module):
    """o = W_o (u ⊙ A v), with u, v and z from one projection and queries and keys from z."""

    def __init__(self, config: GAUAlphaConfig, recipe: Recipe) -> None:
        super().__init__()
        self.sizes = config.intermediate_size, config.intermediate_size, config.attention_key_size
        self.i_dense = nn.Linear(config.hidden_size, sum(self.sizes), bias=False)
        self.o_dense = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.q_scaleoffset = ScaleOffset(config.attention_key_size)
        self.k_scaleoffset = ScaleOffset(config.attention_key_size)
        self.act, self.dropout = ACT2FN[config.hidden_act], config.attention_probs_dropout_prob
        self.recipe = recipe
        self.learned = nn.ModuleList(recipe.learned)  # registered, so that they train, move and are saved

    def forward(self, x: Tensor, layout: Layout, backend: str) -> Tensor:
        u, v, z = self.act(self.i_dense(x)).split(self.sizes, -1)
        q, k = self.q_scaleoffset(z), self.k_scaleoffset(z)
        dropout = self.dropout if self.training else 0.0
        q, k, v = q[:, None], k[:, None], v[:, None]  # one head
        mixed = attention(q, k, v, self.recipe, layout=layout, dropout=dropout, backend=backend)
        return self.o_dense(u * mixed[:, 0])


class GAULayer(GradientCheckpointingLayer):
    """norm(x + dropout(GAU(x)))."""

    def __init__(self, config: GAUAlphaConfig, recipe: Recipe) -> None:
        super().__init__()
        self.gau = GatedAttentionUnit(config, recipe)
        self.dropout, self.eps = nn.Dropout(config.hidden_dropout_prob), config.layer_norm_eps

    def forward(self, x: Tensor, layout: Layout, backend: str) -> Tensor:
        return norm(x + self.dropout(self.gau(x, layout, backend)), self.eps)


def norm(x: Tensor, eps: float) -> Tensor:
    """x / √(mean x² + eps), without parameters."""
    return F.rms_norm(x.to(wide(x)), x.shape[-1:], eps=eps).to(x.dtype)


class Encoder(nn.Module):
    """The layers, each with what its recipe learns to itself."""

    def __init__(self, config: GAUAlphaConfig) -> None:
        super().__init__()
        recipe = Recipe.from_dict(config.recipe)
        layers = range(config.num_hidden_layers)
        self.layer = nn.ModuleList(GAULayer(config, copy.deepcopy(recipe).for_layer(index)) for index in layers)


class GAUAlphaPreTrainedModel(PreTrainedModel):
    config_class = GAUAlphaConfig
    base_model_prefix = "gau_alpha"
    supports_gradient_checkpointing = True
    _no_split_modules = ["GAULayer"]  # noqa: RUF012
    _keys_to_ignore_on_load_unexpected = [r"encoder\.layer\.\d+\."]  # noqa: RUF012  # fewer layers than were saved

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=self.config.initializer_range)
        elif isinstance(module, ScaleOffset):
            nn.init.ones_(module.weight)


class GAUAlphaModel(GAUAlphaPreTrainedModel):
    """The encoder."""

    def __init__(self, config: GAUAlphaConfig) -> None:
        super().__init__(config)
        self.embeddings, self.encoder = Embeddings(config), Encoder(config)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.embeddings.word_embeddings

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.embeddings.word_embeddings = value  # type: ignore[assignment]

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        output_hidden_states: bool = False,
        backend: str = "auto",
        **unused: Any,
    ) -> BaseModelOutput:
        """attention_mask: 1 for tokens, 0 for padding on either side. backend: as in `isentrope.attention`."""
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("expected either input_ids or inputs_embeds")
        x = self.embeddings(input_ids, token_type_ids, inputs_embeds)
        layout = self._layout(x, attention_mask, position_ids)
        states = [x]
        for layer in self.encoder.layer:
            x = layer(x, layout, backend)
            if output_hidden_states:
                states.append(x)
        return BaseModelOutput(last_hidden_state=x, hidden_states=tuple(states) if output_hidden_states else None)

    def _layout(self, x: Tensor, mask: Tensor | None, position_ids: Tensor | None) -> Layout:
        """One geometry for all layers."""
        batch, length = x.shape[:2]
        if mask is not None and mask.shape != (batch, length):
            raise ValueError(f"attention_mask: expected shape ({batch}, {length}), got {tuple(mask.shape)}")
        frames = None if mask is None else token_frames(mask.to(x.device, torch.bool))
        return layout_of(batch, length, length, x.device, frames=frames, position_ids=position_ids)


class PredictionHead(nn.Module):
    """Logits by the embedding matrix itself."""

    def __init__(self, config: GAUAlphaConfig) -> None:
        super().__init__()
        self.decoder = nn.Linear(config.hidden_size, config.vocab_size, bias=False)


class MaskedHead(nn.Module):
    """A level of names, as published checkpoints have it."""

    def __init__(self, config: GAUAlphaConfig) -> None:
        super().__init__()
        self.predictions = PredictionHead(config)


class GAUAlphaForMaskedLM(GAUAlphaPreTrainedModel):
    """GAU-α that predicts masked tokens."""

    _tied_weights_keys = {  # noqa: RUF012
        "cls.predictions.decoder.weight": "gau_alpha.embeddings.word_embeddings.weight"
    }

    def __init__(self, config: GAUAlphaConfig) -> None:
        super().__init__(config)
        self.gau_alpha, self.cls = GAUAlphaModel(config), MaskedHead(config)
        self.post_init()

    def get_output_embeddings(self) -> nn.Module:
        return self.cls.predictions.decoder

    def set_output_embeddings(self, value: nn.Module) -> None:
        self.cls.predictions.decoder = value  # type: ignore[assignment]

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        at: Tensor | None = None,
        **options: Any,
    ) -> MaskedLMOutput:
        """labels: the tokens, -100 where none is asked for.

        at: positions (batch, predictions) whose logits are wanted, (batch, predictions, vocabulary); all by default.
        """
        out = self.gau_alpha(input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds, **options)
        hidden = out.last_hidden_state
        if at is not None:
            hidden = hidden.gather(1, at[..., None].expand(-1, -1, hidden.shape[-1]))
        logits = self.cls.predictions.decoder(hidden)
        loss: Any = None
        if labels is not None:
            wanted = labels if at is None else labels.gather(1, at)
            loss = F.cross_entropy(logits.flatten(0, 1).float(), wanted.flatten())
        return MaskedLMOutput(loss=loss, logits=logits, hidden_states=out.hidden_states)


class Classifier(GAUAlphaPreTrainedModel):
    """GAU-α with a linear layer on top."""

    def __init__(self, config: GAUAlphaConfig) -> None:
        super().__init__(config)
        self.gau_alpha = GAUAlphaModel(config)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels or 1)
        self.post_init()


class GAUAlphaForSequenceClassification(Classifier):
    """GAU-α with a class for each text, read off its first token."""

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        **options: Any,
    ) -> SequenceClassifierOutput:
        """labels (batch,): classes, or numbers where `num_labels` is 1."""
        out = self.gau_alpha(input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds, **options)
        hidden = out.last_hidden_state
        # the first token is not the first slot where padding is on the left
        rows = torch.arange(len(hidden), device=hidden.device)
        text = hidden[:, 0] if attention_mask is None else hidden[rows, attention_mask.to(torch.int64).argmax(1)]
        logits = self.classifier(self.dropout(text))
        loss: Any = None
        if labels is not None:
            regression = self.config.num_labels == 1
            loss = F.mse_loss(logits[:, 0], labels.float()) if regression else F.cross_entropy(logits.float(), labels)
        return SequenceClassifierOutput(loss=loss, logits=logits, hidden_states=out.hidden_states)


class GAUAlphaForTokenClassification(Classifier):
    """GAU-α with a class for each token."""

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        **options: Any,
    ) -> TokenClassifierOutput:
        """labels (batch, tokens): classes, -100 where none is asked for."""
        out = self.gau_alpha(input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds, **options)
        logits = self.classifier(self.dropout(out.last_hidden_state))
        loss: Any = None if labels is None else F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
        return TokenClassifierOutput(loss=loss, logits=logits, hidden_states=out.hidden_states)
