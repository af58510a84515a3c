"""A tiny model with random weights of every text model type that transformers has: `names()` and `build(name)`.

`examine(name)` extends it and says what is right, refused or wrong. Configurations are made from one table of sizes, by
the names of their fields, so that a type that a later version of transformers brings is tried as well. What cannot be
built that way is answered with the reason.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_MASKED_LM_MAPPING, MODEL_MAPPING, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.utils import logging

import isentrope as ise
from isentrope.hf.extend import extension

VOCABULARY = 97
LAYERS = 4
HEADS = 4
HEAD_DIM = 16
WIDTH = HEADS * HEAD_DIM
TRAINED = 512
WINDOW = 24
EXPERTS = 4
# by the name of a field, whatever model it is of
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "embedding_size": WIDTH,
    "word_embed_proj_dim": WIDTH,
    "intermediate_size": 48,
    "ffn_dim": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 2,
    "num_kv_heads": 2,
    "head_dim": HEAD_DIM,
    "attention_head_size": HEAD_DIM,
    "kv_channels": HEAD_DIM,
    "max_position_embeddings": TRAINED,
    "initializer_range": 0.3,
    "init_std": 0.3,
    "sliding_window": WINDOW,
    "use_sliding_window": True,
    "max_window_layers": 2,
    "local_attention": WINDOW,
    "attention_window": WINDOW,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "cls_token_id": 1,
    "sep_token_id": 2,
    "type_vocab_size": 2,
    # mixtures of experts
    "num_experts": EXPERTS,
    "num_local_experts": EXPERTS,
    "n_routed_experts": EXPERTS,
    "moe_num_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "moe_k": 2,
    "moe_topk": 2,
    "top_k_experts": 2,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "moe_num_shared_experts": 1,
    "moe_intermediate_size": 32,
    "expert_ffn_hidden_size": 32,
    "shared_expert_intermediate_size": 32,
    "shared_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "zero_expert_num": 1,
    # latent attention
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": HEAD_DIM,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "index_topk": 16,
    # linear attention and state spaces
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "mamba_d_state": 8,
    "mamba_n_heads": 4,
    "mamba_d_head": 32,
    "mamba_d_ssm": 128,
    "mamba_expand": 2,
    "mamba_n_groups": 1,
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "ssm_state_size": 8,
    "state_size": 8,
    "num_heads": HEADS,
    "n_groups": 1,
    "chunk_size": 8,
    "lru_width": WIDTH,
    # extras of single families
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCABULARY,
    "laurel_rank": 8,
    "dim_model": WIDTH,
    "dim_head": HEAD_DIM,
    "axial_pos_embds": False,
    "altup_num_inputs": 2,
    "num_kv_shared_layers": 0,
    "num_memory_blocks": 1,
}
# what single types need beside the table
HYBRID = ["linear_attention", "full_attention"] * 2
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
PARTIAL_MROPE = {**MROPE, "mrope_section": [1, 1, 2], "partial_rotary_factor": 0.5}
OPTIONS: dict[str, dict[str, Any]] = {
    "blt": {"encoder_hash_byte_group_vocab": 64},
    "bailing_hybrid": {"layer_types": HYBRID},
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "rope_parameters": {"sliding_attention": ROPE, "full_attention": ROPE},
    },
    "esmc": {"num_key_value_heads": HEADS},
    "kimi_linear": {"layer_types": HYBRID},
    "longcat_flash": {"head_dim": 8},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "luke": {"entity_vocab_size": 8, "entity_emb_size": 16},
    "perceiver": {"num_latents": 8, "d_latents": 64, "d_model": 64, "num_blocks": 1, "num_self_attends_per_block": 1},
    "xmod": {"default_language": "en_XX", "languages": ["en_XX"]},
    "bamba": {"attn_layer_indices": [1, 3]},
    "codegen": {"rotary_dim": 8},
    "glm4v_moe_text": {"rope_parameters": PARTIAL_MROPE},
    "glm4v_text": {"rope_parameters": PARTIAL_MROPE},
    "glm_image_text": {"rope_parameters": PARTIAL_MROPE},
    "glm_ocr_text": {"rope_parameters": PARTIAL_MROPE},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "gptj": {"rotary_dim": 8},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lilt": {"channel_shrink_ratio": 4, "max_2d_position_embeddings": 16},
    "qwen2_5_vl_text": {"rope_parameters": MROPE},
    "qwen2_vl_text": {"rope_parameters": MROPE},
    "reformer": {"is_decoder": True},
}


def names() -> list[str]:
    """Model types of causal, masked and headless text models."""
    headed = {
        name for kind in (MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_MASKED_LM_MAPPING) for name in kind._model_mapping
    }
    headless = {name for name in MODEL_MAPPING._model_mapping if name in CONFIG_MAPPING and _is_text(name)}
    return sorted(headed | headless)


def build(name: str, dtype: torch.dtype = torch.float32, seed: int = 0, **overrides: Any) -> PreTrainedModel | str:
    """A tiny model of a type, ready to run with SDPA where transformers has it, or why there is none."""
    with _silent():
        try:
            config = _config(CONFIG_MAPPING[name], OPTIONS.get(name, {}) | overrides)
            kind = _model_class(type(config))
            if config.is_encoder_decoder:
                return "an encoder and a decoder"
            if kind.main_input_name != "input_ids":
                return "takes other inputs than text"
            torch.manual_seed(seed)
            model = kind(config).to(dtype).eval()
            _spread(model)
            with torch.no_grad():
                output(model, torch.arange(1, 9)[None])
        except Exception as error:  # of any kind: the table does not fit this type
            return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return model


def output(model: PreTrainedModel, ids: torch.Tensor, **options: Any) -> torch.Tensor:
    """Logits, or hidden states of a model without a head."""
    with torch.no_grad():
        result = model(input_ids=ids, **options)
    return result.logits if hasattr(result, "logits") else result[0]


@dataclasses.dataclass(frozen=True)
class Finding:
    """What `extend` does to a model type.

    outcome: "not built", "refused", or "extended". reason: why, for the first two.
    rotated: whether it takes position methods. wrong: what differs from what it should be, empty where nothing does.
    """

    name: str
    outcome: str
    reason: str = ""
    rotated: bool = False
    wrong: tuple[str, ...] = ()


IDLE = ("rerope:window=100000", "infoscale:train_length=100000")
ACTIVE = ("rerope:window=16+infoscale:train_length=16", "infoscale:train_length=16")
LENGTH, PROMPT, SHORT = 160, 36, 44


def examine(name: str, seed: int = 0) -> Finding:
    """An idle recipe gives the same bits, an active one changes them, decoding gives what a prefill does, restored."""
    model = build(name, seed=seed)
    if isinstance(model, str):
        return Finding(name, "not built", model)
    with _silent():
        rotated = True
        try:
            ise.extend(model, IDLE[0])
        except ValueError:
            rotated = False
            try:
                ise.extend(model, IDLE[1])
            except ValueError as error:
                return Finding(name, "refused", str(error))
        causal = all(span.high <= 1 for layer in extension(model).layers for span in layer.band.spans)
        ise.restore(model)
        ids = torch.randint(3, VOCABULARY, (1, LENGTH), generator=torch.Generator().manual_seed(seed))
        wrong = list(_wrong(model, ids, rotated))
        if causal:
            wrong += _wrong_decoding(model, ids[:, :SHORT], ACTIVE[not rotated])
    return Finding(name, "extended", "", rotated, tuple(wrong))


def _wrong(model: PreTrainedModel, ids: torch.Tensor, rotated: bool) -> Iterator[str]:
    plain = {length: output(model, ids[:, :length]) for length in (SHORT, LENGTH)}
    with ise.extended(model, IDLE[not rotated]):
        for length, expected in plain.items():
            if (error := _error(output(model, ids[:, :length]), expected)) != 0:
                yield f"idle over {length} tokens: {error:.1e}"
    changes = (ACTIVE[not rotated], *(["pi:factor=4"] if rotated else []))
    for recipe in changes:
        with ise.extended(model, recipe):
            if _error(output(model, ids[:, :SHORT]), plain[SHORT]) < 1e-4:
                yield f"{recipe} changes nothing"
    if _error(output(model, ids), plain[LENGTH]) != 0:
        yield "not restored"


def _wrong_decoding(model: PreTrainedModel, ids: torch.Tensor, recipe: str) -> list[str]:
    """Measured by what the plain model does: some types do not decode as they prefill, or not at all."""
    try:
        bound = 1e-4 + 4 * _error(_decoded(model, ids), output(model, ids))
    except (TypeError, ValueError, AttributeError, RuntimeError):
        return []  # no cache, as in a text encoder
    if bound > 1e-2:
        return []
    with ise.extended(model, recipe):
        error = _error(_decoded(model, ids), output(model, ids))
    return [f"{recipe} decoded: {error:.1e}"] if error > bound else []


def _decoded(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    """Outputs of a prompt and of the tokens after it, one at a time."""
    found, cache = [], None
    with torch.no_grad():
        for part in (ids[:, :PROMPT], *ids[:, PROMPT:].split(1, 1)):
            result = model(input_ids=part, past_key_values=cache, use_cache=True)
            cache = result.past_key_values
            found.append(result.logits if hasattr(result, "logits") else result[0])
    return torch.cat(found, 1)


def _error(a: torch.Tensor, b: torch.Tensor) -> float:
    """The largest difference, as a share of the largest entry; infinite for what is no number."""
    error = (a - b).abs().max() / b.abs().max()
    return error.item() if error.isfinite() else float("inf")


def _is_text(name: str) -> bool:
    kind = CONFIG_MAPPING[name]
    return "vocab_size" in _fields(kind) and not kind.sub_configs


def _fields(kind: type) -> set[str]:
    """Fields of a config class, under the names that all classes share."""
    shared = {own: name for name, own in kind.attribute_map.items()}
    return {shared.get(field.name, field.name) for field in dataclasses.fields(kind)}


def _config(kind: type, overrides: dict[str, Any]) -> Any:
    fields = _fields(kind)
    own = {kind.attribute_map.get(name, name): value for name, value in SIZES.items() if name in fields}
    if "qk_rope_head_dim" in fields:  # latent attention: what is called head_dim there is the part that rotates
        own.pop("head_dim", None)
        own["num_key_value_heads"] = HEADS
    for name, inner in kind.sub_configs.items():
        if not dataclasses.is_dataclass(inner):
            raise ValueError(f"{name} may be of any type")
        own[name] = _config(inner, {}).to_dict()
    return kind(**own | overrides)


def _model_class(kind: type) -> type[PreTrainedModel]:
    mappings = (MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_MASKED_LM_MAPPING, MODEL_MAPPING)
    found = next(mapping[kind] for mapping in mappings if kind in mapping)
    return found[0] if isinstance(found, tuple) else found


def _spread(model: PreTrainedModel) -> None:
    """Norms and biases away from ones and zeros, which would hide where they act."""
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 1 and weight.is_floating_point():
                weight.add_(0.1 * torch.randn(weight.shape).to(weight))


@contextmanager
def _silent() -> Iterator[None]:
    """Without what transformers says about configurations that are not its own."""
    before = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(before)
