"""Training configuration: the settings of one run, presets, and the variants that the paper trains."""

from __future__ import annotations

import hashlib
import math
from dataclasses import asdict, dataclass, replace
from typing import Any

PRECISIONS = ("auto", "bf16", "fp32")
NON_IDENTITY_FIELDS = ("compile", "log_every", "save_every", "hash_every")  # they do not change the weights
# configurable sizes of a new model: GAU-α for masked tokens, Llama for next tokens
MODEL_SIZES = {
    "masked": ("hidden_size", "intermediate_size", "attention_key_size"),
    "causal": ("hidden_size", "intermediate_size", "num_attention_heads"),
}
LLAMA_SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4}


@dataclass(frozen=True)
class TrainingConfig:
    """The settings of a run, which decide its weights: on a CPU to the bit, on a GPU up to the order of its sums.

    With `deterministic`, also on a GPU to the bit, on the same hardware and software.

    Args:
        objective: "masked" trains GAU-α on masked tokens, "causal" a Llama on next tokens.
        model: A folder or hub name to start from; None for random weights with `sizes`.
        layers: Layers of a new model, or the first ones of a given model.
        sizes: Of a new model, any of `MODEL_SIZES`.
        recipe: The recipe of attention, as text.
        pose: Draw positions up to this length (PoSE).
        length: Tokens of a crop.
        batch: Crops of a step, over all processes.
        steps: Optimiser steps; give either steps or epochs.
        epochs: Passes over the documents.
        rate: Highest learning rate.
        warmup: Share of the steps over which the rate rises.
        decay: Weight decay.
        clip: Largest gradient norm; 0 for no limit.
        share: Share of the tokens that are predicted, for "masked".
        crop: "random", or "first" for the beginning of each document.
        dropout: Replaces the model's own.
        seed: Seed of weights, batches and dropout.
        stage: Draws other batches from the same seed, for a run that continues another's weights.
        precision: "bf16", "fp32", or "auto" for bf16 on a GPU.
        accumulate: Parts that a batch is processed in.
        compile: None compiles long runs on a GPU.
        deterministic: Use only algorithms that give the same bits again, which take longer on a GPU.
        validation: Crops of the validation loss.
        evaluate_every: Steps between validation losses; 0 for a twentieth of the run, of short ones 50 or a quarter.
        save_every: Steps between saved states; 0 for one a minute.
        log_every: Steps between rows of the log.
        hash_every: Steps between hashes of the weights in the log; 0 for none.
    """

    objective: str = "masked"
    model: str | None = None
    layers: int = 6
    sizes: dict[str, int] | None = None
    recipe: str = "rope"
    pose: int | None = None
    length: int = 64
    batch: int = 128
    steps: int = 0
    epochs: float = 0.0
    rate: float = 2e-5
    warmup: float = 0.1
    decay: float = 0.01
    clip: float = 1.0
    share: float = 0.15
    crop: str = "random"
    dropout: float | None = None
    seed: int = 0
    stage: int = 0
    precision: str = "auto"
    accumulate: int = 1
    compile: bool | None = None
    deterministic: bool = False
    validation: int = 1024
    evaluate_every: int = 0
    save_every: int = 0
    log_every: int = 20
    hash_every: int = 0

    def __post_init__(self) -> None:
        if min(self.steps, self.epochs) < 0 or (self.steps > 0) == (self.epochs > 0) or not math.isfinite(self.epochs):
            raise ValueError(f"steps, epochs: expected exactly one above 0, got {self.steps} and {self.epochs}")
        if self.precision not in PRECISIONS:
            raise ValueError(f"precision: expected one of {', '.join(PRECISIONS)}, got {self.precision!r}")
        if self.objective not in MODEL_SIZES:
            raise ValueError(f"objective: expected one of {', '.join(MODEL_SIZES)}, got {self.objective!r}")
        for name in ("layers", "length", "batch", "accumulate", "log_every", "validation"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected 1 or more, got {getattr(self, name)}")
        if not (self.rate > 0 and math.isfinite(self.rate)) or not 0 <= self.warmup < 1:
            raise ValueError(f"rate, warmup: expected above 0, and in [0, 1), got {self.rate} and {self.warmup}")
        for name in ("decay", "clip", "evaluate_every", "save_every", "hash_every", "seed", "stage"):
            if not 0 <= getattr(self, name) < 1 << 62:
                raise ValueError(f"{name}: expected 0 or more, got {getattr(self, name)}")
        if self.dropout is not None and not 0 <= self.dropout < 1:
            raise ValueError(f"dropout: expected a share in [0, 1), got {self.dropout}")
        if self.sizes and self.model:
            raise ValueError(f"sizes: expected none where a model is given, got {self.sizes}")
        known = MODEL_SIZES[self.objective]
        for name, size in (self.sizes or {}).items():
            if name not in known:
                raise ValueError(f"sizes: expected {', '.join(known)}, got {name!r}")
            if size < 1:
                raise ValueError(f"sizes: expected 1 or more, got {name}={size}")
        if self.objective == "causal":
            self._check_causal()

    def _check_causal(self) -> None:
        for name, required in (("recipe", "rope"), ("pose", None), ("share", 0.15)):
            if (value := getattr(self, name)) != required:
                raise ValueError(f"{name}: expected {required} with the objective causal, got {value!r}")
        sizes = LLAMA_SIZES | (self.sizes or {})
        hidden, heads = sizes["hidden_size"], sizes["num_attention_heads"]
        if hidden % (2 * heads):
            raise ValueError(f"sizes: expected heads of an even size, got hidden_size={hidden} for {heads} heads")

    @property
    def batch_seed(self) -> int:
        """Seed of the batches."""
        if not self.stage:
            return self.seed
        return int.from_bytes(hashlib.sha256(f"{self.seed} {self.stage}".encode()).digest()[:8])

    def identity(self) -> dict[str, Any]:
        """Return the settings that the weights depend on."""
        from isentrope.recipe import hash_own_parts  # reading a config needs no torch

        # runs of before the option have the identity of those without it
        default = () if self.deterministic else ("deterministic",)
        fields = {key: value for key, value in asdict(self).items() if key not in (*NON_IDENTITY_FIELDS, *default)}
        return fields | ({"parts": parts} if (parts := hash_own_parts(self.recipe)) else {})

    def learning_rate(self, step: int, steps: int) -> float:
        """Return the rate of step 0 … steps - 1: linear up over the first `warmup` of them, then linear down to 0."""
        warmup = max(1, round(self.warmup * steps))
        share = (step + 1) / warmup if step < warmup else (steps - step) / max(1, steps - warmup + 1)
        return self.rate * share


# settings that others may override
PRESETS: dict[str, dict[str, Any]] = {
    "pretrain": {"length": 512, "steps": 3500, "rate": 1e-3},
    "train": {"length": 64, "steps": 1500, "rate": 2e-4},
    "finetune": {"length": 64, "steps": 1000, "rate": 1e-4, "stage": 1},
    "paper": {"length": 64, "epochs": 400.0, "rate": 2e-5, "crop": "first"},
    "paper-finetune": {"length": 64, "epochs": 100.0, "rate": 2e-5, "crop": "first", "stage": 1},
    "causal": {"objective": "causal", "length": 256, "steps": 4000, "batch": 64, "rate": 1e-3, "dropout": 0.0},
}
# what the paper trains: the recipe, and the length up to which PoSE draws positions
VARIANTS: dict[str, tuple[str, int | None]] = {
    "plain": ("rope", None),
    "pi": ("pi:factor=4", None),
    "yarn16": ("yarn:factor=16", None),
    "yarn32": ("yarn:factor=32", None),
    "pose": ("rope", 4096),
    "alibi": ("alibi", None),
    "clex": ("clex", None),
}


def build_config(
    preset: str, variant: str | None = None, cosscale: float | None = None, **overrides: Any
) -> TrainingConfig:
    """Build the configuration of a preset.

    Args:
        preset: One of `PRESETS`.
        variant: One of `VARIANTS`, which sets the recipe and PoSE.
        cosscale: Factor of scaled cosine scores, added to the recipe.
        **overrides: Fields of `TrainingConfig`; None leaves the preset's.
    """
    if preset not in PRESETS:
        raise ValueError(f"preset: expected one of {', '.join(PRESETS)}, got {preset!r}")
    overrides = {name: value for name, value in overrides.items() if value is not None}
    options = dict(PRESETS[preset])
    if "steps" in overrides or "epochs" in overrides:
        options = {name: value for name, value in options.items() if name not in ("steps", "epochs")}
    if variant is not None:
        if variant not in VARIANTS:
            raise ValueError(f"variant: expected one of {', '.join(VARIANTS)}, got {variant!r}")
        if "recipe" in overrides or "pose" in overrides:
            raise ValueError("variant: expected a variant, or recipe and pose, got both")
        options["recipe"], options["pose"] = VARIANTS[variant]
    config = TrainingConfig(**(options | overrides))
    if cosscale is None:
        return config
    from isentrope.recipe.layers import add_parts  # reading a config needs no torch

    return replace(config, recipe=add_parts(config.recipe, [f"cosine:alpha={cosscale:g}"]))


def parse_sizes(text: str | None) -> dict[str, int] | None:
    """Parse pairs such as hidden_size=256,intermediate_size=512."""
    if text is None:
        return None
    try:
        return {name.strip(): int(value) for name, _, value in (pair.partition("=") for pair in text.split(","))}
    except ValueError:
        raise ValueError(f"sizes: expected name=number pairs such as hidden_size=256, got {text!r}") from None
