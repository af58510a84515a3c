"""Where a model comes from, and where it goes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import transformers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils.hub import cached_file

from isentrope.hf.extend import extend
from isentrope.hf.loading import load
from isentrope.hf.names import CONFIG_KEY
from isentrope.hf.saved_models import remove_marks
from isentrope.models import GAUAlphaConfig
from isentrope.pretrained import (
    load_pretrained,
    read_config,
    read_gguf_once,
    read_tokenizer,
    resolve_model_name,
)
from isentrope.recipe import Recipe
from isentrope.utils.extras import require
from isentrope.utils.files import write_atomically


@read_gguf_once()
def causal_config(model: str, gguf_file: str | None = None) -> PreTrainedConfig | None:
    """The configuration of a causal model, None for GAU-α; other kinds are refused."""
    options = {"gguf_file": gguf_file} if gguf_file else {}
    found = remove_marks(read_config(resolve_model_name(model), **options))
    if not found:
        raise ValueError(f"{model}: expected a model, got no config.json")
    kind = found.get("model_type", GAUAlphaConfig.model_type)  # published ones do not say
    if kind == GAUAlphaConfig.model_type:
        return None
    causal = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(kind)
    # some kinds may be read either way: a BERT for masked tokens would load, and look ahead
    saved = found.get("architectures") or [causal]
    if causal is None or causal not in saved:
        what = ", ".join(filter(None, saved)) or kind
        raise ValueError(f"model: expected a causal one or GAU-α, got {what} in {model}")
    return AutoConfig.from_pretrained(model, **options)


@read_gguf_once()
def causal_model(name: str, dtype: Any, gguf_file: str | None = None) -> PreTrainedModel:
    """A causal model from a folder or the hub; under its own recipe where it was saved with one."""
    name = resolve_model_name(name)
    if gguf_file is None:
        if not read_config(name).get(CONFIG_KEY):
            model: Any = load_pretrained(AutoModelForCausalLM, name, dtype=dtype)
            return model
        return load(name, dtype=dtype)
    require("gguf")
    # unpacked, and no longer called quantised: in their blocks weights can be neither extended nor saved
    unpacked = getattr(transformers, "GgufConfig", None)  # newer versions have it
    options = {} if unpacked is None else {"quantization_config": unpacked(dequantize=True)}
    model = load_pretrained(AutoModelForCausalLM, name, dtype=dtype, gguf_file=gguf_file, **options)
    if (quantizer := getattr(model, "hf_quantizer", None)) is not None:
        quantizer.remove_quantization_config(model)
    return model


def check_free(folder: Path | None) -> None:
    """That a model can be saved there, before it is measured for hours."""
    if folder is None:
        return
    if folder.exists():
        raise ValueError(f"save: expected a folder that is not there yet, got {folder}")
    folder.parent.mkdir(parents=True, exist_ok=True)
    if not os.access(folder.parent, os.W_OK):
        raise ValueError(f"save: expected a place that can be written to, got {folder.parent}")


def save_extended(
    name: str,
    recipe: Recipe | str,
    folder: Path,
    gguf_file: str | None = None,
    measured: list[dict[str, Any]] | None = None,
) -> Path:
    """The model with the recipe in its config.json, in the dtype that it came in; `isentrope.load` reads it.

    measured: rows for the model card.
    """
    check_free(folder)
    model, name = causal_model(name, "auto", gguf_file), resolve_model_name(name)
    options = {"gguf_file": gguf_file} if gguf_file else {}
    with write_atomically(folder) as partial:
        extend(model, recipe)
        if measured:
            getattr(model.config, CONFIG_KEY)["measured"] = measured
        model.save_pretrained(partial)
        missing = {"_raise_exceptions_for_missing_entries": False}
        if gguf_file or cached_file(name, "tokenizer_config.json", **missing) is not None:
            read_tokenizer(name, **options).save_pretrained(partial)
    return folder
