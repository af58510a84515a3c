"""Scores, where more than attention itself is asked of them."""

from __future__ import annotations

import pytest
import torch

from isentrope.core.rotation import normalise_vectors


def test_cosine_gradients_of_values_rounded_otherwise():
    """No gradient may hang on two values being equal: a compiled backward may work them out again, each rounded anew.

    Here whatever the backward keeps returns with other digits.
    """
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(2, 512, 128, generator=generator)
    x.requires_grad_()

    def gradient():
        return torch.autograd.grad((normalise_vectors(x) * weight).sum(), x)[0]

    def round_otherwise(kept):
        noise = torch.rand(kept.shape, generator=generator) - 0.5
        return kept * (1 + 2**-8 * noise) if kept.is_floating_point() else kept

    expected = gradient()
    with torch.autograd.graph.saved_tensors_hooks(lambda kept: kept, round_otherwise):
        ours = gradient()
    assert not torch.equal(ours, expected)
    assert torch.allclose(ours, expected, atol=0.02 * expected.abs().max().item())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own compiler
def test_cosine_gradients_of_a_compiled_backward():
    """The same with code that torch generates, for which it starts a C++ compiler."""
    torch.manual_seed(0)
    x, to_z, gain, weight = (torch.randn(*shape) for shape in ((512, 64), (128, 64), (128,), (512, 128)))
    to_z.requires_grad_(True)

    def loss():
        with torch.autocast("cpu", torch.bfloat16):
            z = torch.nn.functional.silu(torch.nn.functional.linear(x, to_z))
        return (normalise_vectors((z * gain.to(z.dtype)).float()).to(torch.bfloat16).float() * weight).sum()

    (expected,) = torch.autograd.grad(loss(), to_z)
    (ours,) = torch.autograd.grad(torch.compile(loss)(), to_z)
    assert torch.allclose(ours, expected, atol=0.02 * expected.abs().max().item())
