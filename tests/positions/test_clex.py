"""CLEX: its path against its equation, its training, and its kernels."""

import math
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch.testing import assert_close

import isentrope as ise
from isentrope import Recipe, attention
from isentrope.core.compile import HAS_TRITON, TRITON_INTERPRETED
from isentrope.positions.clex import runs_in_kernel
from tests.fixtures.recipes import TRAINABLE

CPU = torch.device("cpu")
WIDE = torch.float64


def theta(position, d, length=1):
    return position.frequencies(d, length, WIDE, CPU)


def trained_clex(seed=0, **options):
    clex = ise.CLEX(8, 16, max_factor=4, **options)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in clex.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return clex


def test_clex_within_the_training_length_is_rope():
    clex = trained_clex().eval()
    for length in (1, 15, 16):
        assert_close(theta(clex, 8, length), theta(ise.RoPE(), 8), rtol=1e-15, atol=0)
    assert not torch.allclose(theta(clex, 8, 17), theta(ise.RoPE(), 8), rtol=1e-3)


def test_clex_reads_a_row_at_its_own_factor():
    clex = trained_clex().eval()
    path = clex.path(5, WIDE, CPU)
    assert path.shape == (5, 4)
    for length, t in ((1, 1), (16, 1), (17, 2), (32, 2), (33, 3), (80, 5)):
        assert torch.equal(theta(clex, 8, length), path[t - 1])
    rows = theta(clex, 8, torch.tensor([[1, 17], [33, 80]]))
    assert_close(rows, path[torch.tensor([[0, 1], [2, 4]])])


def test_clex_path_solves_its_equation():
    """A finer integration by Euler's rule ends at the same place."""
    clex = trained_clex().eval()
    start = theta(ise.RoPE(), 8).log().numpy()
    up, down = (layer.weight.detach().double().numpy() for layer in (clex.up, clex.down))
    stretch = 2 * np.arange(4) / 6
    state, steps = start, 20000
    for step in range(steps):
        t = 1 + 2 * (step + 0.5) / steps
        ntk = start - stretch * math.log(2 * t - 1)
        state = state + 2 / steps * (np.tanh((state + ntk) @ up.T) @ down.T - stretch * 2 / (2 * t - 1))
    # four-step Runge–Kutta at two steps a unit of t against small steps
    assert_close(clex.path(3, WIDE, CPU)[-1].detach().numpy(), np.exp(state), rtol=1e-4, atol=0)


