"""What a call costs the host: operations, each a launch on a GPU, and Python functions. No machine changes either."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

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


# the most Python functions that a call enters on its way to a GPU's kernels, for a prompt and for one query; tensors
# being on a CPU, one more than on a GPU checks for a graph
FUNCTION_LIMITS = {
    "ReRoPE": (213, 72),
    "SelfExtend": (244, 72),
    "CosScale + InfoScale": (149, 72),
    "LM-Infinite": (154, 74),
}
ONE_PASS_FUNCTION_LIMIT = 95


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


@pytest.mark.skipif(not HAS_TRITON or TRITON_INTERPRETED, reason="the kernels are Triton's")
def test_calls_reach_the_kernel_for_hopper_through_few_functions(host):
    """What does not depend on the addresses of q, k and v is worked out once; keys are rotated in one pass."""
    stub_gpu = importlib.import_module("stub_gpu").stub_gpu
    for name in host.ONE_PASS_RECIPES:
        with torch.no_grad(), stub_gpu(one_pass=True) as launches:
            run = host.make_gpu_call(host.GPU_RECIPES[name], host.GPU_KEYS, host.ONE_PASS_HEAD_SIZE)
            assert host.count_functions(run) <= ONE_PASS_FUNCTION_LIMIT
            before = launches.count
            run()
            assert launches.count - before == 2


@pytest.mark.skipif(not HAS_TRITON or TRITON_INTERPRETED, reason="the kernels are Triton's")
def test_a_decoded_token_costs_the_host_little_more_than_without_a_recipe(host, monkeypatch):
    """By layer and for the rest of a step; laws are read from tables, and cost a layer nothing."""
    monkeypatch.setattr(host, "time_calls", lambda *given: 0.0)
    with torch.inference_mode():
        rows = {(row["recipe"], row["what"]): row for row in host.gpu_layer_rows(1)}
    plain, rest = (rows["unextended", what] for what in ("token, a layer", "token, the rest"))
    for recipe in list(host.GPU_MODEL_RECIPES)[1:]:
        layer, others = (rows[recipe, what] for what in ("token, a layer", "token, the rest"))
        # queries and keys are not rotated by cos 1 and sin 0; the kernels of `retrieve` count their programs
        operations, functions = (-14, 15) if "retrieve" in recipe else (-15, 12)
        assert layer["operations"] - plain["operations"] <= operations
        assert layer["functions"] - plain["functions"] <= functions
        assert others["operations"] - rest["operations"] <= 41
        assert others["functions"] - rest["functions"] <= 665  # what else is loaded changes it by ten


def test_layers_of_a_pass_share_all_but_their_own_operations(host, monkeypatch):
    """What does not depend on q, k and v is computed by the first layer: the others make the operations of a call."""
    counts = []
    for layers in (1, 3):
        monkeypatch.setattr(host, "LAYERS", layers)
        model = ise.extend(host.make_model(), "rerope:window=32+infoscale")
        with torch.no_grad():
            counts.append(host.count_operations(host.read_token(model)))
    assert (counts[1] - counts[0]) / 2 <= 76


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


# kind of step: the most operations and launches that a layer adds to the plain model's, on the host of a GPU
STEP_LIMITS = {"long": {"prefill": 0, "decode": 2}, "mixed": {"prefill": 14, "decode": 14}}


def make_load(load, count):
    """Prompts of so many requests: all past the length at which the recipe is idle, or half of them."""
    long = [[3] * (40 + 3 * n) for n in range(count)]
    return long if load == "long" else [[3] * (5 + n) for n in range(count // 2)] + long[: count // 2]


@pytest.mark.skipif(not HAS_TRITON or TRITON_INTERPRETED, reason="the kernels are Triton's")
@pytest.mark.parametrize("load", STEP_LIMITS)
def test_operations_of_a_served_step_do_not_grow_with_its_requests(host, load, monkeypatch):
    """On the host of a GPU, where operations are launches: prompts are one call, requests that decode another."""
    serving = importlib.import_module("serving")
    monkeypatch.setitem(serving.BATCH_TOKENS, "cpu", 4096)  # all prompts in one step
    plain = serving.count_layer(None, make_load(load, 4), 4, on_gpu=True)
    counts = [serving.count_layer("rerope:window=32+share", make_load(load, n), 4, on_gpu=True) for n in (4, 8)]
    for kind, limit in STEP_LIMITS[load].items():
        assert abs(counts[0][kind] - counts[1][kind]) <= 1, kind  # more keys may be split, and parts merged
        assert max(count[kind] for count in counts) - plain[kind] <= limit, kind


class ReadCounter(TorchDispatchMode):
    """Counts operations that wait for a device because the host reads a value."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        reads = torch.ops.aten._local_scalar_dense, torch.ops.aten.nonzero, torch.ops.aten.equal
        self.count += function.overloadpacket in reads
        return function(*args, **(kwargs or {}))


@pytest.mark.skipif(not HAS_TRITON or TRITON_INTERPRETED, reason="the kernels are Triton's")
@pytest.mark.parametrize("load", STEP_LIMITS)
def test_a_served_step_reads_from_a_gpu_once(host, load, monkeypatch):
    """The lengths of its requests, before its first layer; layers that read prompts or decode read nothing."""
    serving, stub_gpu = (importlib.import_module(name) for name in ("serving", "stub_gpu"))
    model = ise.extend(serving.make_small(2, torch.bfloat16), "rerope:window=32+share")
    counter, copies, copy = ReadCounter(), [], torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda x: copies.append(x) or copy(x))
    model.register_forward_pre_hook(lambda *args: (copies.clear(), counter.__enter__(), None)[2], prepend=True)
    model.register_forward_hook(lambda *args: (counter.__exit__(None, None, None), seen.append(len(copies)), None)[2])
    seen = []
    with stub_gpu.stub_gpu(), torch.no_grad():
        manager = serving.start(model, make_load(load, 6), 4)
        while serving.run_step(manager, model.device) is not None:
            pass
    assert seen == [1] * 4 and counter.count == 0


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
