"""Load saved models, their configs and tokenizers; broken, missing or pickled weights are errors that name the file."""

from __future__ import annotations

import logging
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import AutoTokenizer, PreTrainedConfig
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, WEIGHTS_INDEX_NAME, WEIGHTS_NAME
from transformers.utils.hub import cached_file

from isentrope.core.dtypes import choose_load_dtype, parse_dtype
from isentrope.gguf_tokenizer import match_gguf
from isentrope.utils.files import read_fields, read_json

REFETCH_REMEDY = "fetch or save it again"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")
HUB_OPTIONS = ("revision", "token", "cache_dir", "local_files_only", "subfolder")
SAFETENSORS_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
FORCED_CLEANUP = "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"  # of tokenizers
RUN_DTYPES = ("bfloat16", "float16", "float32")
INFINITY_BITS = {torch.bfloat16: 0x7F80, torch.float16: 0x7C00}  # NaN is above it


def resolve_model_name(name: str) -> str:
    """Expand the path of a model's folder; leave a name on the hub as it is.

    Raises:
        ValueError: `name` is written as a path, and no such folder exists.
    """
    if (folder := Path(name).expanduser()).is_dir():
        return str(folder)
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise ValueError(f"{name}: expected a folder with a model, or a name on the hub, got neither; check the path")
    return name


def resolve_device(device: str = "auto", dtype: str = "auto") -> tuple[str, torch.dtype]:
    """Choose a device and a dtype to run in: by default a GPU where there is one, and bfloat16 on it.

    Raises:
        ValueError: the device is not available, or the dtype is not one of RUN_DTYPES.
    """
    device = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = _first_line(error)
        raise ValueError(f"device: expected one that is there, such as cpu, got {device!r}: {reason}") from None
    dtype = ("bfloat16" if device.startswith("cuda") else "float32") if dtype == "auto" else dtype
    if dtype not in RUN_DTYPES:
        raise ValueError(f"dtype: expected {', '.join(RUN_DTYPES)} or auto, got {dtype!r}")
    return device, getattr(torch, dtype)


def resolve_model_device(name: str, device: str = "auto", dtype: str = "auto") -> tuple[str, torch.dtype]:
    """`resolve_device` for a saved model; warns once where its half precision becomes float32 on a CPU."""
    device, chosen = resolve_device(device, dtype)
    if dtype == "auto" and torch.device(device).type == "cpu":
        config = read_config(resolve_model_name(name))
        saved = saved_dtype(resolve_model_name(name), config.get("dtype") or config.get("torch_dtype"))
        choose_load_dtype(saved, None, device)
    return device, chosen


def load_pretrained(
    kind: Any, name: str | Path, *, unused: Sequence[str] = (), remedy: str = REFETCH_REMEDY, **options: Any
) -> Any:
    """Call `kind.from_pretrained(name, **options)`, and check that every weight comes from safetensors and is finite.

    transformers itself also unpickles, and initialises weights at random that are missing or of another shape.

    Args:
        kind: a model class of transformers, or one of its Auto classes.
        name: a folder, or a name on the hub.
        unused: parts of the names of weights that may be missing, since the caller does not use them.
        remedy: what to do about a broken file, as the end of a sentence.
        **options: passed to `from_pretrained`.

    Returns:
        The model.

    Raises:
        ValueError: names the file or folder, what is wrong with it and the remedy.
    """
    hub = {key: options[key] for key in HUB_OPTIONS if key in options}
    files = [] if options.get("gguf_file") else check_weights(name, remedy, **hub)
    where = files[0] if len(files) == 1 else name
    with _silence_report():
        try:
            model, info = kind.from_pretrained(
                name, output_loading_info=True, use_safetensors=True, ignore_mismatched_sizes=True, **options
            )
        except SafetensorError as error:
            raise ValueError(f"{where}: broken weights ({error}); {remedy}") from error
        except (struct.error, IndexError) as error:
            if not options.get("gguf_file"):
                raise
            raise _gguf_error(name, options, error) from error
        except RecursionError as error:
            raise ValueError(f"{name}: a JSON file in it is nested too deep to be read; {remedy}") from error
    missing = sorted(key for key in info["missing_keys"] if not any(part in key for part in unused))
    if missing:
        unknown = sorted(info["unexpected_keys"])
        renamed = f", but has {_name_first(unknown)}, which it does not know" if unknown else ""
        raise ValueError(
            f"{where}: lacks {_name_first(missing)} of the {model.config.model_type} model{renamed}; {remedy}"
        )
    for key, shape, expected in sorted(info["mismatched_keys"]):
        shapes = f"shape {tuple(shape)}, expected {tuple(expected)} by its config.json"
        raise ValueError(f"{where}: {key} has {shapes}; {remedy}")
    check_finite(model, where, remedy)
    return model


