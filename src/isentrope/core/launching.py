"""Launch Triton kernels with less work for the host. Imported only where Triton is installed.

`kernel[grid](…)` binds and classifies every argument anew to find the compiled kernel, which for some seventy of them
takes longer than the launch itself. A launch whose numbers, constants and dtypes are those of an earlier one has the
same compiled kernel, and runs it directly.
"""

# mypy: ignore-errors
from __future__ import annotations

from collections.abc import Hashable
from functools import reduce
from operator import or_
from typing import Any

import torch
from torch import Tensor
from triton import JITFunction
from triton.compiler import CompiledKernel
from triton.tools.tensor_descriptor import TensorDescriptor

from isentrope.core.caching import MAX_LAUNCHES, register_clear
from isentrope.core.compile import device_context

ALIGNMENT_BYTES = 16  # of pointers, which kernels are compiled for
# AMD's kernels are also compiled for the sizes of tensors
REUSES_KERNELS = torch.version.hip is None

_known: dict[Hashable, tuple[Any, CompiledKernel]] = {}
register_clear(_known.clear)


def launch_kernel(
    kernel: Any,
    grid: tuple[int, int, int],
    tensors: tuple[Tensor | TensorDescriptor, ...],
    numbers: tuple[float, ...],
    constants: dict[str, Hashable],
    options: dict[str, Hashable] | None = None,
) -> None:
    """Run `kernel[grid](*tensors, *numbers, **constants, **options)` on the device of the first tensor.

    Args:
        kernel: a function under `triton.jit` whose arguments are, in this order, tensors, numbers and constants.
        grid: programs along three axes.
        tensors: all pointers, and blocks for the copy engine.
        numbers: integers and floats; an argument must not be one at one launch and the other at the next.
        constants: all arguments that are `tl.constexpr`, in their order.
        options: of the compiler, such as `num_warps`.
    """
    key = _make_key(kernel, tensors, numbers, constants, options)
    known = None if key is None else _known.get(key)
    if known is None:  # in any other order a kernel that is launched directly would misread them
        assert kernel.arg_names[-len(constants) :] == list(constants), "expected constants last, in the kernel's order"
    with device_context(tensors[0]):
        if known is not None:
            known[1][grid](*tensors, *numbers, *constants.values())
            return
        compiled = kernel[grid](*tensors, *numbers, **constants, **(options or {}))
    if key is not None and isinstance(compiled, CompiledKernel):
        if len(_known) >= MAX_LAUNCHES:
            _known.clear()
        _known[key] = kernel, compiled  # with the kernel, so that no other can have its id


def _make_key(
    kernel: Any,
    tensors: tuple[Tensor | TensorDescriptor, ...],
    numbers: tuple[float, ...],
    constants: dict[str, Hashable],
    options: dict[str, Hashable] | None,
) -> Hashable:
    """Return all that a compiled kernel depends on, with each number itself for what Triton knows of it.

    None where a hook wants to see the arguments, and in Triton's interpreter: those take the arguments as they are.
    """
    if not REUSES_KERNELS or not isinstance(kernel, JITFunction) or kernel.pre_run_hooks:
        return None
    # blocks for the copy engine are aligned
    addresses = [x.data_ptr() for x in tensors if type(x) is not TensorDescriptor]
    kinds = [(x.base.dtype, *x.block_shape) if type(x) is TensorDescriptor else x.dtype for x in tensors]
    if reduce(or_, addresses) % ALIGNMENT_BYTES:
        kinds += [address % ALIGNMENT_BYTES == 0 for address in addresses]
    chosen = () if options is None else tuple(options.values())
    return id(kernel), tensors[0].device, *kinds, numbers, tuple(constants.values()), chosen


def next_power_of_2(n: int) -> int:
    """Return the least power of 2 that is n or more; Triton's own takes microseconds."""
    return 1 << (n - 1).bit_length()
