"""Calls on the kernel for Hopper, whose launches are worked out once: what they pass, without a GPU."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

import isentrope as ise
from isentrope.builder import Inputs, build_call
from isentrope.core import switches
from isentrope.core.compile import HAS_TRITON, TRITON_INTERPRETED
from isentrope.core.switches import BAND_SPANS

if not HAS_TRITON or TRITON_INTERPRETED:
    pytest.skip("kernels are compiled by Triton alone", allow_module_level=True)

import triton
from triton.compiler import CompiledKernel

from isentrope.backends.band.copy_engine import describe_blocks

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
KEYS, HEADS, KV_HEADS = 96, 4, 2
RECIPES = (
    "rope+window:size=40",
    "rerope:window=24",
    "selfextend:window=24,group=4+cosine:alpha=16",
    "rerope:window=24+logn:train_length=16,keys=far+share:beta=0.5,reference=8",
)


class Launched(NamedTuple):
    """A launch as a kernel receives it: bound by Triton, or passed to a kernel compiled before."""

    name: str
    grid: Any
    arguments: tuple[Any, ...]
    bound: bool


class Compiled(CompiledKernel):
    """A compiled kernel that notes its launches."""

    def __init__(self, name: str, launches: list[Launched]) -> None:
        self.module, self.kernel_name, self.launches = None, name, launches

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *arguments: self.launches.append(Launched(self.kernel_name, grid, arguments, bound=False))


@pytest.fixture
def launches(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    stub_gpu = importlib.import_module("stub_gpu").stub_gpu
    noted: list[Launched] = []

    def run(kernel, *arguments, grid, warmup, **options):
        name = kernel.fn.__name__
        noted.append(Launched(name, grid, (*arguments, *(options[x] for x in kernel.arg_names if x in options)), True))
        return Compiled(name, noted)

    # undone in this order: the stand-in has a `run` of its own
    with stub_gpu(one_pass=True), patch.object(triton.JITFunction, "run", run), torch.no_grad():
        yield noted


def make_tensors(queries: int = KEYS, size: int = 64, shift: int = 0) -> tuple[Tensor, ...]:
    """Tensors that begin so many entries after an aligned address."""
    sizes = (HEADS, queries), (KV_HEADS, KEYS), (KV_HEADS, KEYS)
    return tuple(
        torch.randn(heads * n * size + shift, dtype=torch.bfloat16)[shift:].view(1, heads, n, size)
        for heads, n in sizes
    )


def take(launches: list[Launched]) -> list[Launched]:
    """Return the launches so far, and forget them."""
    taken = list(launches)
    launches.clear()
    return taken


def assert_alike(bound: Launched, direct: Launched, known: set[int]) -> None:
    """Assert that a direct launch passes what Triton would be given: other addresses only where tensors are new."""

    def name_address(address: int) -> int | str:
        return address if address in known else "new"

    assert (bound.name, bound.grid, len(bound.arguments)) == (direct.name, direct.grid, len(direct.arguments))
    for expected, actual in zip(bound.arguments, direct.arguments, strict=True):
        if isinstance(expected, Tensor):
            assert name_address(expected.data_ptr()) == name_address(actual)
        elif hasattr(expected, "block_shape"):
            assert type(expected) is type(actual) and expected.base.dtype == actual.base.dtype
            assert name_address(expected.base.data_ptr()) == name_address(actual.base.data_ptr())
            kinds = [{key: value for key, value in vars(x).items() if key != "base"} for x in (expected, actual)]
            assert kinds[0] == kinds[1]
        else:
            assert type(expected) is type(actual) and expected == actual


@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("queries", [KEYS, 50])
@pytest.mark.parametrize("text", RECIPES)
def test_repeated_calls_pass_what_the_first_has_bound(text, queries, size, launches):
    recipe = ise.Recipe.parse(text)
    for entropy in (False, True):
        q, k, v = tensors = make_tensors(queries, size)
        calls = []
        for _ in range(4):
            ise.attention(q, k, v, recipe, causal=True, return_entropy=entropy)
            calls.append(take(launches))
        branches = build_call(Inputs(q, k, v, causal=True), recipe.resolve()).branches
        fixed = [x for b in branches for x in (*(b.query_angles or ()), *(b.key_angles or ()), b.tau, b.offset)]
        known = {x.data_ptr() for x in (*tensors, *fixed) if x is not None}
        assert "_attend_spans" in {launch.name for launch in calls[0]}
        assert all(launch.bound for launch in calls[0] if launch.name == "_attend_spans")
        for repeated in calls[1:]:
            assert not any(launch.bound for launch in repeated)
            for first, launch in zip(calls[0], repeated, strict=True):
                if first.bound:
                    assert_alike(first, launch, known)


def test_each_call_passes_its_own_tensors(launches):
    """Queries, keys and values of the same layout, whatever the call before had."""
    for _ in range(4):
        q, k, v = make_tensors()
        ise.attention(q, k, v, "rerope:window=24", causal=True)
        rotation, attention = take(launches)
    assert not attention.bound and rotation.arguments[0] == k.data_ptr()
    assert attention.arguments[:3] == (q.data_ptr(),) * 3
    near, far, unused, values = attention.arguments[3:7]
    assert near.base.data_ptr() == rotation.arguments[1] and far.base is k and unused is near and values.base is v


def test_tensors_that_are_not_aligned_are_bound_for_themselves(launches):
    for _ in range(3):
        ise.attention(*make_tensors(), "rerope:window=24", causal=True)
    take(launches)
    q, k, v = make_tensors(shift=1)
    for bound in (True, False):
        ise.attention(q, k, v, "rerope:window=24", causal=True)
        rotation, attention = take(launches)
        assert attention.bound == rotation.bound == bound  # the second time they are known
        bases = [x.base for x in attention.arguments if hasattr(x, "block_shape")]
        assert all(x.data_ptr() % 16 == 0 for x in bases) and torch.equal(bases[-1], v)


def test_what_changes_between_calls_is_not_taken_for_the_same(launches, monkeypatch):
    """Switches, gradients, sizes and memory order."""
    recipe, (q, k, v) = ise.Recipe.parse("rerope:window=24"), make_tensors()

    def attend(*tensors):
        ise.attention(*tensors, recipe, causal=True)
        return [launch.name for launch in take(launches)]

    for _ in range(3):
        assert attend(q, k, v)[-1] == "_attend_spans"
    with monkeypatch.context() as patched:
        patched.setattr(switches, "_on", switches.list_switches() - {BAND_SPANS})
        assert "_attend_spans" not in attend(q, k, v)
    assert attend(q, k, v)[-1] == "_attend_spans"
    rows = [torch.cat((x, x)) for x in (q, k, v)]
    ise.attention(*rows, recipe, causal=True)
    assert take(launches)[-1].grid == (HEADS * 2, 1, 1)
    turned = q.transpose(1, 2).contiguous().transpose(1, 2)
    ise.attention(turned, k, v, recipe, causal=True)
    (attention,) = (launch for launch in take(launches) if launch.name == "_attend_spans")
    assert attention.bound  # other strides
    with torch.enable_grad():  # the forward that a backward follows has folded queries
        ise.attention(q.clone().requires_grad_(), k, v, recipe, causal=True)
    (attention,) = (launch for launch in take(launches) if launch.name == "_attend_spans")
    addresses = [x.data_ptr() if isinstance(x, Tensor) else x for x in attention.arguments[:2]]
    assert addresses[0] != addresses[1]


def test_nothing_keeps_the_tensors_of_a_call(launches):
    references = []
    for _ in range(3):
        tensors = make_tensors()
        references = [torch._C._storage_Use_Count(x.untyped_storage()._cdata) for x in tensors]
        ise.attention(*tensors, "rerope:window=24", causal=True)
        launches.clear()
        assert references == [torch._C._storage_Use_Count(x.untyped_storage()._cdata) for x in tensors]


def test_blocks_are_described_as_triton_checks_them():
    """By a template without its tensor, which differs by shape, strides, dtype and rows."""
    for shape in ((1, 2, 96, 64), (2, 2, 96, 64), (1, 2, 50, 128)):
        x = torch.randn(shape, dtype=torch.bfloat16)
        for tensor in (x, x.transpose(1, 2).contiguous().transpose(1, 2), x.half()):
            for rows in (64, 128):
                for swizzled in (False, True):
                    for _ in range(2):
                        blocks = describe_blocks(tensor, rows, swizzled)
                        assert blocks.base is tensor and list(blocks.shape) == list(shape)
                        assert blocks.block_shape == [1, 1, rows, shape[-1]]
                        assert list(blocks.strides[1:]) == list(tensor.stride()[1:])
                        blocks.__post_init__()  # what Triton itself checks
    odd = torch.randn(1, 2, 96, 65, dtype=torch.bfloat16)[..., :64]  # strides of no multiple of 16 bytes
    copied = describe_blocks(odd, 64)
    assert copied.base is not odd and torch.equal(copied.base, odd) and list(copied.strides)[2] == 64
    assert describe_blocks(odd, 64).base is not copied.base
    apart = torch.randn(1, 2, 64, 64, 2, dtype=torch.float16)[..., 0]  # whose vectors the engine cannot read
    assert torch.equal(describe_blocks(apart, 64).base, apart) and describe_blocks(apart, 64).base is not apart
