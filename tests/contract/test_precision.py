"""Low precision: against fp64, a backend may be at most twice as far off as plain low-precision attention.

Plain attention is the eager formula on the same folded operands: scores in the low precision, softmax in fp32. It is
never taken to be nearer than the roundings that no way to compute it escapes.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch

import isentrope as ise
from tests.contract.matrix import CPU_BACKENDS, WINDOW, Setting, build, run
from tests.contract.precision import compare, eager

POSITIONS = (
    "rope",
    "yarn:factor=16,original_length=32",
    f"rerope:window={WINDOW}",
    f"leakyrerope:window={WINDOW},leak=4",
    f"selfextend:window={WINDOW},group=4,layout=interleaved",
    "alibi",
)
TEMPERATURES = ("", "infoscale:train_length=16")
MASKS = ("", "window:size=9", "sink:sinks=3,size=20")
SCORES = ("", "cosine:alpha=16")
SETTINGS = (
    Setting(100, 100, d=64, dv=64),
    Setting(63, 63, "lengths", d=64, dv=64),
    Setting(63, 63, "documents", d=64, dv=64),
    Setting(1, 257, d=64, dv=64),
    Setting(257, 257, "left", d=64, dv=64),
    Setting(100, 100, "position_ids", d=64, dv=64),
    Setting(63, 63, "no_keys", d=64, dv=64),
)
# block-sparse kernels: sizes that reach over several blocks of 128, none of them evenly
GPU_SETTINGS = (
    Setting(257, 257, d=64, dv=64),
    Setting(200, 200, "lengths", d=64, dv=64),
    Setting(300, 300, "documents", d=64, dv=64),
    Setting(1, 257, d=64, dv=64),
    Setting(257, 257, "left", d=64, dv=64),
    Setting(130, 130, "position_ids", d=64, dv=64),
    Setting(200, 200, "no_keys", d=64, dv=64),
)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def check(recipe, setting, causal, backend, dtype, device):
    # the reference sees the rounded inputs: what is judged is the computation
    rounded = [x.double() for x in setting.tensors(dtype, device)]
    truth = _reference(recipe, setting, causal, rounded, device)
    gradients = not (backend == "flex" and device == "cpu")
    ours = run(recipe, setting, causal, backend, dtype, device, gradients)
    plain = eager(recipe, setting, causal, dtype, device)
    subtracted = {"entropy": plain.subtracted["entropy"]}
    compare(ours, truth, plain._replace(subtracted=subtracted), backend, f"{recipe} causal={causal} {setting}")


def _reference(recipe, setting, causal, tensors, device):
    exact = _Exact(setting, tensors)
    return run(recipe, exact, causal, "reference", torch.float64, device)


class _Exact:
    """A setting whose tensors are given."""

    def __init__(self, setting, tensors):
        self.setting, self.given = setting, tensors

    def tensors(self, dtype, device):
        return [x.clone() for x in self.given]

    def arguments(self, device):
        return self.setting.arguments(device)


def cases(start=0, step=1):
    """Every combination, or an equal share of them."""
    return list(enumerate(product(POSITIONS, TEMPERATURES, MASKS, SCORES, (False, True))))[start::step]


TURNS = list(product(DTYPES, CPU_BACKENDS))


@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("dtype", "backend"), TURNS, ids=str)
def test_cpu(dtype, backend, whole):
    """Every combination on one backend in one precision; with `-m slow` on each backend."""
    start, step = (DTYPES.index(dtype), len(DTYPES)) if whole else (TURNS.index((dtype, backend)), len(TURNS))
    for i, (position, temperature, mask, score, causal) in cases(start, step):
        setting = SETTINGS[i % len(SETTINGS)]
        # a processor has no blocks to reach over, and may take two hundred times as long where it has no such numbers
        most = 97 if dtype == torch.float32 else 41
        setting = replace(
            setting, queries=min(setting.queries, most), keys=min(setting.keys, most), heads=2, kv_heads=1
        )
        check(build(position, temperature, mask, score, setting), setting, causal, backend, dtype, "cpu")


@pytest.mark.gpu
def test_gpu_sdpa_refuses_to_round_a_bias():
    """Where positions are not columns: with gradients, and for few queries."""
    q, k, v = SETTINGS[0].tensors(torch.bfloat16, "cuda")
    for queries in (q[:, :, :16], q.requires_grad_()):
        with pytest.raises(ValueError, match="distance bias would be rounded"):
            ise.attention(queries, k, v, "alibi", backend="sdpa")


GPU_CASES = [
    (backend, dtype, position)
    for backend, dtype in (
        ("sdpa", torch.bfloat16),
        ("sdpa", torch.float32),
        ("flex", torch.bfloat16),
        ("chunked", torch.bfloat16),
    )
    for position in POSITIONS
    if (backend, dtype, position) != ("sdpa", torch.bfloat16, "alibi")  # refused, as tested above
]


@pytest.mark.gpu
@pytest.mark.parametrize(("backend", "dtype", "position"), GPU_CASES, ids=str)
def test_gpu(backend, dtype, position):
    settings = GPU_SETTINGS if backend == "flex" else SETTINGS
    step = 5 if backend == "flex" else 1  # compiling takes long
    for i, (name, temperature, mask, score, causal) in cases(step=step):
        if name == position:
            setting = settings[i % len(settings)]
            recipe = build(position, temperature, mask, score, setting)
            check(recipe, setting, causal, backend, dtype, "cuda")
