"""GAU-α: a bidirectional encoder of gated attention units with one head (Su et al., 2022), under any recipe."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.activations import ACT2FN
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import (
    BaseModelOutput,
    MaskedLMOutput,
    SequenceClassifierOutput,
    TokenClassifierOutput,
)

from isentrope.core.compile import maybe_compile
from isentrope.core.dtypes import accumulation_dtype, choose_load_dtype
from isentrope.core.frames import find_token_frames
from isentrope.core.layout import Layout, get_layout
from isentrope.functional import attention
from isentrope.models.gau.config import GAUAlphaConfig, build_gau_recipe
from isentrope.models.gau.dropout import dropout
from isentrope.positions import CLEX
from isentrope.pretrained import HUB_OPTIONS, saved_dtype
from isentrope.recipe import LayerRecipes, Recipe
from isentrope.temperatures import SSMax


@cache
def _get_activation(name: str) -> Any:
    """Return one activation for all layers, which then share compiled code."""
    return ACT2FN[name]


class ScaleOffset(nn.Module):
    """x ⊙ γ."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight.to(x.dtype)


class Embeddings(nn.Module):
    """Word + type, normalised."""

    def __init__(self, config: GAUAlphaConfig) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size, padding_idx=config.pad_token_id)
        self.token_type_embeddings = nn.Embedding(config.type_vocab_size, config.hidden_size)
        self.dropout, self.eps = config.hidden_dropout_prob, config.layer_norm_eps

    def forward(self, ids: Tensor | None, types: Tensor | None, embeds: Tensor | None, noise: Tensor | None) -> Tensor:
        words = self.word_embeddings(ids) if embeds is None else embeds
        # one type for all: a lookup would have all tokens add to the gradient of one row, slowly
        table = self.token_type_embeddings
        x = rms_norm(words + (table.weight[0] if types is None else table(types)), self.eps)
        return dropout(x, self.dropout, noise, 0) if self.training else x


