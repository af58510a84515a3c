"""Where a model comes from, and where it goes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils.hub import cached_file

from isentrope.core.dtypes import cpu_dtype
from isentrope.hf.extend import extend
from isentrope.hf.layer import NAME
from isentrope.hf.loading import load
from isentrope.hf.saved_models import remove_marks
from isentrope.models import GAUAlphaConfig
from isentrope.pretrained import (
    load_pretrained,
    read_config,
    read_tokenizer,
    saved_dtype,
)
from isentrope.recipe import Recipe
from isentrope.utils.extras import require
from isentrope.utils.files import write_atomically

DTYPES = ("bfloat16", "float16", "float32")


def place(device: str = "auto", dtype: str = "auto") -> tuple[str, torch.dtype]:
    """The device and dtype meant: a GPU where there is one, and bfloat16 there."""
    device = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        why = str(error).strip().partition("\n")[0]
        raise ValueError(f"device: expected one that is there, such as cpu, got {device!r}: {why}") from None
    dtype = ("bfloat16" if device.startswith("cuda") else "float32") if dtype == "auto" else dtype
    if dtype not in DTYPES:
        raise ValueError(f"dtype: expected {', '.join(DTYPES)} or auto, got {dtype!r}")
    return device, getattr(torch, dtype)


def place_model(name: str, device: str = "auto", dtype: str = "auto") -> tuple[str, torch.dtype]:
    """The same for a saved model; where its half precision becomes float32 on a CPU, that is said once."""
    device, found = place(device, dtype)
    if dtype == "auto" and torch.device(device).type == "cpu":
        told = read_config(check_model(name))
        cpu_dtype(saved_dtype(check_model(name), told.get("dtype") or told.get("torch_dtype")), None, device)
    return device, found


def check_model(name: str) -> str:
    """A folder that is there, or what may be a name on the hub."""
    if (folder := Path(name).expanduser()).is_dir():
        return str(folder)
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise ValueError(f"{name}: expected a folder with a model, or a name on the hub")
    return name


def config_of(kind: type[PreTrainedConfig], model: str | Path) -> Any:
    """The configuration of a model that must be of this kind: another's weights would be left out without a word."""
    found = read_config(check_model(str(model))).get("model_type", kind.model_type)
    if found != kind.model_type:
        raise ValueError(f"model: expected one of type {kind.model_type}, got {found} in {model}")
    return kind.from_pretrained(model)


@contextmanager
def reading_once() -> Iterator[None]:
    """A GGUF file is read once, and its tensors' names are listed once: transformers does the first for the
    configuration and again for the weights, the second for every module, which takes longer than all the rest."""
    try:
        import gguf
    except ImportError:  # told where a file is to be read
        yield
        return
    own = {name: getattr(gguf, name) for name in ("GGUFReader", "get_tensor_name_map")}
    for name, function in own.items():
        setattr(gguf, name, cache(function))
    try:
        yield
    finally:
        for name, function in own.items():
            setattr(gguf, name, function)


@reading_once()
def causal_config(model: str, gguf_file: str | None = None) -> PreTrainedConfig | None:
    """The configuration of a causal model, None for GAU-α; other kinds are refused."""
    options = {"gguf_file": gguf_file} if gguf_file else {}
    found = remove_marks(read_config(check_model(model), **options))
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


@reading_once()
def causal_model(name: str, dtype: Any, gguf_file: str | None = None) -> PreTrainedModel:
    """A causal model from a folder or the hub; under its own recipe where it was saved with one."""
    name = check_model(name)
    if gguf_file is None:
        if not read_config(name).get(NAME):
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


def check_tokens(folder: Path, tokenizer: Any) -> None:
    """Make sure that a model's tokens are those of a corpus: with others it would answer, and mean nothing."""
    if (folder / "tokenizer.json").is_file():
        own = read_tokenizer(folder)
        if own.get_vocab() != tokenizer.get_vocab():
            sizes = f"{len(own)} tokens and {len(tokenizer)}" if len(own) != len(tokenizer) else "as many others"
            raise ValueError(
                f"{folder}: expected the tokens of the corpus, got {sizes}; prepare it with --tokenizer {folder}"
            )


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
    model, name = causal_model(name, "auto", gguf_file), check_model(name)
    options = {"gguf_file": gguf_file} if gguf_file else {}
    with write_atomically(folder) as partial:
        extend(model, recipe)
        if measured:
            getattr(model.config, NAME)["measured"] = measured
        model.save_pretrained(partial)
        missing = {"_raise_exceptions_for_missing_entries": False}
        if gguf_file or cached_file(name, "tokenizer_config.json", **missing) is not None:
            read_tokenizer(name, **options).save_pretrained(partial)
    return folder
