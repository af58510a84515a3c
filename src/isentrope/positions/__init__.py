"""Position methods: the rotary positions and distance biases of queries and keys."""

from isentrope.positions.alibi import ALiBi
from isentrope.positions.branch import Branch, Lengths, ModelRotary, NoPE, Position
from isentrope.positions.clex import CLEX
from isentrope.positions.pose import PoSE
from isentrope.positions.regions import LeakyReRoPE, ReRoPE, SelfExtend
from isentrope.positions.rope import NTK, PI, RoPE, YaRN

__all__ = [
    "CLEX",
    "NTK",
    "PI",
    "ALiBi",
    "Branch",
    "LeakyReRoPE",
    "Lengths",
    "ModelRotary",
    "NoPE",
    "PoSE",
    "Position",
    "ReRoPE",
    "RoPE",
    "SelfExtend",
    "YaRN",
]
