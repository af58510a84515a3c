"""One query a row on a CPU, where several branches are one kernel."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

import isentrope as ise
from isentrope.backends import one_query
from isentrope.core.layout import Layout

KEYS = 40
RECIPES = [
    "rerope:window=8",
    "rerope:window=8+infoscale:train_length=16+share:beta=1",
    "leakyrerope:window=8,leak=3+share:beta=(0.5,-1,0,1.5),reference=4",
    "selfextend:window=8,group=4",
    "dpe:window=8,scales=(1,2,8)",
    "rerope:window=8,rotary_dim=4",
    "rerope:window=8+sink:sinks=2,size=36",
]
OTHERS = [
    "rope+infoscale:train_length=16",
    "rerope:window=8+sink:sinks=2,size=12",
    "rerope:window=8+logn:train_length=4,keys=far",
    "rerope:window=8,layout=interleaved",
    "alibi",
    "cosine:alpha=16",
]


@pytest.fixture
def plans(monkeypatch):
    """The plans of calls that were run this way."""
    made = []
    forward = one_query.forward_one_query

    def record(call, plan):
        made.append(plan)
        return forward(call, plan)

    monkeypatch.setattr("isentrope.backends.sdpa.forward_one_query", record)
    return made


def run(recipe, dtype=torch.float64, **options):
    generator = torch.Generator().manual_seed(0)
    shapes = ((3, 4, 1, 12), (3, 2, KEYS, 12), (3, 2, KEYS, 12))
    q, k, v = (torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes)
    with torch.no_grad():
        return ise.attention(q, k, v, recipe, causal=True, return_lse=True, **options)


def make_left_padded():
    """Rows of 40, 31 and 12 keys, as pages are gathered."""
    origin = torch.tensor([0, 9, 28])[:, None]
    layout = Layout(3, 1, KEYS, torch.device("cpu"), frames=(origin, origin * 0 + KEYS, origin * 0 + KEYS - 1))
    layout.offset, layout.harmless_padding = KEYS - 1, True
    return layout


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("recipe", [*RECIPES, *OTHERS])
def test_agrees_with_the_reference(recipe, padded, plans):
    layouts = [make_left_padded() if padded else None for _ in range(2)]
    out, aux = run(recipe, layout=layouts[0], backend="sdpa")
    truth, true_aux = run(recipe, layout=layouts[1], backend="reference")
    assert_close(out, truth, atol=1e-12, rtol=0)
    assert_close(aux.lse, true_aux.lse, atol=1e-12, rtol=0)
    assert bool(plans) == (recipe in RECIPES)


def test_only_keys_that_move_are_rotated(plans):
    run("rerope:window=8", backend="sdpa")
    assert plans[0].turned == slice(KEYS - 8, KEYS)


def test_layers_share_a_plan(plans):
    layout = make_left_padded()
    recipe = ise.Recipe.parse("rerope:window=8")
    for _ in range(2):
        run(recipe, layout=layout, backend="sdpa")
    assert plans[0] is plans[1]


def test_keys_are_left_as_they_are(plans):
    k = torch.randn(1, 2, KEYS, 12)
    before = k.clone()
    with torch.no_grad():
        ise.attention(k[:, :, :1], k, k, "selfextend:window=8,group=4", causal=True, backend="sdpa")
    assert plans and torch.equal(k, before)


def test_no_rows_take_other_kernels(plans):
    q, k, v = (torch.randn(0, 4, n, 8) for n in (1, KEYS, KEYS))
    out = ise.attention(q, k, v, RECIPES[0], causal=True, lengths=torch.zeros(0, dtype=torch.int64))
    assert out.shape == (0, 4, 1, 8) and not plans
