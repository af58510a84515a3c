"""Models of our own, known to transformers' Auto classes once this is imported."""

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from isentrope.models.gau.config import GAUAlphaConfig
from isentrope.models.gau.modeling import (
    GAUAlphaForMaskedLM,
    GAUAlphaForSequenceClassification,
    GAUAlphaForTokenClassification,
    GAUAlphaModel,
)

AutoConfig.register(GAUAlphaConfig.model_type, GAUAlphaConfig, exist_ok=True)
AutoModel.register(GAUAlphaConfig, GAUAlphaModel, exist_ok=True)
AutoModelForMaskedLM.register(GAUAlphaConfig, GAUAlphaForMaskedLM, exist_ok=True)
AutoModelForSequenceClassification.register(GAUAlphaConfig, GAUAlphaForSequenceClassification, exist_ok=True)
AutoModelForTokenClassification.register(GAUAlphaConfig, GAUAlphaForTokenClassification, exist_ok=True)

__all__ = [
    "GAUAlphaConfig",
    "GAUAlphaForMaskedLM",
    "GAUAlphaForSequenceClassification",
    "GAUAlphaForTokenClassification",
    "GAUAlphaModel",
]
