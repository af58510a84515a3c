"""Kernels that only a GPU has, with τ of each query and head from its entropy, and scores by distance."""

from __future__ import annotations

import pytest
import torch

from isentrope.functional import attention
from tests.contract.matrix import Setting
from tests.contract.test_fast import (
    NARROW,
    SQUARE,
    check_band,
    check_decoding,
    check_gradients,
    error,
    hopper,
    interprets,
    shortened,
)

LAW = "adaptive:coefficients=(0.2,0.4)"  # above 1 at every entropy of such many keys
ADAPTIVE = (
    f"rope+{LAW}",
    f"rerope:window=24+{LAW}+share:beta=0.5,reference=8",
    f"leakyrerope:window=24,leak=4+{LAW},keys=far+logn:train_length=16,keys=near",
)
SINKS = f"rerope:window=24+lambda:sinks=5,window=24+{LAW}"
BY_DISTANCE = (
    "rope+scaleinvariant",
    "rerope:window=24+scaleinvariant:distance=4+share:beta=0.5,reference=8",
    "alibi+scaleinvariant",
    f"selfextend:window=24,group=4+scaleinvariant:keys=near+{LAW},keys=far",
)


@interprets
@pytest.mark.parametrize("rows", ["", "lengths"])
@pytest.mark.parametrize("text", ADAPTIVE[:2])
def test_decoding_adaptive_interpreted(text, rows):
    check_decoding(text, rows, torch.float32, "cpu")


@interprets
@pytest.mark.parametrize("text", [ADAPTIVE[1], SINKS])
def test_band_adaptive_interpreted(text):
    check_band(text, True, shortened(SQUARE, text), torch.float32, "cpu")


@interprets
def test_band_backward_adaptive_interpreted():
    check_gradients(ADAPTIVE[2], shortened(NARROW, ADAPTIVE[2]), True, torch.float32, "cpu", "band")


@pytest.mark.gpu
@pytest.mark.parametrize("rows", ["", "lengths", "left"])
@pytest.mark.parametrize("text", [*ADAPTIVE, SINKS])
def test_decoding_adaptive(text, rows):
    check_decoding(text, rows, torch.float32, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["sdpa", "chunked", "dense"])
@pytest.mark.parametrize("text", ADAPTIVE)
def test_adaptive_forward_and_backward(text, backend):
    for causal in (True, False):
        check_gradients(text, SQUARE, causal, torch.float32, "cuda", backend)


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize("text", [*ADAPTIVE[1:], SINKS])
def test_adaptive_in_half_precision(text):
    """τ is off by what the entropy is: a few hundredths."""
    q, k, v = SQUARE.tensors(torch.bfloat16, "cuda")
    out, aux = attention(q, k, v, text, causal=True, return_lse=True)
    truth = attention(q.double(), k.double(), v.double(), text, causal=True, backend="reference")
    assert aux.backend == "band" and error(out, truth) < 6e-2


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["flex", "chunked", "dense"])
@pytest.mark.parametrize("text", BY_DISTANCE)
def test_by_distance_forward_and_backward(text, backend):
    if "adaptive" not in text:
        check_gradients(text, SQUARE, True, torch.bfloat16, "cuda", backend)
    if backend != "flex":
        check_gradients(text, SQUARE, False, torch.float32, "cuda", backend)
        check_gradients(text, Setting(1, 700, heads=6, d=64, dv=64), True, torch.float32, "cuda", backend)


@pytest.mark.gpu
def test_scores_by_distance_go_where_they_are_fastest():
    q, k, v = SQUARE.tensors(torch.bfloat16, "cuda")
    for text in BY_DISTANCE:
        assert attention(q, k, v, text, causal=True, return_lse=True)[1].backend == "flex"
        assert attention(q[:, :, :1], k, v, text, causal=True, return_lse=True)[1].backend == "dense"
