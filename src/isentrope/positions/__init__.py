"""Position methods: the rotary positions and distance biases of queries and keys."""

from isentrope.positions.alibi import ALiBi
from isentrope.positions.branch import Branch, Lengths, ModelRotary, NoPE, Position
from isentrope.positions.clex import CLEX
from isentrope.positions.frequencies import CoPE, LongRoPE, Resonance
from isentrope.positions.per_frequency import DPE
from isentrope.positions.pose import PoSE
from isentrope.positions.regions import LeakyReRoPE, ReRoPE, SelfExtend
from isentrope.positions.rope import NTK, PI, RoPE, YaRN

__all__ = [
    "CLEX",
    "DPE",
    "NTK",
    "PI",
    "ALiBi",
    "Branch",
    "CoPE",
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