def read_config(name: str | Path, **options: Any) -> dict[str, Any]:
    """Read a model's config.json as it is; errors name the file, or the model on the hub."""
    if (path := Path(name).expanduser() / "config.json").is_file() and "gguf_file" not in options:
        read_fields(path, REFETCH_REMEDY)
    try:
        config: dict[str, Any] = PreTrainedConfig.get_config_dict(name, **options)[0]
    except OSError as error:
        raise _hub_error(name, error) from error
    except (struct.error, IndexError) as error:
        if not options.get("gguf_file"):
            raise
        raise _gguf_error(name, options, error) from error
    return config


def read_config_as(config_class: type[PreTrainedConfig], model: str | Path) -> Any:
    """Read the configuration of a model that must be of one type: transformers would drop another's weights silently.

    Raises:
        ValueError: config.json names another model type.
    """
    model_type = read_config(resolve_model_name(str(model))).get("model_type", config_class.model_type)
    if model_type != config_class.model_type:
        raise ValueError(f"model: expected one of type {config_class.model_type}, got {model_type} in {model}")
    return config_class.from_pretrained(model)


@contextmanager
def read_gguf_once() -> Iterator[None]:
    """Cache GGUF files and the names of their tensors while the block lasts.

    transformers reads a file once for the configuration and again for the weights, and lists the names for every
    module, which takes longer than all the rest.
    """
    try:
        import gguf
    except ImportError:  # reported where a file is to be read
        yield
        return
    originals = {name: getattr(gguf, name) for name in ("GGUFReader", "get_tensor_name_map")}
    if not isinstance(originals["GGUFReader"], type):  # within such a block
        yield
        return

    class Reader(gguf.GGUFReader):
        """Of a plain array: a memmap takes three times as long to index, and metadata are a million entries."""

        @property
        def data(self) -> Any:
            return self.array

        @data.setter
        def data(self, mapped: Any) -> None:
            self.array = mapped.view(np.ndarray)

    for name, function in (originals | {"GGUFReader": Reader}).items():
        setattr(gguf, name, cache(function))
    try:
        yield
    finally:
        for name, function in originals.items():
            setattr(gguf, name, function)


def read_tokenizer(name: str | Path, *, to_save: bool = False, **options: Any) -> Any:
    """Call `AutoTokenizer.from_pretrained`; its errors, which may be of any kind, become ones that name the file.

    One that is to be saved again keeps every setting, and warns when it decodes.
    """
    if gguf_file := options.get("gguf_file"):
        hub = {key: options[key] for key in HUB_OPTIONS if key in options}
        with read_gguf_once():
            tokenizer = _read_tokenizer(name, options)
            match_gguf(tokenizer, str(cached_file(name, gguf_file, **hub)))
    else:
        tokenizer = _read_tokenizer(name, options)
    return tokenizer if to_save else _without_warning(tokenizer)


def _read_tokenizer(name: str | Path, options: dict[str, Any]) -> Any:
    try:
        return AutoTokenizer.from_pretrained(name, **options)
    except ImportError:
        raise
    except Exception as error:
        folder = Path(name).expanduser()
        for file in ("config.json", "tokenizer_config.json", "tokenizer.json"):
            if (folder / file).is_file():
                read_fields(folder / file, REFETCH_REMEDY)
        if isinstance(error, OSError) and not folder.is_dir():
            raise _hub_error(name, error) from error
        if folder.is_dir() and not any((folder / file).is_file() for file in TOKENIZER_FILES):
            raise ValueError(
                f"{name}: expected a tokenizer, got a folder without one; copy it there, or name texts as token ids: "
                "JSON lines with input_ids"
            ) from error
        reason = f"got none that can be read ({_shorten(error)})"
        raise ValueError(f"{name}: expected a tokenizer, {reason}; {REFETCH_REMEDY}") from error


