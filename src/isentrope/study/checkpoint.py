"""What a training run has reached, on disk: complete or absent, and enough to go on as if it had never stopped."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor, nn

from isentrope.files import complete

STATE = "state-{:09d}.safetensors"


def save_tensors(tensors: Mapping[str, Tensor], path: Path, metadata: dict[str, str]) -> None:
    """Write a safetensors file whole, or leave the one that is there. A full disk is an OSError that names the file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with complete(path) as partial:
            # through bytes: written by the library itself, the file would be readable by its owner alone
            partial.write_bytes(save({name: x.detach().contiguous() for name, x in tensors.items()}, metadata))
    except OSError as error:
        raise OSError(f"{path}: cannot be written ({error}); what was saved before is intact") from error


def save_state(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, progress: dict[str, Any]) -> Path:
    """Weights, the optimiser's averages and `progress`, whose "step" names the file; earlier states then go."""
    path = folder / STATE.format(progress["step"])
    tensors: dict[str, Tensor] = {f"model.{name}": x for name, x in model.named_parameters()}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state[parameter].items():
            tensors[f"optimizer.{name}.{key}"] = value
    save_tensors(tensors, path, {"progress": json.dumps(progress)})
    for old in _states(folder):
        if old != path:
            old.unlink()
    return path


def load_state(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any] | None:
    """Put the last state into the model and the optimiser and return its progress; None where there is none."""
    found = _states(folder)
    if not found:
        return None
    parameters = dict(model.named_parameters())
    with safe_open(found[-1], "pt") as file, torch.no_grad():
        for key in file.keys():  # noqa: SIM118
            kind, name = key.split(".", 1)
            if kind == "model":
                parameters[name].copy_(file.get_tensor(key))
            else:
                name, slot = name.rsplit(".", 1)
                value = file.get_tensor(key)
                # averages live beside their weights; the count of steps does so only where the optimiser keeps it there
                device = parameters[name].device
                optimizer.state[parameters[name]][slot] = value.to(device)
        progress: dict[str, Any] = json.loads(file.metadata()["progress"])
    return progress


def remove_states(folder: Path) -> None:
    """When nothing is left to go on with."""
    for path in _states(folder):
        path.unlink()


def _states(folder: Path) -> list[Path]:
    return sorted(folder.glob(STATE.replace("{:09d}", "?????????")))


def write_json(path: Path, data: Any) -> None:
    with complete(path) as partial:
        partial.write_text(json.dumps(data, indent=1, ensure_ascii=False), encoding="utf-8")


class Log:
    """One JSON object a line, appended as training goes on; what lies past a state that is resumed is cut off."""

    def __init__(self, path: Path, step: int) -> None:
        rows = [row for row in read_log(path) if row["step"] <= step]
        with complete(path) as partial:
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
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return rows
