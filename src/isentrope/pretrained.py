"""Loading saved models: broken, missing, renamed or pickled weights are refused in a sentence that names the file."""

from __future__ import annotations

import logging
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import AutoTokenizer, PreTrainedConfig
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, WEIGHTS_INDEX_NAME, WEIGHTS_NAME
from transformers.utils.hub import cached_file

from isentrope.core.dtypes import choose_load_dtype, parse_dtype
from isentrope.utils.files import read_fields, read_json

AGAIN = "fetch or save it again"
HUB_OPTIONS = ("revision", "token", "cache_dir", "local_files_only", "subfolder")
SAFETENSORS_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
RUN_DTYPES = ("bfloat16", "float16", "float32")
SPECIAL = {torch.bfloat16: 0x7F80, torch.float16: 0x7C00}  # infinity in bits, and NaN above it


def resolve_model_name(name: str) -> str:
    """Expand the path of a model's folder; leave a name on the hub as it is.

    Raises:
        ValueError: `name` is written as a path, and no such folder exists.
    """
    if (folder := Path(name).expanduser()).is_dir():
        return str(folder)
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise ValueError(f"{name}: expected a folder with a model, or a name on the hub")
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
    kind: Any, name: str | Path, *, unused: Sequence[str] = (), remedy: str = AGAIN, **options: Any
) -> Any:
    """`kind.from_pretrained(name, **options)`, where every weight of the model comes from safetensors and is finite.

    transformers itself also unpickles, and starts weights that it does not find, or finds in another shape, at random.

    Args:
        kind: a model class of transformers, or one of its Auto classes.
        name: a folder, or a name on the hub.
        unused: parts of the names of weights that may be missing, since the caller does not use them.
        remedy: what to do about a broken file, as the end of a sentence.

    Raises:
        ValueError: names the file or folder, what is wrong with it and the remedy.
    """
    hub = {key: options[key] for key in HUB_OPTIONS if key in options}
    files = [] if options.get("gguf_file") else check_weights(name, remedy, **hub)
    where = files[0] if len(files) == 1 else name
    with _without_report():
        try:
            model, info = kind.from_pretrained(
                name, output_loading_info=True, use_safetensors=True, ignore_mismatched_sizes=True, **options
            )
        except SafetensorError as error:
            raise ValueError(f"{where}: broken weights ({error}); {remedy}") from error
        except (struct.error, IndexError) as error:
            if not options.get("gguf_file"):
                raise
            raise _broken_gguf(name, options, error) from error
        except RecursionError as error:
            raise ValueError(f"{name}: a JSON file in it is nested too deep to be read; {remedy}") from error
    missing = sorted(key for key in info["missing_keys"] if not any(part in key for part in unused))
    if missing:
        unknown = sorted(info["unexpected_keys"])
        renamed = f", but has {_named(unknown)}, which it does not know" if unknown else ""
        raise ValueError(f"{where}: lacks {_named(missing)} of the {_kind(model)}{renamed}; {remedy}")
    for key, held, expected in sorted(info["mismatched_keys"]):
        shapes = f"shape {tuple(held)}, expected {tuple(expected)} as its config.json says"
        raise ValueError(f"{where}: {key} has {shapes}; {remedy}")
    check_finite(model, where, remedy)
    return model


def read_config(name: str | Path, **options: Any) -> dict[str, Any]:
    """What a model's config.json says, as it is; an error names the file, or the model on the hub."""
    if (path := Path(name).expanduser() / "config.json").is_file() and "gguf_file" not in options:
        read_fields(path, AGAIN)
    try:
        found: dict[str, Any] = PreTrainedConfig.get_config_dict(name, **options)[0]
    except OSError as error:
        raise _unreachable(name, error) from error
    except (struct.error, IndexError) as error:
        if not options.get("gguf_file"):
            raise
        raise _broken_gguf(name, options, error) from error
    return found


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
    for name, function in originals.items():
        setattr(gguf, name, cache(function))
    try:
        yield
    finally:
        for name, function in originals.items():
            setattr(gguf, name, function)


def read_tokenizer(name: str | Path, **options: Any) -> Any:
    """`AutoTokenizer.from_pretrained`, whose errors do not name the file, and may be of any kind."""
    try:
        return AutoTokenizer.from_pretrained(name, **options)
    except ImportError:
        raise
    except Exception as error:
        folder = Path(name).expanduser()
        for file in ("config.json", "tokenizer_config.json", "tokenizer.json"):
            if (folder / file).is_file():
                read_fields(folder / file, AGAIN)
        if isinstance(error, OSError) and not folder.is_dir():
            raise _unreachable(name, error) from error
        why = f"got none that can be read ({_short(error)})"
        raise ValueError(f"{name}: expected a tokenizer, {why}; {AGAIN}") from error


def check_same_tokens(folder: Path, tokenizer: Any) -> None:
    """Check that a model was trained with a corpus's tokens: with others its output would mean nothing.

    Raises:
        ValueError: the two vocabularies differ.
    """
    if (folder / "tokenizer.json").is_file():
        own = read_tokenizer(folder)
        if own.get_vocab() != tokenizer.get_vocab():
            sizes = f"{len(own)} tokens and {len(tokenizer)}" if len(own) != len(tokenizer) else "as many others"
            raise ValueError(
                f"{folder}: expected the tokens of the corpus, got {sizes}; prepare it with --tokenizer {folder}"
            )


