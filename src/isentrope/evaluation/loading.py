"""Load causal models to measure, and save one with the recipe that was best."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import transformers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.tokenization_utils_base import VERY_LARGE_INTEGER
from transformers.utils.hub import cached_file

from isentrope.evaluation.results import ModelRecord
from isentrope.hf.auto import resolve_auto
from isentrope.hf.extend import extend
from isentrope.hf.loading import load
from isentrope.hf.names import CONFIG_KEY
from isentrope.hf.saved_models import remove_marks
from isentrope.hf.train_length import read_train_length
from isentrope.models import GAUAlphaConfig
from isentrope.pretrained import (
    load_pretrained,
    read_config,
    read_gguf_once,
    read_tokenizer,
    resolve_device,
    resolve_model_device,
    resolve_model_name,
)
from isentrope.recipe import PLAIN, Recipe
from isentrope.recipe.auto import is_auto
from isentrope.utils.extras import require_package
from isentrope.utils.files import write_atomically
from isentrope.utils.messages import suggest, truncate

ATTENTION_FIELDS = ("rope_parameters", "max_position_embeddings", "sliding_window", "layer_types")


@read_gguf_once()
def read_causal_config(model: str, gguf_file: str | None = None) -> PreTrainedConfig | None:
    """Read the configuration of a causal model.

    Args:
        model: a folder, or a name on the hub.
        gguf_file: a GGUF file in the folder.

    Returns:
        The configuration; None for GAU-α.

    Raises:
        ValueError: the model is of another kind.
    """
    folder = Path(model).expanduser()
    names = sorted(path.name for path in folder.glob("*.gguf"))
    if gguf_file and folder.is_dir() and not (folder / gguf_file).is_file():
        hint = suggest(gguf_file, names) if names else "; choose another folder"
        raise ValueError(f"--gguf-file: expected a file in {model}, got {gguf_file!r}{hint}")
    options = {"gguf_file": gguf_file} if gguf_file else {}
    saved = remove_marks(read_config(resolve_model_name(model), **options))
    if not saved:
        hint = f"; add --gguf-file {names[0]}" if names else "; name the folder that save_pretrained wrote"
        raise ValueError(f"{model}: expected a model, got no config.json{hint}")
    kind = saved.get("model_type", GAUAlphaConfig.model_type)  # published GAU-α checkpoints name no type
    if kind == GAUAlphaConfig.model_type:
        return None
    causal = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(kind)
    # a type may have causal and other models: a BERT for masked tokens would load, and look ahead
    architectures = saved.get("architectures") or [causal]
    if causal is None or causal not in architectures:
        got = ", ".join(filter(None, architectures)) or kind
        raise ValueError(f"model: expected a causal one or GAU-α, got {got} in {model}")
    return AutoConfig.from_pretrained(model, **options)


def read_known_train_length(model: str, gguf_file: str | None = None) -> int | None:
    """Read the training length from a causal model's config; None for GAU-α and where a config states none.

    Args:
        model: a folder, or a name on the hub.
        gguf_file: a GGUF file in that folder.
    """
    config = read_causal_config(model, gguf_file)
    return None if config is None else read_train_length(config.get_text_config())


@read_gguf_once()
def load_causal_model(name: str, dtype: Any, gguf_file: str | None = None) -> PreTrainedModel:
    """Load a causal model from a folder or the hub; under its own recipe where it was saved with one."""
    name = resolve_model_name(name)
    if gguf_file is None:
        if not read_config(name).get(CONFIG_KEY):
            model: Any = load_pretrained(AutoModelForCausalLM, name, dtype=dtype)
            return model
        return load(name, dtype=dtype)
    require_package("gguf")
    # dequantised, since blocks of quantised weights can be neither extended nor saved
    gguf_config = getattr(transformers, "GgufConfig", None)  # newer versions have it
    options = {} if gguf_config is None else {"quantization_config": gguf_config(dequantize=True)}
    return load_pretrained(AutoModelForCausalLM, name, dtype=dtype, gguf_file=gguf_file, **options)


def check_not_extended(name: str, recipes: Sequence[str]) -> None:
    """Check, before any work, that recipes are not put on top of the one that a model was saved with.

    Raises:
        ValueError: the folder is of an extended model, and a recipe is not `plain`, which measures it as it is.
    """
    saved = read_config(resolve_model_name(name)).get(CONFIG_KEY)
    if not isinstance(saved, dict) or all(recipe == PLAIN for recipe in recipes):
        return
    own = truncate(str(Recipe.from_dict(saved["recipe"])))
    original = f" {saved['base']}" if saved.get("base") else " it was made from"
    raise ValueError(
        f"{name}: already extended with {own!r}; evaluate the original folder{original}, or this one with the recipe "
        "'plain', which measures it as it is"
    )


def resolve_auto_for(name: str, recipes: Sequence[str], length: int, gguf_file: str | None = None) -> tuple[str, ...]:
    """Replace `auto` among the recipes of a command by what it stands for; refuses a model that is extended already.

    Args:
        name: a causal model, a folder or a name on the hub.
        recipes: texts of recipes.
        length: the most tokens that the command reads.
        gguf_file: a GGUF file in the folder.
    """
    if gguf_file is None:
        check_not_extended(name, recipes)
    if not any(map(is_auto, recipes)):
        return tuple(recipes)
    config = read_causal_config(name, gguf_file)
    if config is None:
        raise ValueError(f"recipe 'auto': expected a causal model, got GAU-α in {name}; name a recipe")
    return resolve_auto(recipes, config, length)


def load_on_device(
    name: str, device: str = "auto", dtype: str = "auto", gguf_file: str | None = None
) -> PreTrainedModel:
    """Load a causal model onto a device.

    Args:
        name: a folder, or a name on the hub.
        device: such as cpu or cuda; auto is a GPU where there is one.
        dtype: bfloat16, float16 or float32; auto is bfloat16 on a GPU and float32 on a CPU.
        gguf_file: a GGUF file in the folder.
    """
    device, resolved = resolve_device(device, dtype) if gguf_file else resolve_model_device(name, device, dtype)
    model: Any = load_causal_model(name, resolved, gguf_file)
    return model.to(device)


def as_model(model: str | Path | PreTrainedModel) -> PreTrainedModel:
    """Return a model, loaded if it is given by its folder or its name on the hub."""
    return load_on_device(str(model)) if isinstance(model, str | Path) else model


@contextmanager
def keep_mode(model: PreTrainedModel) -> Iterator[None]:
    """Put a model back into training mode after the block, if it was in it."""
    training = model.training
    try:
        yield
    finally:
        model.train(training)


def get_model_name(model: str | Path | PreTrainedModel) -> str:
    """Return the folder or the name on the hub that a model comes from; empty where it comes from none."""
    return str(model) if isinstance(model, str | Path) else str(model.name_or_path)


def load_tokenizer(name: str, gguf_file: str | None = None) -> Any:
    """Load a model's tokenizer from its folder, the hub or a GGUF file."""
    if not name:
        raise ValueError("texts: expected token ids for a model that does not name its folder, got text")
    options: dict[str, Any] = {"gguf_file": gguf_file} if gguf_file else {}
    return read_tokenizer(resolve_model_name(name), **options)


