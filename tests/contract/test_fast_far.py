"""The kernels that only a GPU has, with laws for near and far keys, against the dense reference."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from isentrope.backends.band.corner import split_corner
from isentrope.builder import Inputs, build_call
from isentrope.core.region import Span
from isentrope.functional import attention
from tests.contract.matrix import Setting
from tests.contract.test_fast import (
    FEWER,
    HALVES,
    LARGE,
    NARROW,
    ROWS,
    SQUARE,
    check_band,
    check_decoding,
    check_gradients,
    error,
    hopper,
    interprets,
    recipe_of,
    shortened,
)
from tests.fixtures.turns import first_of, in_turns

TABLE = "(0.3,-0.2,0,0.2,0.1,-0.3)"  # half precision rounds what a larger τ multiplies
FAR_LAWS = (
    "rerope:window=24+logn:train_length=16,keys=far+share:beta=0.5,reference=8",
    f"leakyrerope:window=24,leak=4+power:train_length=16,gamma={TABLE},keys=far+share:beta={TABLE},reference=4",
    "selfextend:window=24,group=4+infoscale:train_length=16,keys=near+share:beta=1,reference=30,count=visible",
    "dpe:window=24,scales=(1,4,2)+logn:train_length=16,keys=far+share:beta=0.5,reference=8",
    "rerope:window=24+cosine:alpha=16+logn:train_length=64,keys=near+ssmax:heads=6,bias=True,keys=far+share:beta=-0.5",
)
# positions that depend on the length; the tail of LaMPE is a third branch, which few queries see
BY_LENGTH = (
    "selfextend:window=24,reach=0.5,train_length=64",
    "jetlong:window=24,train_length=32+share:beta=0.5,reference=8",
    f"lampe:window=8,tail=0,train_length=64+share:beta={TABLE},reference=8",
    "lampe:window=8,tail=6,train_length=64+logn:train_length=16,keys=far+share:beta=0.5",
)
# first keys that are spared, a branch of their own; far keys that are the sinks of LM-Infinite alone
FIRST = (
    "rerope:window=24+share:beta=0.7,reference=4,sinks=4",
    f"selfextend:window=24,group=4+logn:train_length=16,keys=far+share:beta={TABLE},reference=4,sinks=5",
    "rerope:window=24+cosine:alpha=16+logn:train_length=64,keys=near+share:beta=1,reference=9,count=visible,sinks=1",
)
SINKS = (
    "rerope:window=24+lambda:sinks=5,window=24+logn:train_length=16,keys=far+share:beta=1,reference=1",
    f"rerope:window=24+lambda:sinks=40,window=24+logn:train_length=16,keys=near+share:beta={TABLE},reference=2",
)
INTERPRETED = FAR_LAWS[1:] + SINKS[:1] + FIRST


@interprets
@pytest.mark.parametrize(("text", "rows", "dtype"), in_turns(INTERPRETED, HALVES), ids=str)
def test_decoding_near_and_far_keys_interpreted(text, rows, dtype):
    check_decoding(text, rows, dtype, "cpu")


@interprets
@pytest.mark.parametrize(
    "text", first_of(6, FAR_LAWS[1:4] + SINKS[:1] + FIRST[1:] + FAR_LAWS[::4] + SINKS[1:] + FIRST[:1])
)
def test_band_of_near_and_far_keys_interpreted(text):
    check_band(text, True, shortened(SQUARE, text), torch.float32, "cpu")


@interprets
@pytest.mark.parametrize("text", BY_LENGTH[::3])
def test_band_of_maps_by_length_interpreted(text):
    check_band(text, True, shortened(SQUARE, text), torch.float32, "cpu")


def test_few_queries_see_the_corner():
    q, k, v = SQUARE.tensors(torch.float32)
    call = build_call(Inputs(q, k, v, causal=True), recipe_of("lampe:window=32,tail=6,train_length=256"))
    most, last = split_corner(call)
    assert (most.q.shape[2] + last.q.shape[2], most.k.shape[2], last.k.shape[2]) == (333, most.q.shape[2], 333)
    assert [len(part.branches) for part in (call, most, last)] == [3, 2, 3] and 6 <= last.q.shape[2] < 24
    near, far = (branch.region.spans for branch in most.branches)
    assert near == (Span(low=-31, high=1),) and far == (Span(high=-31),)
    assert split_corner(most) is None and split_corner(last) is None


@interprets
@pytest.mark.parametrize("text", BY_LENGTH[1::2])
def test_decoding_maps_by_length_interpreted(text):
    for rows in ("", "lengths"):
        check_decoding(text, rows, torch.float32, "cpu")


@interprets
def test_band_of_fewer_queries_interpreted():
    for text in SINKS:
        check_band(text, True, shortened(FEWER, text), torch.float32, "cpu")


@interprets
@pytest.mark.parametrize("text", first_of(3, FAR_LAWS[:1] + FIRST[1:] + FAR_LAWS[1:2] + FIRST[:1]))
def test_band_backward_of_near_and_far_keys_interpreted(text):
    check_gradients(text, shortened(NARROW, text), True, torch.float32, "cpu", "band")


@interprets
@pytest.mark.parametrize("length", first_of(2, [28, 29, 25, 63]))
def test_band_backward_where_first_keys_are_most_of_the_far_ones_interpreted(length):
    """One query sees a far key, or the first keys are all of them, or there are a few more."""
    setting = Setting(length, length, batch=2, heads=6, kv_heads=2, d=64, dv=64)
    call = build_call(Inputs(*setting.tensors(torch.float32), causal=True), recipe_of(FIRST[0]))
    far = len(call.branches) == 3
    assert far == (length > 28)
    check_gradients(FIRST[0], setting, True, torch.float32, "cpu", "band" if far else "sdpa")


class LearnedShare(torch.nn.Module):
    def __init__(self, device):
        super().__init__()
        self.beta = torch.nn.Parameter(torch.linspace(-0.5, 1.5, 6, device=device))

    def bias(self, n_far):
        return -self.beta.to(n_far.dtype)[:, None] * n_far.log()


def check_learned_share(backend, setting, dtype, device):
    q, k, v = setting.tensors(dtype, device)
    share = LearnedShare(device)
    recipe = replace(recipe_of("rerope:window=24+logn:train_length=16,keys=far"), share=share)
    grads = []
    for kind, name in ((dtype, backend), (torch.float64, "reference")):
        inputs = [x.to(kind).requires_grad_() for x in (q, k, v)]
        out = attention(*inputs, recipe, causal=True, backend=name)
        weights = torch.linspace(0.5, 1.5, out.numel(), device=device, dtype=torch.float64).view_as(out)
        grads.append(torch.autograd.grad((out.double() * weights).sum(), (*inputs, share.beta)))
    near = 2e-4 if dtype == torch.float32 else 4e-2
    for ours, truth in zip(*grads, strict=True):
        assert error(ours, truth.double()) < near


@interprets
def test_beta_is_learned_through_the_interpreted_band():
    check_learned_share("band", shortened(NARROW, "heads=6"), torch.float32, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", ["", "lengths", "left"])
@pytest.mark.parametrize("text", FAR_LAWS + SINKS + BY_LENGTH + FIRST)
def test_decoding_near_and_far_keys(text, rows, dtype):
    check_decoding(text, rows, dtype, "cuda")


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize("text", FAR_LAWS + SINKS + BY_LENGTH + FIRST)
def test_band_of_near_and_far_keys(text):
    for setting in (SQUARE, NARROW, LARGE, *((FEWER,) if text in SINKS else ())):
        check_band(text, True, setting, torch.bfloat16, "cuda")


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize("text", FAR_LAWS + FIRST)
def test_band_backward_of_near_and_far_keys(text):
    for setting in (SQUARE, LARGE):
        check_gradients(text, setting, True, torch.bfloat16, "cuda", "band")


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("backend", ["sdpa", "flex", "chunked", "dense"])
@pytest.mark.parametrize("text", FAR_LAWS + SINKS + FIRST)
def test_near_and_far_keys_forward_and_backward(text, backend, causal):
    for setting in ROWS[:1] if backend == "flex" else ROWS:
        check_gradients(text, setting, causal, torch.bfloat16, "cuda", backend)


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize("backend", ["sdpa", "band", "flex", "chunked", "dense"])
def test_beta_is_learned(backend):
    check_learned_share(backend, SQUARE, torch.bfloat16, "cuda")


@pytest.mark.gpu
@hopper
def test_laws_for_near_and_far_keys_go_where_the_method_goes():
    q, k, v = Setting(300, 300, heads=6, d=64, dv=64).tensors(torch.bfloat16, "cuda")
    for text in (FAR_LAWS[0], *SINKS):
        assert attention(q, k, v, text, causal=True, return_lse=True)[1].backend == "band"
    assert attention(q[:, :, :1], k, v, FAR_LAWS[0], causal=True, return_lse=True)[1].backend == "decode"


@pytest.mark.gpu
@hopper
def test_inside_the_training_length_kernels_change_nothing():
    """Bit for bit: τ = 1 and a bias of 0, in band, decode and their backward."""
    law = "logn:train_length=400,keys=far+share:beta=2"
    for queries in (333, 1):
        tensors = Setting(queries, 333, heads=6, d=64, dv=64).tensors(torch.bfloat16, "cuda")
        results = []
        for text in ("rerope:window=24", f"rerope:window=24+{law}"):
            q, k, v = (x.detach().clone().requires_grad_(queries > 1) for x in tensors)
            out, aux = attention(q, k, v, text, causal=True, return_lse=True)
            grads = torch.autograd.grad(out.float().square().sum(), (q, k, v)) if queries > 1 else ()
            results.append((aux.backend, out.detach(), aux.lse, *grads))
        assert results[0][0] == results[1][0]
        for plain, law_result in zip(results[0][1:], results[1][1:], strict=True):
            assert torch.equal(plain, law_result)
