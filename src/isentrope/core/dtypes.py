"""Choose dtypes: of intermediate results, and of the weights a model is loaded with."""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager, nullcontext
from functools import cache

import torch
from torch import Tensor

logger = logging.getLogger("isentrope")
HALF = (torch.bfloat16, torch.float16)
AUTOCASTING_DEVICES = ("cpu", "cuda", "mps", "xpu")
UNDECIDED_DEVICES = ("auto", "balanced", "balanced_low_0", "sequential")  # of device_map, left to accelerate


def accumulation_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of temperatures, angles and sums over x: fp64 for fp64, else fp32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x in a dtype; where it has that, a graph traces no operation."""
    return x if x.dtype == dtype else x.to(dtype)


def autocast_disabled(x: Tensor) -> AbstractContextManager[object]:
    """Return a context without autocast on x's device: it would round what is kept in fp32 on purpose."""
    kind = x.device.type
    return nullcontext() if get_autocast_dtype(kind) is None else torch.autocast(kind, enabled=False)


def get_autocast_dtype(device: str) -> torch.dtype | None:
    """Return the dtype of autocast on a kind of device, None where it is off."""
    if device not in AUTOCASTING_DEVICES or not torch.is_autocast_enabled(device):
        return None
    return torch.get_autocast_dtype(device)


def choose_load_dtype(
    saved: torch.dtype | str | None, requested: torch.dtype | str | None, device: torch.device | str | None = None
) -> torch.dtype | str:
    """Choose the dtype to load weights in: as requested, else as saved, but float32 for half precision on a CPU.

    CPUs without half-precision instructions are up to sixty times slower in it than in float32. The change is logged
    once, on the logger `isentrope`.

    Args:
        saved: dtype of the weights (`config.dtype`, or `pretrained.saved_dtype`); None if unknown.
        requested: the caller's choice, which takes precedence; "auto" means as saved, None no choice.
        device: where the model runs; None or a word such as "auto" if undecided, which counts as a CPU where there is
            no accelerator.

    Returns:
        A dtype or "auto", for the `dtype=` of `from_pretrained`.
    """
    if requested is not None:
        return "auto" if requested == "auto" else parse_dtype(requested)
    if not _runs_on_cpu(device):
        return "auto"
    saved = None if saved in (None, "auto") else parse_dtype(saved)
    if saved is None or saved in HALF:
        if saved is not None:
            _warn_widened(str(saved).removeprefix("torch."))
        return torch.float32
    return "auto"


def parse_dtype(name: torch.dtype | str | None) -> torch.dtype:
    """Return the dtype with this name, which may begin with `torch.`.

    Raises:
        ValueError: torch has no such dtype.
    """
    dtype = name if isinstance(name, torch.dtype) else getattr(torch, str(name).removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"dtype: expected a dtype of torch such as float32 or bfloat16, got {name!r}")
    return dtype


def _runs_on_cpu(device: torch.device | str | None) -> bool:
    if device is None or device in UNDECIDED_DEVICES:
        return not torch.accelerator.is_available()
    return torch.device(device).type == "cpu"


@cache
def _warn_widened(name: str) -> None:
    logger.warning("weights are %s; using float32 on this CPU (dtype %s keeps them)", name, name)


def lengths_as_float(n: Tensor | float) -> Tensor:
    """Return n as a float tensor, fp32 or wider."""
    n = torch.as_tensor(n)
    return n.to(accumulation_dtype(n))
