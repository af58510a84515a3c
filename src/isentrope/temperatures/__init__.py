"""Temperatures: the factor τ(n) of the score, a function of the number of keys n."""

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
from isentrope.temperatures.ssmax import SSMax

__all__ = [
    "Constant",
    "Fitted",
    "InfoScale",
    "InfoScaleExact",
    "Llama4",
    "LogLength",
    "LogN",
    "Power",
    "SSMax",
    "SoftmaxPlus",
    "Temperature",
    "YaRNTemperature",
]
