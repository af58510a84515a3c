"""Rotation in one launch, against torch's operations one by one: the same bits."""

from __future__ import annotations

import pytest
import torch

from isentrope.core import rotation
from isentrope.core.compile import HAS_TRITON, TRITON_INTERPRETED


def check_bits(dtype, device):
    torch.manual_seed(0)
    angle = torch.randn(1, 1, 37, 20, device=device) * 100
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    packed = torch.randn(37, 3, 40, device=device).to(dtype).transpose(0, 1)[None]
    for x in (packed, packed.contiguous()):
        assert rotation._rotates_in_kernel(x, cos, interleaved=False)
        a, b = x.chunk(2, -1)
        expected = torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
        assert torch.equal(rotation.rotate(x, cos, sin, interleaved=False), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_one_launch_rounds_as_torch_does(dtype):
    check_bits(dtype, "cuda")


@pytest.mark.skipif(not (HAS_TRITON and TRITON_INTERPRETED), reason="kernels run on a CPU with TRITON_INTERPRET=1")
def test_one_interpreted_launch_rounds_as_torch_does():
    check_bits(torch.float16, "cpu")  # bf16 is not known to the interpreter


def test_other_rotations_take_no_kernel():
    """In fp32 products and sums would be fused, with gradients there is no backward."""
    half = torch.randn(1, 2, 5, 8, dtype=torch.float16)
    cos = torch.randn(1, 1, 5, 4)
    assert not rotation._rotates_in_kernel(half.float(), cos, interleaved=False)
    assert not rotation._rotates_in_kernel(half, cos, interleaved=False)
    assert not rotation._rotates_in_kernel(half.requires_grad_(), cos.half(), interleaved=False)
    assert not rotation._rotates_in_kernel(half, cos[..., :3].half(), interleaved=False)


@pytest.mark.skipif(not HAS_TRITON or TRITON_INTERPRETED, reason="compiles for a card, without one")
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_compiled_products_are_rounded_before_they_are_added(dtype):
    """Without its option the compiler multiplies and adds in half precision at once, with one rounding."""
    for rounded in (True, False):
        ptx = compile_rotation(dtype, rounded, enable_fp_fusion=not rounded)
        assert ("fma" in ptx) == (not rounded)


def compile_rotation(dtype, rounded, **options):
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from isentrope.core.rotation_kernel import _rotate_and_scale as kernel

    sizes = {"HALF": 32, "LANES": 32, "ROWS": 64, "HEADS": 8}
    flags = {"ROTATE": True, "TAU": False, "NORMALISE": False, "INVERSE": False, "ROUNDED": rounded, "ADD": False}
    tensors = dict.fromkeys(("x", "y", "cos", "sin", "tau"), f"*{dtype}")
    signature = {name: tensors.get(name, "i32") for name in kernel.arg_names}
    signature |= dict.fromkeys(sizes | flags, "constexpr")
    constants = {(kernel.arg_names.index(name),): value for name, value in (sizes | flags).items()}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]


def check_keys(dtype, device):
    """Keys under two rotations in one launch are those of one launch each; padding is left out."""
    torch.manual_seed(0)
    x = torch.randn(2, 3, 70, 32, device=device).to(dtype)
    pairs = [torch.randn(1, 1, 70, 16, device=device), torch.randn(2, 1, 70, 16, device=device)]
    rope, grouped = [(angle.cos(), angle.sin()) for angle in pairs]
    low, high = torch.tensor([0, 5], device=device), torch.tensor([70, 30], device=device)
    for keys in (x, x.transpose(1, 2).contiguous().transpose(1, 2)):
        for angles in ([rope], [rope, None], [None, grouped], [rope, grouped], [rope, grouped, None, rope]):
            for normalise in (False, True):
                for bounds in (None, (low, high)):
                    rotate = rotation.prepare_rotations(keys, angles, normalise, False, bounds)
                    expected = [rotation.rotate_and_scale(keys, each, None, normalise) for each in angles]
                    for ours, exact in zip(rotate(keys), expected, strict=True):
                        assert ours.stride() == exact.stride() == keys.stride()
                        assert torch.equal(ours[0], exact[0])
                        assert torch.equal(ours[1, :, 5:30], exact[1, :, 5:30])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_keys_are_rotated_twice_in_one_launch(dtype):
    check_keys(dtype, "cuda")


@pytest.mark.skipif(not (HAS_TRITON and TRITON_INTERPRETED), reason="kernels run on a CPU with TRITON_INTERPRET=1")
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_keys_are_rotated_twice_in_one_interpreted_launch(dtype):
    check_keys(dtype, "cpu")


@pytest.mark.skipif(HAS_TRITON and TRITON_INTERPRETED, reason="without kernels")
def test_keys_are_rotated_without_a_kernel():
    check_keys(torch.float32, "cpu")
