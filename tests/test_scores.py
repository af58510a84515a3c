"""Scores, where more than attention itself is asked of them."""

from __future__ import annotations

import pytest
import torch

from isentrope.core.rotation import normalise_vectors


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own compiler
def test_cosine_gradients_of_values_worked_out_anew():
    """A compiled backward may work values out again, rounded otherwise: no gradient may hang on their being equal."""
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
