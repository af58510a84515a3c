"""Models of this package, known to transformers' Auto classes once it is imported."""

from isentrope.utils.extras import name_missing_extras

with name_missing_extras():
    from transformers import (
        AutoConfig,
        AutoModel,
        AutoModelForMaskedLM,
        AutoModelForSequenceClassification,
        AutoModelForTokenClassification,
    )

    from isentrope.models.gau import (
        GAUAlphaConfig,
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
