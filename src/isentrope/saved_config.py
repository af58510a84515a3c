"""The model type `isentrope`: how transformers reads the config.json of a saved, extended model."""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig, PreTrainedConfig


class IsentropeConfig(PreTrainedConfig):
    """Reads a config.json with a recipe as the configuration of the model that was extended.

    Registered with `AutoConfig` as soon as both packages are imported; the rest is loaded when a folder is read.
    """

    model_type = "isentrope"

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **options: Any) -> Any:
        from isentrope.hf.saved_models import build_config

        return build_config(config_dict, **options)


AutoConfig.register(IsentropeConfig.model_type, IsentropeConfig, exist_ok=True)
