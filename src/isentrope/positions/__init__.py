"""Position methods: the rotary positions and distance biases of queries and keys."""

from isentrope.positions.alibi import ALiBi
from isentrope.positions.branch import Branch, Lengths, ModelRotary, NoPE, Position
from isentrope.positions.chunks import DualChunk
from isentrope.positions.clex import CLEX
from isentrope.positions.frequencies import CoPE, LongRoPE, Resonance
from isentrope.positions.lampe import LaMPE
from isentrope.positions.per_frequency import DPE
from isentrope.positions.pose import PoSE
from isentrope.positions.regions import JetLong, LeakyReRoPE, ReRoPE, SelfExtend
from isentrope.positions.rope import NTK, PI, RoPE, YaRN
from isentrope.positions.string import STRING

__all__ = [
    "CLEX",
    "DPE",
    "NTK",
    "PI",
    "STRING",
    "ALiBi",
    "Branch",
    "CoPE",
    "DualChunk",
    "JetLong",
    "LaMPE",
    "LeakyReRoPE",
    "Lengths",
    "LongRoPE",
    "ModelRotary",
    "NoPE",
    "PoSE",
    "Position",
    "ReRoPE",
    "Resonance",
    "RoPE",
    "SelfExtend",
    "YaRN",
]
