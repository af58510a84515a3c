"""How a model is trained: the settings of one run, presets, and the variants that the paper trains."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, replace
from typing import Any

PRECISIONS = ("auto", "bf16", "fp32")
HOW = ("compile", "log_every", "save_every")  # settings that leave a run what it is
# what may be said of a new model's sizes: GAU-α for masked tokens, Llama for the next one
SIZES = {
    "masked": ("hidden_size", "intermediate_size", "attention_key_size"),
    "causal": ("hidden_size", "intermediate_size", "num_attention_heads"),
}
LLAMA = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4}


@dataclass(frozen=True)
class Config:
    """What a run is. Two runs of the same configuration give the same weights, however they were cut or resumed.

    objective: "masked" trains GAU-α on masked tokens, "causal" a Llama on each next token.
    model: a folder or hub name to start from; None starts from random weights with `sizes` (any of `SIZES`).
    recipe: what attention follows, as text. pose: draw positions up to this length (PoSE).
    steps, or epochs over the documents: one of them. dropout: in place of the model's own.
    stage: other batches from the same seed, for a run that goes on with the weights of another.
    validation: crops that the validation loss is measured on. compile: None where a run is long enough to repay it.
    evaluate_every: in steps; 0 for a twentieth of the run. save_every: likewise; 0 for once a minute.
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
    validation: int = 1024
    evaluate_every: int = 0
    save_every: int = 0
    log_every: int = 20

    def __post_init__(self) -> None:
        if min(self.steps, self.epochs) < 0 or (self.steps > 0) == (self.epochs > 0) or not math.isfinite(self.epochs):
            raise ValueError(f"steps, epochs: expected one of them, above 0, got {self.steps} and {self.epochs}")
        if self.precision not in PRECISIONS:
            raise ValueError(f"precision: expected one of {', '.join(PRECISIONS)}, got {self.precision!r}")
        if self.objective not in SIZES:
            raise ValueError(f"objective: expected one of {', '.join(SIZES)}, got {self.objective!r}")
        for name in ("layers", "length", "batch", "accumulate", "log_every", "validation"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected 1 or more, got {getattr(self, name)}")
        if not (self.rate > 0 and math.isfinite(self.rate)) or not 0 <= self.warmup < 1:
            raise ValueError(f"rate, warmup: expected above 0, and in [0, 1), got {self.rate} and {self.warmup}")
        for name in ("decay", "clip", "evaluate_every", "save_every", "seed", "stage"):
            if not 0 <= getattr(self, name) < 1 << 62:
                raise ValueError(f"{name}: expected 0 or more, got {getattr(self, name)}")
        if self.dropout is not None and not 0 <= self.dropout < 1:
            raise ValueError(f"dropout: expected a share in [0, 1), got {self.dropout}")
        if self.sizes and self.model:
            raise ValueError(f"sizes: expected none where a model is given, got {self.sizes}")
        known = SIZES[self.objective]
        for name in self.sizes or {}:
            if name not in known:
                raise ValueError(f"sizes: expected {', '.join(known)}, got {name!r}")
            if (self.sizes or {})[name] < 1:
                raise ValueError(f"sizes: expected 1 or more, got {name}={(self.sizes or {})[name]}")
        if self.objective == "causal":
            self._check_causal()

    def _check_causal(self) -> None:
        for name, only in (("recipe", "rope"), ("pose", None), ("share", 0.15)):
            if (value := getattr(self, name)) != only:
                raise ValueError(f"{name}: expected {only} with the objective causal, got {value!r}")
        sizes = LLAMA | (self.sizes or {})
        hidden, heads = sizes["hidden_size"], sizes["num_attention_heads"]
        if hidden % (2 * heads):
            raise ValueError(f"sizes: expected heads of an even size, got hidden_size={hidden} for {heads} heads")

    @property
    def batch_seed(self) -> int:
        """What batches are drawn by."""
        if not self.stage:
            return self.seed
        return int.from_bytes(hashlib.sha256(f"{self.seed} {self.stage}".encode()).digest()[:8])

    def learning_rate(self, step: int, steps: int) -> float:
        """Of step 0 … steps - 1: up in a straight line over the first `warmup` of them, then down to 0."""
        rise = max(1, round(self.warmup * steps))
        share = (step + 1) / rise if step < rise else (steps - step) / max(1, steps - rise + 1)
        return self.rate * share


# starting points; every field may be set beside them
PRESETS: dict[str, dict[str, Any]] = {
    "pretrain": {"length": 512, "steps": 3500, "rate": 1e-3},
    "train": {"length": 64, "steps": 1500, "rate": 2e-4},
    "finetune": {"length": 64, "steps": 1000, "rate": 1e-4, "stage": 1},
    "paper": {"length": 64, "epochs": 400.0, "rate": 2e-5, "crop": "first"},
    "paper-finetune": {"length": 64, "epochs": 100.0, "rate": 2e-5, "crop": "first", "stage": 1},
    "causal": {"objective": "causal", "length": 256, "steps": 4000, "batch": 64, "rate": 1e-3, "dropout": 0.0},
}
# what the paper trains or fine-tunes a model for: its recipe, and the length PoSE draws positions up to
VARIANTS: dict[str, tuple[str, int | None]] = {
    "plain": ("rope", None),
    "pi": ("pi:factor=4", None),
    "yarn16": ("yarn:factor=16", None),
    "yarn32": ("yarn:factor=32", None),
    "pose": ("rope", 4096),
    "alibi": ("alibi", None),
    "clex": ("clex", None),
}


def configured(preset: str, variant: str | None = None, cosscale: float | None = None, **given: Any) -> Config:
    """A preset, with a variant of the paper's, CosScale, and whatever is given (not None) in place of theirs."""
    if preset not in PRESETS:
        raise ValueError(f"preset: expected one of {', '.join(PRESETS)}, got {preset!r}")
    given = {name: value for name, value in given.items() if value is not None}
    options = dict(PRESETS[preset])
    if "steps" in given or "epochs" in given:
        options = {name: value for name, value in options.items() if name not in ("steps", "epochs")}
    if variant is not None:
        if variant not in VARIANTS:
            raise ValueError(f"variant: expected one of {', '.join(VARIANTS)}, got {variant!r}")
        if "recipe" in given or "pose" in given:
            raise ValueError("variant: expected a variant, or recipe and pose, got both")
        options["recipe"], options["pose"] = VARIANTS[variant]
    config = Config(**(options | given))
    if cosscale is None:
        return config
    return replace(config, recipe=f"{config.recipe}+cosine:alpha={cosscale:g}")


def read_sizes(text: str | None) -> dict[str, int] | None:
    """hidden_size=256,… as numbers."""
    if text is None:
        return None
    try:
        return {name.strip(): int(value) for name, _, value in (pair.partition("=") for pair in text.split(","))}
    except ValueError:
        raise ValueError(f"sizes: expected name=number pairs such as hidden_size=256, got {text!r}") from None