class GatedAttentionUnit(nn.Module):
    """o = W_o (u ⊙ A v), with u, v and z from one projection and queries and keys from z."""

    def __init__(self, config: GAUAlphaConfig, recipe: Recipe, index: int) -> None:
        super().__init__()
        self.dropout_site = 2 * index + 1
        self.sizes = config.intermediate_size, config.intermediate_size, config.attention_key_size
        self.i_dense = nn.Linear(config.hidden_size, sum(self.sizes), bias=False)
        self.o_dense = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.q_scaleoffset = ScaleOffset(config.attention_key_size)
        self.k_scaleoffset = ScaleOffset(config.attention_key_size)
        self.act, self.dropout = _get_activation(config.hidden_act), config.attention_probs_dropout_prob
        self.recipe = recipe
        # registered, so that they train, move and are saved; in training mode, as every new module begins
        self.learned = nn.ModuleList(recipe.learned).train()

    def forward(self, x: Tensor, layout: Layout, backend: str, noise: Tensor | None, at: Tensor | None) -> Tensor:
        u, v, z = self.project(x, at)
        v, z = (maybe_compile(_activate, (part,), self.act)(part, self.act) for part in (v, z))
        q, k = self.q_scaleoffset(gather_positions(z, at)), self.k_scaleoffset(z)
        drop = None
        if self.training and self.dropout:
            drop = partial(dropout, rate=self.dropout, noise=noise, site=self.dropout_site)
        q, k, v = q[:, None], k[:, None], v[:, None]  # one head
        mixed = attention(q, k, v, self.recipe, layout=layout, dropout=drop, backend=backend)
        return self.o_dense(maybe_compile(_gate, (u, mixed), self.act)(u, mixed[:, 0], self.act))

    def project(self, x: Tensor, at: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Compute u (at these positions), v and z before their activation.

        A plain linear layer is split into three products: joining their gradients would cost another pass.
        """
        if type(self.i_dense) is not nn.Linear:  # an adapter, for one
            u, v, z = self.i_dense(x).split(self.sizes, -1)
            return gather_positions(u, at), v, z
        to_u, to_v, to_z = self.i_dense.weight.split(self.sizes)
        return F.linear(gather_positions(x, at), to_u), F.linear(x, to_v), F.linear(x, to_z)


class GAULayer(GradientCheckpointingLayer):
    """norm(x + dropout(GAU(x)))."""

    def __init__(self, config: GAUAlphaConfig, recipe: Recipe, index: int) -> None:
        super().__init__()
        self.gau, self.dropout_site = GatedAttentionUnit(config, recipe, index), 2 * index + 2
        self.dropout, self.eps = config.hidden_dropout_prob, config.layer_norm_eps

    def forward(
        self, x: Tensor, layout: Layout, backend: str, noise: Tensor | None = None, at: Tensor | None = None
    ) -> Tensor:
        """Compute x after the layer, at the positions `at` (batch, positions) or everywhere."""
        out = self.gau(x, layout, backend, noise, at)
        if self.training:
            out = dropout(out, self.dropout, noise, self.dropout_site)
        return maybe_compile(_add_and_normalize, (x, out), self.eps)(gather_positions(x, at), out, self.eps)


def _activate(x: Tensor, act: Callable[[Tensor], Tensor]) -> Tensor:
    return act(x)


def _gate(u: Tensor, mixed: Tensor, act: Callable[[Tensor], Tensor]) -> Tensor:
    return act(u) * mixed


def _add_and_normalize(x: Tensor, out: Tensor, eps: float) -> Tensor:
    """Add in fp32 and round once: under autocast the residual stream has the precision of what is added to it."""
    return rms_norm(x.to(accumulation_dtype(x)) + out, eps).to(out.dtype)


def gather_positions(x: Tensor, at: Tensor | None) -> Tensor:
    """Return x (batch, tokens, size) at the positions `at` (batch, positions), or all of it."""
    return x if at is None else x.gather(1, at[..., None].expand(-1, -1, x.shape[-1]))


def rms_norm(x: Tensor, eps: float) -> Tensor:
    """x / √(mean x² + eps), without parameters."""
    return F.rms_norm(x.to(accumulation_dtype(x)), x.shape[-1:], eps=eps).to(x.dtype)


class Encoder(nn.Module):
    """The layers, each with learned parts of its own."""

    def __init__(self, config: GAUAlphaConfig) -> None:
        super().__init__()
        recipe = build_gau_recipe(config.recipe, config.max_position_embeddings, config.attention_key_size)
        config.recipe = recipe.to_dict()  # `from_pretrained(…, recipe=…)` sets its text
        layers = range(config.num_hidden_layers)
        if isinstance(recipe, LayerRecipes):
            recipe.check_layers(layers)
        self.layer = nn.ModuleList(GAULayer(config, copy.deepcopy(recipe).for_layer(i), i) for i in layers)


class GAUAlphaPreTrainedModel(PreTrainedModel):
    config_class = GAUAlphaConfig
    base_model_prefix = "gau_alpha"
    supports_gradient_checkpointing = True
    _no_split_modules = ["GAULayer"]  # noqa: RUF012
    _keys_to_ignore_on_load_unexpected = [r"encoder\.layer\.\d+\."]  # noqa: RUF012  # fewer layers than were saved

    @classmethod
    def from_pretrained(cls, name: Any, *inputs: Any, **options: Any) -> Any:  # type: ignore[override]
        """Load as any model of transformers, but half precision in float32 on a CPU unless `dtype` is given."""
        if name is not None and options.get("dtype", options.get("torch_dtype")) is None:
            config = options.get("config")
            dtype = getattr(config, "dtype", None) if isinstance(config, GAUAlphaConfig) else None
            hub = {key: options[key] for key in HUB_OPTIONS if key in options}
            where = options.get("device_map")
            device = where if isinstance(where, torch.device) or where in ("cpu", "cuda") else None
            options["dtype"] = choose_load_dtype(saved_dtype(name, dtype, **hub), None, device)
        return super().from_pretrained(name, *inputs, **options)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, (CLEX, SSMax)):
            module.reset()  # after its own layers
        elif isinstance(module, (nn.Linear, nn.Embedding)):
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
        noise: Tensor | None = None,
        at: Tensor | None = None,
        **unused: Any,
    ) -> BaseModelOutput:
        """Encode tokens; arguments as in transformers, and these of our own.

        Args:
            backend: as in `isentrope.attention`.
            noise: an integer for each row that decides its dropout; by default torch's generator does.
            at: positions (batch, positions) at which to compute the last layer; by default everywhere.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("expected either input_ids or inputs_embeds")
        x = self.embeddings(input_ids, token_type_ids, inputs_embeds, noise)
        layout = self._layout(x, attention_mask, position_ids)
        states = [x]
        for layer in self.encoder.layer[:-1]:
            x = layer(x, layout, backend, noise)
            if output_hidden_states:
                states.append(x)
        for layer in self.encoder.layer[-1:]:
            if at is not None:
                layout = self._layout(x, attention_mask, position_ids, at)
            x = layer(x, layout, backend, noise, at)
            if output_hidden_states:
                states.append(x)
        return BaseModelOutput(last_hidden_state=x, hidden_states=tuple(states) if output_hidden_states else None)

    def _layout(self, x: Tensor, mask: Tensor | None, position_ids: Tensor | None, at: Tensor | None = None) -> Layout:
        """Return the layout of all tokens, or that of queries `at` these positions."""
        batch, length = x.shape[:2]
        if mask is not None and mask.shape != (batch, length):
            raise ValueError(f"attention_mask: expected shape ({batch}, {length}), got {tuple(mask.shape)}")
        frames = None if mask is None else find_token_frames(mask.to(x.device, torch.bool))
        if at is None:
            return get_layout(batch, length, length, x.device, frames=frames, position_ids=position_ids)
        first, end = (
            (torch.zeros_like(at), torch.full_like(at, length))
            if frames is None
            else (edge.gather(1, at) for edge in frames[:2])
        )
        positions: Any = position_ids
        if position_ids is not None:
            position_ids = position_ids.expand(batch, -1)
            positions = position_ids.gather(1, at), position_ids
        return get_layout(batch, at.shape[1], length, x.device, frames=(first, end, at), position_ids=positions)


class PredictionHead(nn.Module):
    """Logits by the embedding matrix itself."""

    def __init__(self, config: GAUAlphaConfig) -> None:
        super().__init__()
        self.decoder = nn.Linear(config.hidden_size, config.vocab_size, bias=False)


class MaskedLMHead(nn.Module):
    """A level in the names of weights, as published checkpoints have it."""

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
        self.gau_alpha, self.cls = GAUAlphaModel(config), MaskedLMHead(config)
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
        """Predict tokens; arguments as in transformers, and these of our own.

        Args:
            labels: the tokens, -100 where there is none to predict.
            at: positions (batch, predictions) of the logits, (batch, predictions, vocabulary); by default all.
        """
        out = self.gau_alpha(input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds, at=at, **options)
        logits = self.cls.predictions.decoder(out.last_hidden_state)
        loss: Any = None
        if labels is not None:
            targets = labels if at is None else labels.gather(1, at)
            loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
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
    """GAU-α with a class for each text, predicted from its first token."""

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
        """labels (batch, tokens): classes, -100 where there is none to predict."""
        out = self.gau_alpha(input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds, **options)
        logits = self.classifier(self.dropout(out.last_hidden_state))
        loss: Any = None if labels is None else F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
        return TokenClassifierOutput(loss=loss, logits=logits, hidden_states=out.hidden_states)
