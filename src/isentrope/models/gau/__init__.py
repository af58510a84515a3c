"""GAU-α as a transformers model."""

from isentrope.models.gau.config import GAUAlphaConfig
from isentrope.models.gau.modeling import (
    GAUAlphaForMaskedLM,
    GAUAlphaForSequenceClassification,
    GAUAlphaForTokenClassification,
    GAUAlphaModel,
)

__all__ = [
    "GAUAlphaConfig",
    "GAUAlphaForMaskedLM",
    "GAUAlphaForSequenceClassification",
    "GAUAlphaForTokenClassification",
    "GAUAlphaModel",
]
