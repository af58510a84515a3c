"""Small models with random weights of every family that is supported, and what is known of each without looking."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tests.hf.tiny import TRAINED, VOCABULARY

WINDOW = 48  # of the layers that have one: between the lengths that tests use
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": TRAINED,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
ALTERNATING = ["sliding_attention", "full_attention"]


@dataclass(frozen=True)
class Family:
    """A configuration, and how its models attend.

    rope: `rope_parameters` of the layers that see everything, None without rotation.
    local: those of windowed layers, where they have frequencies of their own; a position method leaves these alone.
    unrotated: layers without rotation.
    sdpa: whether transformers runs it with SDPA.
    """

    model_type: str
    options: dict = field(default_factory=dict)
    rope: dict | None = field(default_factory=lambda: {"rope_theta": 10000.0})
    local: dict | None = None
    unrotated: tuple[int, ...] = ()
    interleaved: bool = False
    bidirectional: bool = False
    sdpa: bool = True

    def config(self, scaling=None, **overrides):
        """The config; `scaling` joins its rope_parameters, as a user of transformers would write it."""
        options = SIZES | self.options | overrides
        if self.rope is not None and "rope_parameters" not in overrides:
            full = {"rope_type": "default"} | self.rope | (scaling or {})
            local = {"rope_type": "default"} | (self.local or {})
            options["rope_parameters"] = (
                full if self.local is None else {"full_attention": full, "sliding_attention": local}
            )
        return AutoConfig.for_model(self.model_type, **copy.deepcopy(options))

    def model(self, config=None, dtype=torch.float32, seed=0):
        """A model as `from_pretrained` would hand it over, with SDPA."""
        torch.manual_seed(seed)
        auto = AutoModelForMaskedLM if self.bidirectional else AutoModelForCausalLM
        how = {"attn_implementation": "sdpa" if self.sdpa else "eager"}
        if self.model_type == "gpt_oss":
            how["experts_implementation"] = "eager"  # the only one in fp64
        model = auto.from_config(config or self.config(), dtype=dtype, **how).eval()
        with torch.no_grad():
            for weight in model.parameters():
                if weight.dim() == 1:  # norms and biases start as ones and zeros, which would hide where they act
                    weight.add_(0.2 * torch.randn(weight.shape).to(dtype))
        if self.model_type == "gemma2":
            model.config._attn_implementation = "sdpa"  # transformers does not offer it because of the soft cap
        return model

    def frequencies_of(self, layer_type):
        """The name of a rotary module's frequencies for a type of layer."""
        return "inv_freq" if self.local is None else f"{layer_type}_inv_freq"

    @property
    def all_rotates(self):
        """Whether every entry of every layer rotates, at one set of frequencies."""
        return self.local is None and not self.unrotated and "partial_rotary_factor" not in self.rope

    def is_windowed(self, config, layer):
        types = getattr(config, "layer_types", None)
        return getattr(config, "sliding_window", None) is not None and (
            types is None or types[layer] == "sliding_attention"
        )

    def is_local(self, config, layer):
        return self.local is not None and config.layer_types[layer] == "sliding_attention"


def rotary_module(model):
    """The one module that holds frequencies."""
    (found,) = (m for m in model.modules() if any(n.endswith("inv_freq") for n, _ in m.named_buffers(recurse=False)))
    return found


def write_scaling(model, length, **parameters):
    """Transformers' own scaling put into a model whose config does not let it be named (Phi-3)."""
    config = copy.deepcopy(model.config)
    config.rope_parameters |= parameters
    theta, scaling = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, seq_len=length)
    rotary_module(model).inv_freq = theta
    rotary_module(model).attention_scaling = scaling
    return model


def logits(model, ids, **options):
    with torch.no_grad():
        return model(ids, **options).logits


def snapshot(model):
    """All that `extend` might touch."""
    return {
        "weights": {key: x.clone() for key, x in model.state_dict().items()},
        "buffers": {key: x.clone() for key, x in model.named_buffers()},
        "config": model.config.to_dict(),
        "modules": [name for name, _ in model.named_modules()],
        "hooks": [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()],
        "attributes": [set(vars(m)) for m in model.modules()],
        "implementations": [m.config._attn_implementation for m in model.modules() if hasattr(m, "config")],
    }


def unchanged(model, before):
    after = snapshot(model)
    for kind in ("weights", "buffers"):
        old, new = before.pop(kind), after.pop(kind)
        assert old.keys() == new.keys()
        assert all(torch.equal(old[key], new[key]) for key in old)
    assert before == after


def partial(factor, theta=10000.0):
    return {"rope_theta": theta, "partial_rotary_factor": factor}


FAMILIES = {
    "llama": Family("llama"),
    "mistral": Family("mistral", {"sliding_window": None}, {"rope_theta": 2000.0}),
    "mistral-windowed": Family("mistral", {"sliding_window": WINDOW}),
    "qwen2": Family("qwen2", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}),
    "qwen3": Family("qwen3", {"head_dim": 24}, {"rope_theta": 50000.0}),
    "gemma2": Family(
        "gemma2",
        {
            "head_dim": 16,
            "attn_logit_softcapping": None,
            "sliding_window": WINDOW,
            "query_pre_attn_scalar": 9,
            "layer_types": ALTERNATING,
        },
        sdpa=False,
    ),
    "gemma3": Family(
        "gemma3_text",
        {"head_dim": 16, "sliding_window": WINDOW, "query_pre_attn_scalar": 9, "layer_types": ALTERNATING},
        {"rope_theta": 30000.0},
        {"rope_theta": 500.0},
    ),
    "phi3": Family("phi3", {"original_max_position_embeddings": TRAINED}),
    "phi3-partial": Family("phi3", {"original_max_position_embeddings": TRAINED}, partial(0.75)),
    "olmo2": Family("olmo2"),
    "gpt_neox": Family("gpt_neox", {}, partial(0.5)),
    "smollm3": Family("smollm3", {"num_hidden_layers": 4}, {"rope_theta": 3000.0}, unrotated=(3,)),
    "starcoder2": Family("starcoder2", {"sliding_window": WINDOW}),
    "granite": Family("granite", {"attention_multiplier": 0.17}),
    "gpt_oss": Family(
        "gpt_oss",
        {
            "head_dim": 16,
            "sliding_window": WINDOW,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "layer_types": ALTERNATING,
        },
        {
            "rope_type": "yarn",
            "rope_theta": 1000.0,
            "factor": 4.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": TRAINED,
        },
        sdpa=False,
    ),
    "cohere": Family("cohere", {"logit_scale": 1.0}, {"rope_theta": 8000.0}, interleaved=True),
    "glm": Family("glm", {"head_dim": 16}, partial(0.5), interleaved=True),
    "modernbert": Family(
        "modernbert",
        {"local_attention": WINDOW, "layer_types": ALTERNATING, "cls_token_id": None, "sep_token_id": None},
        {"rope_theta": 20000.0},
        {"rope_theta": 700.0},
        bidirectional=True,
    ),
    "bert": Family("bert", {"max_position_embeddings": 160}, None, bidirectional=True),
    "roberta": Family("roberta", {"max_position_embeddings": 160}, None, bidirectional=True),
}
ROTATING = [name for name, family in FAMILIES.items() if family.rope is not None]
