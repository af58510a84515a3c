"""What a call costs the host: operations, each a launch on a GPU, and Python functions. No machine changes either."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch

import isentrope as ise
from isentrope.core.compile import HAS_TRITON, TRITON_INTERPRETED

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
# recipe: most operations of a prompt and of one query, views included
LIMITS = {
    "infoscale:train_length=16": (4, 4),
    "rope+infoscale:train_length=16": (22, 22),
    "rerope:window=16": (47, 21),
    "rerope:window=16+infoscale:train_length=16": (51, 23),
    "selfextend:window=16,group=4": (56, 21),
    "rope+window:size=16": (25, 30),
    "rope+sink:sinks=2,size=16": (53, 37),
}


# the most Python functions that a call enters on its way to a GPU's kernels, for a prompt and for one query
FUNCTION_LIMITS = {
    "ReRoPE": (208, 107),
    "SelfExtend": (238, 107),
    "CosScale + InfoScale": (148, 107),
    "LM-Infinite": (152, 108),
}


@pytest.fixture
def host(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("host")


@pytest.mark.parametrize("text", LIMITS)
def test_calls_make_few_operations(host, text):
    recipe = ise.Recipe.parse(text)
    with torch.no_grad():
        for queries, limit in zip((64, 1), LIMITS[text], strict=True):
            q, k, v = (torch.randn(1, 2, n, 8) for n in (queries, 64, 64))
            assert host.count_operations(lambda: ise.attention(q, k, v, recipe, causal=True)) <= limit  # noqa: B023


@pytest.mark.skipif(not HAS_TRITON or TRITON_INTERPRETED, reason="the kernels are Triton's")
@pytest.mark.parametrize("name", FUNCTION_LIMITS)
def test_calls_reach_the_kernels_of_a_gpu_through_few_functions(host, name):
    stub_gpu = importlib.import_module("stub_gpu").stub_gpu
    with torch.no_grad(), stub_gpu():
        for queries, limit in zip((host.GPU_KEYS, 1), FUNCTION_LIMITS[name], strict=True):
            assert host.count_functions(host.make_gpu_call(host.GPU_RECIPES[name], queries)) <= limit


def test_layers_of_a_pass_share_all_but_their_own_operations(host, monkeypatch):
    """What does not depend on q, k and v is computed by the first layer: the others make the operations of a call."""
    counts = []
    for layers in (1, 3):
        monkeypatch.setattr(host, "LAYERS", layers)
        model = ise.extend(host.make_model(), "rerope:window=32+infoscale")
        with torch.no_grad():
            counts.append(host.count_operations(host.read_token(model)))
    assert (counts[1] - counts[0]) / 2 <= 93


@pytest.mark.parametrize(
    ("lengths", "more"), [((5, 7, 9, 20), 0), ((80, 90, 100, 110), 16), ((5, 9, 80, 110), 33), ((110,), 16)]
)
def test_layers_of_a_served_step_share_all_but_their_own_operations(host, lengths, more, monkeypatch):
    """While requests decode, against the plain model: nothing more where a recipe is idle."""
    serving = importlib.import_module("serving")
    counts = []
    for recipe in (None, "rerope:window=32+infoscale"):
        for layers in (1, 3):
            monkeypatch.setattr(host, "LAYERS", layers)
            model = host.make_model() if recipe is None else ise.extend(host.make_model(), recipe)
            manager = serving.start(model, [[3] * length for length in lengths], 8)
            with torch.no_grad():
                while serving.run_step(manager, model.device)[1] > len(lengths):
                    pass
                counts.append(host.count_operations(lambda: serving.run_step(manager, model.device)))  # noqa: B023
    plain, extended = (counts[1] - counts[0]) / 2, (counts[3] - counts[2]) / 2
    assert extended - plain <= more


def test_the_backend_is_chosen_once(monkeypatch):
    chosen = []
    dispatch = importlib.import_module("isentrope.dispatch")
    choose = dispatch._choose_fastest
    monkeypatch.setattr(dispatch, "_choose_fastest", lambda call: chosen.append(call) or choose(call))
    q, k, v = (torch.randn(1, 2, 20, 8) for _ in range(3))
    recipe = ise.Recipe.parse("rerope:window=7")
    for _ in range(4):
        ise.attention(q, k, v, recipe, causal=True)
    assert len(chosen) == 2  # the first call builds what the others reuse
    ise.attention(q.requires_grad_(), k, v, recipe, causal=True)
    ise.attention(q, k.repeat(1, 1, 1, 2)[..., ::2], v, recipe, causal=True)
    assert len(chosen) == 4