def identify_model(model: PreTrainedModel, name: str) -> ModelRecord:
    """Build the record of a model for results; hashes of samples of each tensor, and of what its config says of
    positions, windows and a saved recipe, distinguish models of one name."""
    content = hashlib.sha256()
    for key, x in model.named_parameters():
        content.update(f"{key} {tuple(x.shape)}".encode())
        if not x.is_meta:
            content.update(x.detach().reshape(-1)[:: 1 + x.numel() // 256].float().cpu().numpy().tobytes())
    return {
        "name": name,
        "type": model.config.model_type,
        "dtype": str(model.dtype).removeprefix("torch."),
        "weights": content.hexdigest()[:16],
        "config": _hash_config(model.config),
    }


def _hash_config(config: PreTrainedConfig) -> str:
    """Hash what of a config changes how weights attend, and no more: others come and go with transformers."""
    text = config.get_text_config()
    values = {name: getattr(text, name, None) for name in ATTENTION_FIELDS}
    saved = getattr(config, CONFIG_KEY, None) or {}
    values[CONFIG_KEY] = {key: value for key, value in saved.items() if key not in ("measured", "warning")}
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()[:16]


def check_save_folder(folder: Path | None) -> None:
    """Check that a model can be saved there, before it is measured for hours."""
    if folder is None:
        return
    if folder.exists():
        raise ValueError(f"save: expected a folder that is not there yet, got {folder}; choose another name")
    folder.parent.mkdir(parents=True, exist_ok=True)
    if not os.access(folder.parent, os.W_OK):
        raise ValueError(f"save: directory not writable: {folder.parent}; choose another")


def save_extended(
    name: str,
    recipe: Recipe | str,
    folder: Path,
    gguf_file: str | None = None,
    measured: list[dict[str, Any]] | None = None,
    warning: str | None = None,
) -> Path:
    """Save a model with a recipe in its config.json, in the dtype it was loaded in; `isentrope.load` reads it.

    Args:
        name: the model, a folder or a name on the hub.
        recipe: what it is extended with.
        folder: a new folder.
        gguf_file: a GGUF file in the model's folder.
        measured: rows for the model card.
        warning: a sentence for the model card, below the rows.
    """
    check_save_folder(folder)
    model, name = load_causal_model(name, "auto", gguf_file), resolve_model_name(name)
    options = {"gguf_file": gguf_file} if gguf_file else {}
    with write_atomically(folder) as partial:
        extend(model, recipe)
        notes = {"measured": measured, "warning": warning}
        getattr(model.config, CONFIG_KEY).update({key: note for key, note in notes.items() if note})
        model.save_pretrained(partial)
        missing = {"_raise_exceptions_for_missing_entries": False}
        if gguf_file or cached_file(name, "tokenizer_config.json", **missing) is not None:
            tokenizer = read_tokenizer(name, to_save=True, **options)
            tokenizer.model_max_length = VERY_LARGE_INTEGER  # or truncation=True would cut text at the old length
            tokenizer.save_pretrained(partial)
    return folder
