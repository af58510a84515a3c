"""What a training run has reached, on disk: complete or absent, and enough to go on as if it had never stopped."""

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

CHECKSUM = "crc32"
STATE = "state-{:09d}.safetensors"


def save_tensors(tensors: Mapping[str, Tensor], path: Path, metadata: dict[str, str]) -> None:
    """Write a safetensors file whole, or leave the one that is there. A full disk is an OSError that names the file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with write_atomically(path) as partial:
            # through bytes: written by the library itself, the file would be readable by its owner alone
            partial.write_bytes(save({name: x.detach().contiguous() for name, x in tensors.items()}, metadata))
    except OSError as error:
        raise OSError(f"{path}: cannot be written ({error}); what was saved before is intact") from error


def save_state(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, progress: dict[str, Any]) -> Path:
    """Weights, the optimiser's averages and `progress`, whose "step" names the file; earlier states then go.

    With a checksum: a run that goes on from a changed byte would end with other numbers, and nobody would know.
    """
    path = folder / STATE.format(progress["step"])
    tensors: dict[str, Tensor] = {f"model.{name}": x for name, x in model.named_parameters()}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state[parameter].items():
            tensors[f"optimizer.{name}.{key}"] = value
    tensors = {key: x.detach().cpu() for key, x in tensors.items()}
    checksum = 0
    for key in sorted(tensors):
        checksum = _add_to(checksum, key, tensors[key])
    save_tensors(tensors, path, {"progress": json.dumps(progress), CHECKSUM: f"{checksum:08x}"})
    for old in _states(folder):
        if old != path:
            old.unlink()
    return path


def load_state(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any] | None:
    """Put the last state into the model and the optimiser and return its progress; None where there is none."""
    found = _states(folder)
    if not found:
        return None
    path, parameters, checksum = found[-1], dict(model.named_parameters()), 0
    earlier = f"from {found[-2].name}" if len(found) > 1 else "from the first step"
    remedy = f"delete it, and the same command goes on {earlier}"
    with open_tensors(path, remedy) as file, torch.no_grad():
        metadata = file.metadata() or {}
        for key in sorted(file.keys()):
            kind, name = key.split(".", 1)
            name, slot = (name, "") if kind == "model" else name.rsplit(".", 1)
            value = file.get_tensor(key)
            checksum = _add_to(checksum, key, value)
            if name not in parameters or (not slot and value.shape != parameters[name].shape):
                raise ValueError(f"{path}: expected the state of this run, got {key}, of another model; {remedy}")
            if not slot:
                parameters[name].copy_(value)
            else:
                # averages live beside their weights; the count of steps does so only where the optimiser keeps it there
                device = parameters[name].device
                optimizer.state[parameters[name]][slot] = value.to(device)
    # states from before there were checksums have none
    if "progress" not in metadata or metadata.get(CHECKSUM, f"{checksum:08x}") != f"{checksum:08x}":
        raise ValueError(f"{path}: broken, its content was changed after it was written; {remedy}")
    progress: dict[str, Any] = json.loads(metadata["progress"])
    return progress


def _add_to(checksum: int, name: str, x: Tensor) -> int:
    """CRC-32 of what was added so far, then of a tensor's name and bytes."""
    content = memoryview(x.detach().contiguous().reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
    return zlib.crc32(content, zlib.crc32(name.encode(), checksum))


def remove_states(folder: Path) -> None:
    """When nothing is left to go on with."""
    for path in _states(folder):
        path.unlink()


def _states(folder: Path) -> list[Path]:
    return sorted(folder.glob(STATE.replace("{:09d}", "?????????")))


class Log:
    """One JSON object a line, appended as training goes on; what lies past a state that is resumed is cut off."""

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
    """Every whole line: the last may have been cut short."""
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
