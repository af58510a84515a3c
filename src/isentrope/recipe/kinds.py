"""The parts that recipes are made of, by kind and by name."""

from __future__ import annotations

from isentrope import masks, positions, scores, temperatures
from isentrope.parts import Part
from isentrope.retrieve import Retrieve
from isentrope.share import Share

# the parts that a recipe's text may name; add a new method here
KINDS: dict[str, tuple[type[Part], ...]] = {
    "position": (
        positions.RoPE, positions.PI, positions.NTK, positions.YaRN, positions.ReRoPE, positions.LeakyReRoPE,
        positions.SelfExtend, positions.JetLong, positions.LaMPE, positions.DualChunk, positions.STRING,
        positions.ALiBi, positions.CLEX, positions.NoPE,
        positions.DPE, positions.LongRoPE, positions.CoPE, positions.Resonance,
    ),
    "temperature": (
        temperatures.Constant, temperatures.LogLength, temperatures.SoftmaxPlus, temperatures.LogN,
        temperatures.Power, temperatures.YaRNTemperature, temperatures.InfoScale, temperatures.InfoScaleExact,
        temperatures.Llama4, temperatures.SSMax, temperatures.Fitted, temperatures.Adaptive,
        temperatures.ScaleInvariant,
    ),
    "score": (scores.Dot, scores.Cosine),
    "mask": (masks.Full, masks.Causal, masks.Window, masks.Sink, masks.Lambda, masks.And, masks.Or),
    "share": (Share,),
    "retrieve": (Retrieve,),
}  # fmt: skip
PARTS = {part.name(): (kind, part) for kind, parts in KINDS.items() for part in parts}
PLAIN = "plain"
LAYERS = "layers"  # begins the text of a recipe per layer
