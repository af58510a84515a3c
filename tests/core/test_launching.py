"""Launches that run a kernel compiled before: only where Triton would have chosen the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from isentrope.core.caching import clear_caches
from isentrope.core.compile import HAS_TRITON, TRITON_INTERPRETED

if not HAS_TRITON or TRITON_INTERPRETED:
    pytest.skip("kernels are compiled by Triton alone", allow_module_level=True)

import triton
import triton.language as tl
from triton.compiler import CompiledKernel
from triton.tools.tensor_descriptor import TensorDescriptor

from isentrope.core import launching
from isentrope.core.launching import RepeatedLaunch, launch_kernel, next_power_of_2

GRID = (2, 3, 1)


@triton.jit
def _kernel(x, y, rows, scale, SIZE: tl.constexpr, FLAG: tl.constexpr):
    pass


class Compiled(CompiledKernel):
    """A compiled kernel that notes its launches."""

    def __init__(self) -> None:
        self.module, self.launches = None, []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *arguments: self.launches.append((grid, arguments))


@pytest.fixture
def bound(monkeypatch):
    """Launches that Triton binds, each with a kernel of its own."""
    clear_caches(keep_compiled=True)
    launches: list[Compiled] = []

    def run(kernel, *arguments, grid, **options):
        launches.append(Compiled())
        return launches[-1]

    monkeypatch.setattr(triton.JITFunction, "run", run)
    yield launches
    clear_caches(keep_compiled=True)


def launch(x, y, rows=16, scale=0.5, size=8, flag=True, **options):
    launch_kernel(_kernel, GRID, (x, y), (rows, scale), {"SIZE": size, "FLAG": flag}, options or None)


def test_the_same_launch_runs_the_compiled_kernel_with_all_arguments(bound):
    first, second, y = torch.zeros(64), torch.zeros(64), torch.zeros(64)
    launch(first, y)
    launch(second, y, num_warps=4)  # another kernel
    launch(second, y)
    assert len(bound) == 2 and not bound[1].launches
    ((grid, arguments),) = bound[0].launches
    assert grid == GRID and arguments == (second.data_ptr(), y.data_ptr(), 16, 0.5, 8, True)


@pytest.mark.parametrize(
    "change",
    [{"rows": 17}, {"rows": 1}, {"rows": 32}, {"rows": 1 << 40}, {"scale": 0.25}, {"size": 16}, {"flag": False}],
    ids=str,
)
def test_other_numbers_and_constants_are_bound_anew(bound, change):
    x = torch.zeros(64)
    launch(x, x)
    launch(x, x, **change)
    assert len(bound) == 2


def test_other_dtypes_and_alignments_are_bound_anew(bound):
    x = torch.zeros(64)
    assert x.data_ptr() % launching.ALIGNMENT_BYTES == 0
    pairs = [(x, x), (x.half(), x), (x, x.half()), (x[1:], x), (x, x[1:]), (x[1:], x[1:])]
    for pair in pairs:
        launch(*pair)
    assert len(bound) == len(pairs)
    for a, b in pairs:  # and are then known, wherever exactly they begin
        launch(a, b if b.data_ptr() % 16 == 0 else b[1:])
    assert len(bound) == len(pairs)


def test_blocks_of_another_shape_or_dtype_are_bound_anew(bound):
    x = torch.zeros(4, 64)
    for data, block in ((x, 16), (x, 32), (x.half(), 16)):
        launch(x, TensorDescriptor(data, [4, 64], [64, 1], [1, block]))
    assert len(bound) == 3
    launch(x, TensorDescriptor(torch.zeros(8, 64), [8, 64], [64, 1], [1, 16]))
    assert len(bound) == 3 and len(bound[0].launches) == 1


def test_tuples_of_tensors_are_bound_by_what_is_in_them(bound):
    x, y = torch.zeros(64), torch.zeros(64)
    for parts in ((x,), (x, y), (x, y.half()), (x, y[1:])):
        launch(x, parts)
    assert len(bound) == 4
    launch(y, (y, x))
    assert len(bound) == 4 and bound[1].launches[0][1][:2] == (y.data_ptr(), (y.data_ptr(), x.data_ptr()))


def test_hooks_see_every_launch(bound, monkeypatch):
    x = torch.zeros(64)
    launch(x, x)
    monkeypatch.setattr(_kernel, "pre_run_hooks", [print])
    launch(x, x)
    assert len(bound) == 2


def test_known_launches_are_bounded_and_cleared(bound, monkeypatch):
    monkeypatch.setattr(launching, "MAX_LAUNCHES", 4)
    x = torch.zeros(64)
    for rows in range(11):
        launch(x, x, rows=rows)
        assert len(launching._known) <= 4
    clear_caches(keep_compiled=True)
    assert not launching._known


def test_constants_in_another_order_are_refused(bound):
    x = torch.zeros(64)
    with pytest.raises(AssertionError, match="order"):
        launch_kernel(_kernel, GRID, (x, x), (16, 0.5), {"FLAG": True, "SIZE": 8})


def test_a_repeated_launch_runs_the_compiled_kernel_with_all_arguments(bound):
    x, y, fixed = torch.zeros(64), torch.zeros(64), torch.zeros(64)
    repeated = RepeatedLaunch(_kernel, GRID, (fixed,), (16, 0.5), {"SIZE": 8, "FLAG": True})
    listed = []
    for tensor in (x, y, x[1:], y):  # one is not aligned, and bound for itself
        repeated.run((tensor.data_ptr(),), lambda: listed.append(tensor) or (tensor,))  # noqa: B023
    assert len(bound) == 2 and [t.data_ptr() for t in listed] == [x.data_ptr(), x[1:].data_ptr()]
    assert not bound[1].launches
    rest = (fixed.data_ptr(), 16, 0.5, 8, True)
    assert bound[0].launches == [(GRID, (y.data_ptr(), *rest))] * 2


def test_a_repeated_launch_takes_blocks_beside_addresses(bound):
    x, y = torch.zeros(4, 64), torch.zeros(4, 64)
    repeated = RepeatedLaunch(_kernel, GRID, (), (16, 0.5), {"SIZE": 8, "FLAG": True})
    blocks = [TensorDescriptor(data, [4, 64], [64, 1], [1, 16]) for data in (x, y)]
    for data, block in zip((x, y), blocks, strict=True):
        repeated.run((data.data_ptr(), block), lambda: (data, block), (data.data_ptr(),))  # noqa: B023
    assert len(bound) == 1 and bound[0].launches == [(GRID, (y.data_ptr(), blocks[1], 16, 0.5, 8, True))]


def test_hooks_see_repeated_launches(bound, monkeypatch):
    x = torch.zeros(64)
    repeated = RepeatedLaunch(_kernel, GRID, (x,), (16, 0.5), {"SIZE": 8, "FLAG": True})
    for _ in range(2):
        repeated.run((x.data_ptr(),), lambda: (x,))
    monkeypatch.setattr(_kernel, "pre_run_hooks", [print])
    repeated.run((x.data_ptr(),), lambda: (x,))
    assert len(bound) == 2 and len(bound[0].launches) == 1


def test_powers_of_2():
    assert [next_power_of_2(n) for n in (1, 2, 3, 5, 64, 65)] == [
        triton.next_power_of_2(n) for n in (1, 2, 3, 5, 64, 65)
    ]
