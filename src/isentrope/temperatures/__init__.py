"""Temperatures: the factor τ of the score, a function of the number of keys, of the entropy, or of the distance."""

from isentrope.temperatures.adaptive import Adaptive
from isentrope.temperatures.fitted import Fitted
from isentrope.temperatures.laws import (
    Constant,
    InfoScale,
    InfoScaleExact,
    Llama4,
    LogLength,
    LogN,
    Power,
    SoftmaxPlus,
    Temperature,
    YaRNTemperature,
)
from isentrope.temperatures.scale_invariant import ScaleInvariant
from isentrope.temperatures.ssmax import SSMax

__all__ = [
    "Adaptive",
    "Constant",
    "Fitted",
    "InfoScale",
    "InfoScaleExact",
    "Llama4",
    "LogLength",
    "LogN",
    "Power",
    "SSMax",
    "ScaleInvariant",
    "SoftmaxPlus",
    "Temperature",
    "YaRNTemperature",
]
