"""Launch Triton kernels with less work for the host. Imported only where Triton is installed.

`kernel[grid](…)` binds and classifies every argument anew to find the compiled kernel, which for some seventy of them
takes longer than the launch itself. A launch whose numbers, constants and dtypes are those of an earlier one has the
same compiled kernel, and runs it directly.
"""

# mypy: ignore-errors
from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from functools import reduce
from operator import or_
from typing import Any

import torch
from torch import Tensor
from triton import JITFunction
from triton.compiler import CompiledKernel
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as SwizzledDescriptor
from triton.tools.tensor_descriptor import TensorDescriptor

from isentrope.core.caching import MAX_LAUNCHES, register_clear
from isentrope.core.compile import TRITON_INTERPRETED, cuda_capability_major, device_context
from isentrope.core.tile_shapes import HOPPER

DESCRIPTORS = TensorDescriptor, SwizzledDescriptor
ALIGNMENT_BYTES = 16  # of pointers, which kernels are compiled for
# products and sums in one rounding; releases of Triton differ in whether that is their own default
DEFAULT_OPTIONS = {"enable_fp_fusion": True}
# AMD's kernels are also compiled for the sizes of tensors
REUSES_KERNELS = torch.version.hip is None

# by the index of a device, which is the current one; builds of torch without CUDA have none
current_stream: Callable[[int], int | None] = getattr(torch._C, "_cuda_getCurrentRawStream", lambda index: None)

_known: dict[Hashable, tuple[Any, CompiledKernel]] = {}
register_clear(_known.clear)


def launch_kernel(
    kernel: Any,
    grid: tuple[int, int, int],
    tensors: tuple[Tensor | TensorDescriptor | tuple[Tensor, ...], ...],
    numbers: tuple[float, ...],
    constants: dict[str, Hashable],
    options: dict[str, Hashable] | None = None,
) -> CompiledKernel | None:
    """Run `kernel[grid](*tensors, *numbers, **constants, **options)` on the device of the first tensor.

    Args:
        kernel: a function under `triton.jit` whose arguments are, in this order, tensors, numbers and constants.
        grid: programs along three axes.
        tensors: all pointers, tuples of them, and blocks for the copy engine; the first is a tensor.
        numbers: integers and floats; an argument must not be one at one launch and the other at the next.
        constants: all arguments that are `tl.constexpr`, in their order.
        options: of the compiler, such as `num_warps`.

    Returns:
        The compiled kernel, which a launch that differs in addresses alone may run, aligned ones provided that these
        were; None where there is none to run directly.
    """
    key, pointers = _make_key(kernel, tensors, numbers, constants, options)
    known = None if key is None else _known.get(key)
    if known is None:  # in any other order a kernel that is launched directly would misread them
        assert kernel.arg_names[-len(constants) :] == list(constants), "expected constants last, in the kernel's order"
    with device_context(tensors[0]):
        if known is not None:
            known[1][grid](*pointers, *numbers, *constants.values())
            return known[1]
        compiled = kernel[grid](*tensors, *numbers, **constants, **(DEFAULT_OPTIONS | (options or {})))
    if key is None or not isinstance(compiled, CompiledKernel):
        return None
    if len(_known) >= MAX_LAUNCHES:
        _known.clear()
    _known[key] = kernel, compiled  # with the kernel, so that no other can have its id
    return compiled


class RepeatedLaunch:
    """Launches that differ in the addresses of their first tensors alone.

    Args:
        kernel, grid, numbers, constants, options: as `launch_kernel` takes them.
        tensors: those after the ones that change.
    """

    def __init__(
        self,
        kernel: Any,
        grid: tuple[int, int, int],
        tensors: tuple[Tensor, ...],
        numbers: tuple[float, ...],
        constants: dict[str, Hashable],
        options: dict[str, Hashable] | None = None,
    ) -> None:
        self.kernel, self.grid, self.tensors = kernel, grid, tensors
        self.numbers, self.constants, self.options = numbers, constants, options
        # the compiled kernel, and its arguments after the addresses that change
        self._direct: tuple[Any, tuple[Any, ...]] | None = None

    def run(
        self,
        arguments: tuple[int | TensorDescriptor, ...],
        list_tensors: Callable[[], tuple[Tensor | TensorDescriptor, ...]],
        addresses: tuple[int, ...] | None = None,
        stream: int | None = None,
    ) -> None:
        """Launch with other tensors first, on their device, which is the current one.

        Args:
            arguments: their addresses, and blocks for the copy engine.
            list_tensors: lists them, where addresses are not enough.
            addresses: those among the arguments, where these are not addresses alone.
            stream: the current one of the device, where the caller knows it, which Triton then need not ask for.
        """
        aligned = reduce(or_, arguments if addresses is None else addresses) % ALIGNMENT_BYTES == 0
        if self._direct is not None and aligned and not self.kernel.pre_run_hooks:
            launch, others = self._direct
            if stream is None:
                launch(*arguments, *others)
            else:
                launch(*arguments, *others, stream=stream)
            return
        tensors = (*list_tensors(), *self.tensors)
        kernel = launch_kernel(self.kernel, self.grid, tensors, self.numbers, self.constants, self.options)
        if kernel is not None and aligned:
            fixed = [x.data_ptr() for x in self.tensors]
            self._direct = kernel[self.grid], (*fixed, *self.numbers, *self.constants.values())


def _make_key(
    kernel: Any,
    tensors: tuple[Tensor | TensorDescriptor | tuple[Tensor, ...], ...],
    numbers: tuple[float, ...],
    constants: dict[str, Hashable],
    options: dict[str, Hashable] | None,
) -> tuple[Hashable, list[Any]]:
    """Return all that a compiled kernel depends on, with each number itself for what Triton knows of it.

    Also return the addresses of tensors, which a compiled kernel takes without asking the driver about each.

    The key is None where a hook wants to see the arguments, and in Triton's interpreter: those take them as they are.
    """
    if not REUSES_KERNELS or not isinstance(kernel, JITFunction) or kernel.pre_run_hooks:
        return None, []
    kinds, pointers, addresses = [], [], []
    for x in tensors:
        if type(x) in DESCRIPTORS:  # blocks for the copy engine are aligned
            kinds.append((x.base.dtype, *x.block_shape))
            pointers.append(x)
            continue
        if type(x) is tuple:
            kinds.append(tuple([part.dtype for part in x]))
            pointers.append(tuple([part.data_ptr() for part in x]))
            addresses += pointers[-1]
            continue
        kinds.append(x.dtype)
        pointers.append(x.data_ptr())
        addresses.append(pointers[-1])
    if not are_aligned(addresses):
        kinds += [address % ALIGNMENT_BYTES == 0 for address in addresses]
    chosen = () if options is None else tuple(options.values())
    return (id(kernel), tensors[0].device, *kinds, numbers, tuple(constants.values()), chosen), pointers


def are_aligned(addresses: Iterable[int]) -> bool:
    """Return whether kernels that were compiled for aligned pointers take all of these."""
    return reduce(or_, addresses) % ALIGNMENT_BYTES == 0


def can_overlap_launches(x: Tensor) -> bool:
    """Return whether a kernel on x's device may start before the one it waits for has ended."""
    if not x.is_cuda or TRITON_INTERPRETED or torch.version.hip is not None:
        return False
    return cuda_capability_major(x.device) >= HOPPER


def next_power_of_2(n: int) -> int:
    """Return the least power of 2 that is n or more; Triton's own takes microseconds."""
    return 1 << (n - 1).bit_length()
