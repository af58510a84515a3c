"""What Triton compiles kernels for: neither a length, nor a batch, nor a number of heads in the same ratio.

Decoding is an exception where other numbers of heads share a program, and where it chooses blocks.
"""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch

import isentrope as ise
from isentrope.core.compile import HAS_TRITON, TRITON_INTERPRETED

if not HAS_TRITON or TRITON_INTERPRETED:
    pytest.skip("kernels are compiled by Triton alone", allow_module_level=True)

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import make_backend
from triton.runtime.jit import create_function_from_signature

from isentrope.backends.band import backward_kernel
from isentrope.backends.band.gradients import find_query_ranges
from isentrope.core.rotation_kernel import list_strides

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
HOPPER = GPUTarget("cuda", 90, 32)
# batch, heads, key heads, queries, keys; the first of each is compiled for
PROMPTS = [
    (2, 6, 3, 300, 300),
    *((1, 6, 3, n, n) for n in (257, 512, 1000)),
    (16, 6, 3, 272, 272),
    *((1, 2 * heads, heads, 400, 400) for heads in (1, 2, 8, 16)),
]
# sixteen groups of queries or fewer have another kernel
LONG_PROMPTS = [(2, 6, 3, 1000, 1000), (1, 6, 3, 2048, 2048), (5, 6, 3, 999, 999), (1, 32, 16, 1024, 1024)]
CHUNKS = [(2, 6, 3, 100, 300), (1, 6, 3, 64, 512), (1, 32, 16, 129, 777)]
# a program takes four key heads where their number allows it
TOKENS = [
    (2, 8, 4, 1, 300),
    *((1, 8, 4, 1, n) for n in (200, 256, 1000, 4096, 20000)),
    (16, 8, 4, 1, 300),
    *((1, 2 * heads, heads, 1, 400) for heads in (8, 16)),
]
SINKS = "rerope:window=64+share:beta=0.5,reference=64,sinks=4"
CALLS = {
    "rerope": ("rerope:window=64", PROMPTS),
    "rerope, chunks": ("rerope:window=64", CHUNKS),
    "rerope, tokens": ("rerope:window=64", TOKENS),
    "first keys": (SINKS, PROMPTS),
    "first keys, tokens": (SINKS, TOKENS),
    "window": ("rope+window:size=64", PROMPTS),
    "window, tokens": ("rope+window:size=64", TOKENS),
    "infoscale": ("rope+infoscale:train_length=64", PROMPTS),
    "selfextend": ("selfextend:window=64,group=8", PROMPTS),
    "selfextend, tokens": ("selfextend:window=64,group=8", TOKENS),
    "alibi": ("alibi", PROMPTS),
    "retrieve": ("rerope:window=64+retrieve:size=16,blocks=4,queries=8", LONG_PROMPTS),
}


@pytest.fixture
def compiled(monkeypatch):
    """What kernels would be compiled for by the calls so far, without a GPU."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    stand_ins, backend, binders = importlib.import_module("stub_gpu"), make_backend(HOPPER), {}
    keys = set()

    def run(kernel, *arguments, grid, warmup, **options):
        if kernel not in binders:
            binders[kernel] = create_function_from_signature(kernel.signature, kernel.params, backend)
        parameters, kinds, options = binders[kernel](*arguments, **options)
        keys.add((kernel.fn.__name__, *zip(parameters, map(str, kinds), strict=True), *sorted(options.items())))
        return stand_ins.StubKernel(stand_ins.Launches())

    with torch.no_grad(), stand_ins.stub_gpu(), monkeypatch.context() as patch:
        patch.setattr(triton.JITFunction, "run", run)
        yield keys


def make_tensors(batch, heads, kv_heads, queries, keys, size=64):
    """As models have them: query by query."""
    sizes = (heads, queries), (kv_heads, keys), (kv_heads, keys)
    return [torch.randn(batch, n, count, size, dtype=torch.bfloat16).transpose(1, 2) for count, n in sizes]


def list_differences(compiled, known):
    """What is new, argument by argument."""
    seen = {(key[0], part) for key in known for part in key[1:]}
    return [(key[0], [part for part in key[1:] if (key[0], part) not in seen]) for key in compiled - known]


@pytest.mark.parametrize("name", CALLS)
def test_new_shapes_compile_nothing(compiled, name):
    text, shapes = CALLS[name]
    known = None
    for shape in shapes:
        ise.attention(*make_tensors(*shape), text, causal=True)
        known = set(compiled) if known is None else known
        assert known and not list_differences(compiled, known), shape


def test_padded_rows_of_new_shapes_compile_nothing(compiled):
    known = None
    for shape in PROMPTS[:6]:
        lengths = torch.full(shape[:1], shape[-1])
        lengths[0] -= 7
        ise.attention(*make_tensors(*shape), "rerope:window=64", causal=True, lengths=lengths)
        known = set(compiled) if known is None else known
        assert known and not list_differences(compiled, known), shape


def test_a_backward_of_new_shapes_compiles_nothing(compiled):
    known = None
    for batch, heads, kv_heads, queries, keys in PROMPTS:
        q, k, v = make_tensors(batch, heads, kv_heads, queries, keys)
        interval = torch.zeros(1, queries, dtype=torch.int32), torch.arange(1, queries + 1, dtype=torch.int32)[None]
        ranges = find_query_ranges(interval, keys, *backward_kernel.choose_blocks(64, 64)[:2])
        terms = torch.zeros(2, batch, heads, queries)
        backward_kernel.launch(q, k, v, torch.zeros_like(q), terms, 0.125, interval, ranges, q.dtype)
        known = set(compiled) if known is None else known
        assert len(known) == 2 and compiled == known, (batch, heads, queries)


def test_one_row_may_have_any_number_of_entries():
    x = torch.empty(64).as_strided((1, 2, 4, 8), (1 << 33, 8, 16, 1))
    assert list_strides(x, torch.empty(2, 3, 4, 8)) == [0, 8, 16, 96, 32, 8]
