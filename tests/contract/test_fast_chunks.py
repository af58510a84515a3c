"""Regions of whole chunks on the kernels that only a GPU has, against the dense reference."""

from __future__ import annotations

import pytest
import torch

from isentrope.functional import attention
from tests.contract.matrix import Setting
from tests.contract.test_fast import HALVES, NARROW, check_decoding, check_gradients, error, interprets, recipe_of
from tests.fixtures.turns import in_turns

CHUNKS = (
    "dualchunk:chunk=40,local=8",
    "dualchunk:chunk=40,local=20+cosine:alpha=16+infoscale:train_length=16",
    "dualchunk:chunk=24+logn:train_length=16,keys=far+share:beta=0.5,reference=8",
    "dualchunk:chunk=40,local=8+sink:sinks=3,size=20",
    "string:shift=24,local=5+infoscale:train_length=16",
)
ROWS = (
    Setting(333, 333, heads=6, d=64, dv=64),
    Setting(333, 333, batch=1, heads=6, d=64, dv=64),
    Setting(77, 200, heads=6, kv_heads=6, d=64, dv=32),
    Setting(130, 130, batch=1, heads=6, d=40, dv=40),
)


@interprets
@pytest.mark.parametrize(("text", "rows", "dtype"), in_turns(CHUNKS, HALVES), ids=str)
def test_decoding_chunks_interpreted(text, rows, dtype):
    check_decoding(text, rows, dtype, "cpu")


@interprets
@pytest.mark.parametrize(("text", "causal"), in_turns(CHUNKS[:3], [True, False]))
def test_merged_chunks_interpreted(text, causal):
    """Rectangles of several sizes, with an offset or none, merged by one kernel."""
    grouped = Setting(90, 90, heads=2, kv_heads=1, d=32, dv=40)
    for setting in (grouped, Setting(77, 130, batch=1, heads=2, kv_heads=2, d=40, dv=24)):
        q, k, v = setting.tensors(torch.float32)
        out, aux = attention(q, k, v, recipe_of(text), causal=causal, backend="sdpa", return_lse=True)
        exact = attention(q, k, v, recipe_of(text), causal=causal, backend="reference", return_lse=True)
        assert error(out, exact[0].double()) < 5e-6 and error(aux.lse, exact[1].lse.double()) < 5e-6


@interprets
@pytest.mark.parametrize("causal", [True, False])
def test_chunks_are_not_for_the_band_kernel(causal):
    q, k, v = NARROW.tensors(torch.float32)
    for text in CHUNKS[:4]:
        with pytest.raises(ValueError, match="whole rows that see a window"):
            attention(q, k, v, recipe_of(text), causal=causal, backend="band")
        assert attention(q, k, v, recipe_of(text), causal=causal, return_lse=True)[1].backend != "band"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", ["", "lengths", "left"])
@pytest.mark.parametrize("text", CHUNKS)
def test_decoding_chunks(text, rows, dtype):
    check_decoding(text, rows, dtype, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("setting", ROWS, ids=str)
@pytest.mark.parametrize("text", CHUNKS)
def test_chunks_forward_and_backward(text, setting, causal):
    for dtype in (torch.float32, torch.bfloat16):
        check_gradients(text, setting, causal, dtype, "cuda", "sdpa")
    check_gradients(text, setting, causal, torch.bfloat16, "cuda", "flex")


@pytest.mark.gpu
def test_chunks_go_to_fused_kernels():
    q, k, v = Setting(300, 300, d=64, dv=64).tensors(torch.bfloat16, "cuda")
    for grad in (False, True):
        q.requires_grad_(grad)
        for text in CHUNKS[:3]:
            assert attention(q, k, v, text, causal=True, return_lse=True)[1].backend == "sdpa"
    padded = attention(q, k, v, CHUNKS[0], causal=True, lengths=[300, 200], return_lse=True)[1]
    assert padded.backend == "flex"  # with gradients


@pytest.mark.gpu
def test_memory_of_chunks_is_linear():
    """A mask of these rows alone would take 16 GiB."""
    q, k, v = (torch.randn(1, heads, 131_072, 64, device="cuda", dtype=torch.bfloat16) for heads in (8, 2, 2))
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with torch.no_grad():
        attention(q, k, v, "dualchunk:chunk=6144", causal=True)
    assert torch.cuda.max_memory_allocated() - before < 4 << 30