def check_weights(name: str | Path, remedy: str = AGAIN, **hub: Any) -> list[Path]:
    """The safetensors files of a model's weights, each known to be whole as far as its header tells.

    A byte that was changed inside a weight cannot be seen here. Pickles (`pytorch_model.bin`, `adapter_model.bin`) are
    refused without being opened: to unpickle is to run what the file says.
    """
    found = _files(name, remedy, hub)
    if not found:
        pickle = next((p for p in (WEIGHTS_NAME, WEIGHTS_INDEX_NAME) if _find(name, p, hub) is not None), None)
        if pickle is not None:
            raise _pickled(name, pickle)
        raise ValueError(f"{name}: expected weights in {SAFE_WEIGHTS_NAME}, got none; {remedy}")
    if _find(name, "adapter_config.json", hub) is not None:
        if (adapter := _find(name, "adapter_model.safetensors", hub)) is None:
            raise _pickled(name, "adapter_model.bin")
        check_tensors(adapter, remedy)
    for path in found:
        check_tensors(path, remedy)
    return found


def check_tensors(path: Path, remedy: str = AGAIN) -> None:
    """That a safetensors file is whole as far as its header tells."""
    with open_tensors(path, remedy):
        pass


@contextmanager
def open_tensors(path: Path, remedy: str = AGAIN) -> Iterator[Any]:
    """`safe_open`, whose errors do not name the file."""
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


def check_finite(model: nn.Module, where: str | Path, remedy: str = AGAIN) -> None:
    """That no weight is NaN or infinite: all that is measured would be, or be blamed on something else."""
    for key, x in model.named_parameters():
        if x.is_meta or not x.numel() or x.dtype not in SAFETENSORS_DTYPES.values() or _all_finite(x.detach()):
            continue
        count = int((~x.detach().isfinite()).sum())
        raise ValueError(f"{where}: {count} of the {x.numel()} numbers in {key} are NaN or infinite; {remedy}")


def _all_finite(x: torch.Tensor) -> bool:
    """`x.isfinite().all()`, up to twenty times faster on a CPU: billions of weights are looked at."""
    if x.dtype in SPECIAL:  # exponents of ones mark what is not finite
        return int((x.view(torch.int16) & 0x7FFF).amax()) < SPECIAL[x.dtype]
    # the sum is finite where all is, unless it overflows
    return bool(x.sum(dtype=torch.float32).isfinite()) or bool(x.isfinite().all())


def saved_dtype(name: str | Path, known: torch.dtype | str | None = None, **hub: Any) -> torch.dtype | None:
    """The precision of a model's weights: `known`, which its config may tell, or that of the first of its tensors.

    None where there are no safetensors.
    """
    if known is not None:
        return parse_dtype(known)
    for path in _files(name, AGAIN, hub)[:1]:
        with open_tensors(path) as file:
            kinds = (SAFETENSORS_DTYPES.get(file.get_slice(key).get_dtype()) for key in file.keys())  # noqa: SIM118
            return next((kind for kind in kinds if kind is not None), None)
    return None


def _files(name: str | Path, remedy: str, hub: dict[str, Any]) -> list[Path]:
    # an index may have stayed behind when a model was saved anew in one file
    if (single := _find(name, SAFE_WEIGHTS_NAME, hub)) is not None:
        return [single]
    index = _find(name, SAFE_WEIGHTS_INDEX_NAME, hub)
    return [] if index is None else _shards(name, index, remedy, hub)


def _find(name: str | Path, file: str, hub: dict[str, Any]) -> Path | None:
    if (folder := Path(name).expanduser()).is_dir():
        path = folder / hub.get("subfolder", "") / file
        return path if path.is_file() else None
    found = cached_file(str(name), file, _raise_exceptions_for_missing_entries=False, **hub)
    return None if found is None else Path(found)


def _shards(name: str | Path, index: Path, remedy: str, hub: dict[str, Any]) -> list[Path]:
    data = read_json(index, remedy)
    if not isinstance(data, dict) or not isinstance(data.get("weight_map"), dict):
        raise ValueError(f"{index}: expected a 'weight_map', got none; {remedy}")
    names = sorted(set(map(str, data["weight_map"].values())))
    if pickles := [shard for shard in names if not shard.endswith(".safetensors")]:
        raise _pickled(name, pickles[0])
    found = {shard: _find(name, shard, hub) for shard in names}
    if lost := [shard for shard, path in found.items() if path is None]:
        raise ValueError(f"{index}: expected {lost[0]} beside it, got no such file; {remedy}")
    return [path for path in found.values() if path is not None]


def _pickled(name: str | Path, file: str) -> ValueError:
    return ValueError(
        f"{name}: has its weights in {file}, a pickle, which can run any code when it is opened; "
        "save the model as safetensors, or fetch a version that is"
    )


def _kind(model: Any) -> str:
    return f"{model.config.model_type} model"


def _named(keys: Sequence[str]) -> str:
    return keys[0] if len(keys) == 1 else f"{keys[0]} and {len(keys) - 1} other weight{'s' * (len(keys) > 2)}"


def _broken_gguf(name: str | Path, options: dict[str, Any], error: Exception) -> ValueError:
    return ValueError(f"{Path(name) / str(options['gguf_file'])}: broken GGUF file ({_short(error)}); {AGAIN}")


def _unreachable(name: str | Path, error: OSError) -> OSError:
    """Errors of the hub do not name the model."""
    if error.errno is not None:
        return error
    return OSError(f"{name}: {_first_line(error)} Check the name, or fetch the model into a folder.")


def _short(error: Exception) -> str:
    words = _first_line(error)
    return f"{words[:100]}…" if len(words) > 100 else words or type(error).__name__


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


@contextmanager
def _without_report() -> Iterator[None]:
    """Without the table of keys that transformers logs: what matters in it is an error here."""

    def wanted(record: logging.LogRecord) -> bool:
        return "LOAD REPORT" not in record.getMessage()

    logger = logging.getLogger("transformers.modeling_utils")
    logger.addFilter(wanted)
    try:
        yield
    finally:
        logger.removeFilter(wanted)