def _without_warning(tokenizer: Any) -> Any:
    """Turn off the cleaning up of decoded text where transformers leaves it out anyway, and warns that it does."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if type(getattr(backend, "model", None)).__name__ == "BPE" and getattr(tokenizer, FORCED_CLEANUP, None) is False:
        tokenizer.clean_up_tokenization_spaces = False
    return tokenizer


def check_same_tokens(folder: Path, tokenizer: Any) -> None:
    """Check that a model was trained with a corpus's tokens: with others its output would mean nothing.

    Raises:
        ValueError: the two vocabularies differ.
    """
    if (folder / "tokenizer.json").is_file():
        saved = read_tokenizer(folder)
        if saved.get_vocab() != tokenizer.get_vocab():
            sizes = f"{len(saved)} tokens and {len(tokenizer)}" if len(saved) != len(tokenizer) else "as many others"
            raise ValueError(
                f"{folder}: expected the tokens of the corpus, got {sizes}; prepare it with --tokenizer {folder}"
            )


def check_weights(name: str | Path, remedy: str = REFETCH_REMEDY, **hub: Any) -> list[Path]:
    """List the safetensors files of a model's weights, after checking that each is complete by its header.

    A byte that was changed inside a weight is not noticed here. Pickles (`pytorch_model.bin`, `adapter_model.bin`) are
    refused without being opened, since unpickling runs code from the file.
    """
    files = _find_weights(name, remedy, hub)
    if not files:
        pickle = next((p for p in (WEIGHTS_NAME, WEIGHTS_INDEX_NAME) if _find_file(name, p, hub) is not None), None)
        if pickle is not None:
            raise _pickle_error(name, pickle)
        raise ValueError(f"{name}: expected weights in {SAFE_WEIGHTS_NAME}, got none; {remedy}")
    if _find_file(name, "adapter_config.json", hub) is not None:
        if (adapter := _find_file(name, "adapter_model.safetensors", hub)) is None:
            raise _pickle_error(name, "adapter_model.bin")
        check_tensors(adapter, remedy)
    for path in files:
        check_tensors(path, remedy)
    return files


def check_tensors(path: Path, remedy: str = REFETCH_REMEDY) -> None:
    """Check that a safetensors file is complete by its header."""
    with open_tensors(path, remedy):
        pass


@contextmanager
def open_tensors(path: Path, remedy: str = REFETCH_REMEDY) -> Iterator[Any]:
    """Call `safe_open`, with errors that name the file."""
    try:
        file = safe_open(path, "pt")
    except FileNotFoundError:
        raise ValueError(f"{path}: expected weights, got no such file; {remedy}") from None
    except SafetensorError as error:
        raise ValueError(f"{path}: broken safetensors file ({_first_line(error)}); {remedy}") from error
    except OSError as error:  # which does not name the file either
        raise ValueError(f"{path}: cannot be read ({_first_line(error)}); {remedy}") from error
    with file:
        try:
            yield file
        except SafetensorError as error:
            raise ValueError(f"{path}: broken safetensors file ({_first_line(error)}); {remedy}") from error


def check_finite(model: nn.Module, where: str | Path, remedy: str = REFETCH_REMEDY) -> None:
    """Check that no weight is NaN or infinite, which later errors would blame on something else."""
    for key, x in model.named_parameters():
        if x.is_meta or not x.numel() or x.dtype not in SAFETENSORS_DTYPES.values() or _is_finite(x.detach()):
            continue
        count = int((~x.detach().isfinite()).sum())
        raise ValueError(f"{where}: {count} of the {x.numel()} numbers in {key} are NaN or infinite; {remedy}")


def _is_finite(x: torch.Tensor) -> bool:
    """Return `x.isfinite().all()`, up to twenty times faster on a CPU, for billions of weights."""
    if x.dtype in INFINITY_BITS:  # exponents of ones only mark what is not finite
        return int((x.view(torch.int16) & 0x7FFF).amax()) < INFINITY_BITS[x.dtype]
    # a finite sum needs finite terms; the reverse fails where it overflows
    return bool(x.sum(dtype=torch.float32).isfinite()) or bool(x.isfinite().all())


def saved_dtype(name: str | Path, known: torch.dtype | str | None = None, **hub: Any) -> torch.dtype | None:
    """Return the precision of a model's weights: `known` from its config, or that of the first of its tensors.

    None where there are no safetensors.
    """
    if known is not None:
        return parse_dtype(known)
    for path in _find_weights(name, REFETCH_REMEDY, hub)[:1]:
        with open_tensors(path) as file:
            kinds = (SAFETENSORS_DTYPES.get(file.get_slice(key).get_dtype()) for key in file.keys())  # noqa: SIM118
            return next((kind for kind in kinds if kind is not None), None)
    return None


def _find_weights(name: str | Path, remedy: str, hub: dict[str, Any]) -> list[Path]:
    # an index may have stayed behind when a model was saved anew in one file
    if (single := _find_file(name, SAFE_WEIGHTS_NAME, hub)) is not None:
        return [single]
    index = _find_file(name, SAFE_WEIGHTS_INDEX_NAME, hub)
    return [] if index is None else _find_shards(name, index, remedy, hub)


def _find_file(name: str | Path, file: str, hub: dict[str, Any]) -> Path | None:
    if (folder := Path(name).expanduser()).is_dir():
        path = folder / hub.get("subfolder", "") / file
        return path if path.is_file() else None
    path_in_cache = cached_file(str(name), file, _raise_exceptions_for_missing_entries=False, **hub)
    return None if path_in_cache is None else Path(path_in_cache)


def _find_shards(name: str | Path, index: Path, remedy: str, hub: dict[str, Any]) -> list[Path]:
    data = read_json(index, remedy)
    if not isinstance(data, dict) or not isinstance(data.get("weight_map"), dict):
        raise ValueError(f"{index}: expected a 'weight_map', got none; {remedy}")
    names = sorted(set(map(str, data["weight_map"].values())))
    if pickles := [shard for shard in names if not shard.endswith(".safetensors")]:
        raise _pickle_error(name, pickles[0])
    paths = {shard: _find_file(name, shard, hub) for shard in names}
    if missing := [shard for shard, path in paths.items() if path is None]:
        raise ValueError(f"{index}: expected {missing[0]} beside it, got no such file; {remedy}")
    return [path for path in paths.values() if path is not None]


def _pickle_error(name: str | Path, file: str) -> ValueError:
    return ValueError(
        f"{name}: has its weights in {file}, a pickle, which can run any code when it is opened; "
        "save the model as safetensors, or fetch a version that is"
    )


def _name_first(keys: Sequence[str]) -> str:
    return keys[0] if len(keys) == 1 else f"{keys[0]} and {len(keys) - 1} other weight{'s' * (len(keys) > 2)}"


def _gguf_error(name: str | Path, options: dict[str, Any], error: Exception) -> ValueError:
    return ValueError(
        f"{Path(name) / str(options['gguf_file'])}: broken GGUF file ({_shorten(error)}); {REFETCH_REMEDY}"
    )


def _hub_error(name: str | Path, error: OSError) -> OSError:
    """Name the model in an error of the hub, which does not."""
    if error.errno is not None:
        return error
    where = "" if Path(name).expanduser().is_dir() else "no folder here has this name, and from the hub: "
    return OSError(f"{name}: {where}{_first_line(error)} Check the name, or fetch the model into a folder.")


def _shorten(error: Exception) -> str:
    line = _first_line(error)
    return f"{line[:100]}…" if len(line) > 100 else line or type(error).__name__


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


@contextmanager
def _silence_report() -> Iterator[None]:
    """Hide the table of keys that transformers logs: what matters in it is an error here."""

    def is_other(record: logging.LogRecord) -> bool:
        return "LOAD REPORT" not in record.getMessage()

    logger = logging.getLogger("transformers.modeling_utils")
    logger.addFilter(is_other)
    try:
        yield
    finally:
        logger.removeFilter(is_other)