def check_clex_path(device, dim, hidden, last):
    """One launch does the steps of torch, forward and backward."""
    generator = torch.Generator().manual_seed(dim)
    paths, clexes = [], [ise.CLEX(dim, 16, hidden=hidden).to(device) for _ in "ab"]
    wide = ise.CLEX(dim, 16, hidden=hidden).to(device, WIDE)
    weights = [0.1 * torch.randn(p.shape, generator=generator) / p.shape[1] ** 0.5 for p in wide.parameters()]
    factor = torch.randn(last, dim // 2, generator=generator)
    for clex, kernel in ((clexes[0], True), (clexes[1], False), (wide, False)):
        for parameter, weight in zip(clex.parameters(), weights, strict=True):
            parameter.data.copy_(weight)
        assert runs_in_kernel(clex.up.weight) == (clex is not wide)
        with patch("isentrope.positions.clex.runs_in_kernel", lambda up, kernel=kernel: kernel):
            path = clex.path(last, clex.up.weight.dtype, torch.device(device))
        (path * factor.to(path)).sum().backward()
        paths.append(path.detach())
    for compared in (0, 1):  # torch in float32 is as far from float64
        assert_close(paths[compared].double(), paths[2], rtol=2e-5, atol=1e-9)
        for parameter, exact in zip(clexes[compared].parameters(), wide.parameters(), strict=True):
            error = (parameter.grad.double() - exact.grad).norm()
            assert float(error) <= 1e-5 * float(exact.grad.norm())


@pytest.mark.gpu
@pytest.mark.parametrize(("dim", "hidden", "last"), [(128, None, 64), (64, 40, 3), (20, 7, 4), (256, None, 5)])
def test_clex_path_in_one_launch(dim, hidden, last):
    check_clex_path("cuda", dim, hidden, last)


@pytest.mark.skipif(not (HAS_TRITON and TRITON_INTERPRETED), reason="kernels run on a CPU with TRITON_INTERPRET=1")
@pytest.mark.parametrize(("dim", "hidden", "last"), [(128, None, 3), (64, 40, 2), (20, 7, 4)])
def test_interpreted_clex_path(dim, hidden, last):
    check_clex_path("cpu", dim, hidden, last)


def test_clex_samples_its_training_factor():
    clex = trained_clex()
    assert clex.training
    generator = torch.Generator().manual_seed(0)
    drawn = []
    for _ in range(60):
        t = clex.sample(generator)
        drawn.append(t)
        # while training, the drawn factor counts and not the row's length
        assert torch.equal(theta(clex, 8, 5), clex.path(4, WIDE, CPU)[t - 1])
    assert set(drawn) == {1, 2, 3, 4}
    again = torch.Generator().manual_seed(0)
    assert [clex.sample(again) for _ in range(60)] == drawn


@pytest.mark.parametrize("backend", TRAINABLE)
def test_clex_learns(backend):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 12, 8, generator=generator) for _ in range(3))
    clex = trained_clex()
    clex.factor.fill_(3)
    attention(q, k, v, Recipe(position=clex), causal=True, backend=backend).square().sum().backward()
    for parameter in clex.parameters():
        assert bool(parameter.grad.isfinite().all()) and bool((parameter.grad != 0).any())


def test_clex_learns_from_its_start():
    """W_down begins at zero, and must be able to leave it."""
    q = torch.randn(1, 1, 12, 8, generator=torch.Generator().manual_seed(0))
    clex = ise.CLEX(8, 4)
    clex.factor.fill_(2)
    attention(q, q, q, Recipe(position=clex)).square().sum().backward()
    assert bool((clex.down.weight.grad != 0).any())
    assert bool((clex.up.weight.grad == 0).all())


def test_clex_at_factor_one_teaches_nothing():
    q = torch.randn(1, 1, 12, 8, generator=torch.Generator().manual_seed(0))
    clex = trained_clex()
    attention(q, q, q, Recipe(position=clex)).square().sum().backward()
    assert bool((clex.down.weight.grad == 0).all())


@pytest.mark.parametrize("hidden", [None, 3])
def test_clex_state_survives(hidden):
    clex, other = trained_clex(hidden=hidden), ise.CLEX(8, 16, max_factor=4, hidden=hidden)
    assert set(clex.state_dict()) == {"up.weight", "down.weight"}  # the drawn factor is no knowledge
    other.load_state_dict(clex.state_dict())
    q = torch.randn(1, 2, 40, 8, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        outs = [attention(q, q, q, Recipe(position=module.eval())) for module in (clex, other)]
    assert torch.equal(*outs)
    assert clex.up.weight.shape == (hidden or 4, 4)


def test_clex_in_part_of_a_head():
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, 10, 12, generator=generator, dtype=WIDE) for _ in range(3))
    out = attention(q, k, v, Recipe(position=ise.CLEX(8, 16).eval()))
    assert_close(out.detach(), attention(q, k, v, Recipe(position=ise.RoPE(rotary_dim=8))))


def test_clex_remembers_its_path_only_while_nothing_changes():
    clex = trained_clex().eval()
    with torch.no_grad():
        before = theta(clex, 8, 64)
        assert theta(clex, 8, 64).data_ptr() == before.data_ptr()
        clex.down.weight.mul_(2)
        assert not torch.equal(theta(clex, 8, 64), before)
        clex.down.weight.data.mul_(0.5)  # behind the counter's back, as a captured step does
        assert torch.equal(theta(clex.train().eval(), 8, 64), before)
