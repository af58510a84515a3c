"""Half-precision weights become float32 on a CPU, unless told otherwise, and that is said once."""

import logging

import pytest
import torch

from isentrope.core import dtypes
from isentrope.core.dtypes import choose_load_dtype


@pytest.fixture(autouse=True)
def _anew():
    dtypes._warn_widened.cache_clear()


@pytest.mark.parametrize(
    ("saved", "requested", "device", "expected"),
    [
        ("bfloat16", None, "cpu", torch.float32),
        (torch.float16, None, torch.device("cpu"), torch.float32),
        (None, None, "cpu", torch.float32),
        (torch.float64, None, "cpu", "auto"),
        ("torch.float32", None, "cpu", "auto"),
        (torch.bfloat16, None, "cuda:0", "auto"),
        (torch.bfloat16, "auto", "cpu", "auto"),
        (torch.bfloat16, "float16", "cpu", torch.float16),
        (torch.float32, torch.bfloat16, "cpu", torch.bfloat16),
    ],
)
def test_cpu_dtype(saved, requested, device, expected):
    assert choose_load_dtype(saved, requested, device) == expected


@pytest.mark.parametrize(("there", "expected"), [(True, "auto"), (False, torch.float32)])
def test_a_model_that_may_still_move_stays_narrow_where_there_is_an_accelerator(monkeypatch, there, expected):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: there)
    assert choose_load_dtype(torch.bfloat16, None) == expected


def test_it_is_said_once(caplog):
    with caplog.at_level(logging.WARNING, "isentrope"):
        for _ in range(3):
            choose_load_dtype(torch.bfloat16, None, "cpu")
        choose_load_dtype(torch.bfloat16, torch.bfloat16, "cpu")
        choose_load_dtype(torch.float32, None, "cpu")
    assert caplog.messages == ["weights are bfloat16; using float32 on this CPU (dtype bfloat16 keeps them)"]


def test_an_unknown_dtype():
    with pytest.raises(ValueError, match="dtype: expected a dtype of torch such as float32 or bfloat16, got 'half8'"):
        choose_load_dtype(None, "half8", "cpu")
