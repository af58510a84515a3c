"""The state of a training run on disk, written atomically and sufficient to resume it exactly."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor, nn

from isentrope.pretrained import open_tensors
from isentrope.utils.files import write_atomically

CHECKSUM_KEY = "crc32"
STATE_FILE = "state-{:09d}.safetensors"


def save_tensors(tensors: Mapping[str, Tensor], path: Path, metadata: dict[str, str]) -> None:
    """Write a safetensors file atomically.

    Raises:
        OSError: The file cannot be written; the message names it, and an existing file is intact.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with write_atomically(path) as partial:
            write_tensors(tensors, partial, metadata)
    except OSError as error:
        raise OSError(f"{path}: cannot be written ({error}); what was saved before is intact") from error


def write_tensors(tensors: Mapping[str, Tensor], path: Path, metadata: dict[str, str]) -> None:
    """Write a safetensors file that everybody may read; by safetensors' own save_file its owner alone may."""
    path.write_bytes(save({name: x.detach().contiguous() for name, x in tensors.items()}, metadata))


def save_state(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, progress: dict[str, Any]) -> Path:
    """Write weights, optimiser state and progress with a checksum, and remove earlier states.

    Args:
        folder: The folder of the run.
        model: Its weights are saved.
        optimizer: Its averages are saved.
        progress: JSON-serializable; "step" names the file.

    Returns:
        The path of the state.
    """
    path = folder / STATE_FILE.format(progress["step"])
    tensors: dict[str, Tensor] = {f"model.{name}": x for name, x in model.named_parameters()}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state[parameter].items():
            tensors[f"optimizer.{name}.{key}"] = value
    tensors = {key: x.detach().cpu() for key, x in tensors.items()}
    save_tensors(tensors, path, {"progress": json.dumps(progress), CHECKSUM_KEY: hash_tensors(tensors)})
    for old in _list_states(folder):
        if old != path:
            old.unlink()
    return path


def load_state(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any] | None:
    """Load the last state into the model and the optimiser.

    Returns:
        The progress that was saved with it; None if there is no state.

    Raises:
        ValueError: The state is broken or of another model.
    """
    states = _list_states(folder)
    if not states:
        return None
    path, parameters, checksum = states[-1], dict(model.named_parameters()), 0
    earlier = f"from {states[-2].name}" if len(states) > 1 else "from the first step"
    remedy = f"delete it, and the same command resumes {earlier}"
    with open_tensors(path, remedy) as file, torch.no_grad():
        metadata = file.metadata() or {}
        for key in sorted(file.keys()):
            kind, name = key.split(".", 1)
            name, slot = (name, "") if kind == "model" else name.rsplit(".", 1)
            value = file.get_tensor(key)
            checksum = _update_checksum(checksum, key, value)
            if name not in parameters or (not slot and value.shape != parameters[name].shape):
                raise ValueError(f"{path}: expected the state of this run, got {key}, of another model; {remedy}")
            if not slot:
                parameters[name].copy_(value)
            else:
                optimizer.state[parameters[name]][slot] = value.to(parameters[name].device)
    # older states have no checksum
    if "progress" not in metadata or metadata.get(CHECKSUM_KEY, f"{checksum:08x}") != f"{checksum:08x}":
        raise ValueError(f"{path}: broken: its content changed after it was written; {remedy}")
    progress: dict[str, Any] = json.loads(metadata["progress"])
    return progress


def hash_tensors(tensors: Mapping[str, Tensor]) -> str:
    """Return a CRC-32 of all names and bytes, in the order of the names; it waits for the device."""
    checksum = 0
    for key in sorted(tensors):
        checksum = _update_checksum(checksum, key, tensors[key].detach().cpu())
    return f"{checksum:08x}"


def _update_checksum(checksum: int, name: str, x: Tensor) -> int:
    """Extend a CRC-32 by a tensor's name and bytes."""
    content = memoryview(x.detach().contiguous().reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
    return zlib.crc32(content, zlib.crc32(name.encode(), checksum))


def remove_states(folder: Path) -> None:
    """Remove all states, after a run has finished."""
    for path in _list_states(folder):
        path.unlink()


def _list_states(folder: Path) -> list[Path]:
    return sorted(folder.glob(STATE_FILE.replace("{:09d}", "?????????")))


class TrainingLog:
    """A log of one JSON object a line; rows after the step that a run resumes from are removed."""

    def __init__(self, path: Path, step: int) -> None:
        rows = [row for row in read_log(path) if row["step"] <= step]
        with write_atomically(path) as partial:
            partial.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        self.file = path.open("a", encoding="utf-8")

    def add(self, **row: Any) -> None:
        self.file.write(json.dumps(row) + "\n")
        self.file.flush()

    def close(self) -> None:
        self.file.flush()
        os.fsync(self.file.fileno())
        self.file.close()


def read_log(path: Path) -> list[dict[str, Any]]:
    """Read the rows of a log up to the first incomplete line."""
    if not path.exists():
        return []
    rows = []
    for line in path.read_bytes().splitlines():
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            break
        if not isinstance(row, dict) or "step" not in row:
            break
        rows.append(row)
    return rows
