"""The estimate before a comparison: on a GPU, whose short passes take as long as launching them, and on a CPU."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from isentrope.evaluation import cost
from isentrope.evaluation.cost import CostEstimate
from isentrope.evaluation.perplexity import PerplexityConfig
from isentrope.evaluation.texts import Text
from tests.fixtures.models import llama


class Machine:
    """Passes that take a launch, or the time of their operations where that is longer; and the cold time, first."""

    def __init__(self, monkeypatch, launch, rate, memory=1 << 40):
        self.now, self.read = 0.0, []
        self.launch, self.rate, self.memory = launch, rate, memory
        monkeypatch.setattr(cost, "time", SimpleNamespace(perf_counter=lambda: self.now))
        monkeypatch.setattr(cost, "token_losses", self.run)

    def run(self, model, tokens):
        if len(tokens) > self.memory:
            raise torch.OutOfMemoryError("too long")
        self.now += self.time(model, len(tokens)) + (0 if len(tokens) in self.read else 3.0)
        self.read.append(len(tokens))
        return torch.zeros(1)

    def time(self, model, count):
        return max(self.launch, cost._count_operations(model, count) / self.rate)


@pytest.mark.parametrize(("launch", "rate"), [(0.03, 2e12), (0.03, 2e10), (0.0, 1e9)])
@pytest.mark.parametrize("length", [300, 32768])
def test_passes_on_a_gpu(launch, rate, length, monkeypatch):
    model, tokens = llama(), torch.zeros(length, dtype=torch.int64)
    machine = Machine(monkeypatch, launch, rate)
    found = cost._estimate_pass(model, tokens, cost.MIN_GPU_PROBE_SECONDS)
    assert found == pytest.approx(machine.time(model, length), rel=0.15)
    assert machine.now < 2 * found + 2 * 3.0 * len(set(machine.read))  # cheap: no more than two passes of the whole


def test_a_pass_that_runs_out_of_memory_is_left_to_the_comparison(monkeypatch):
    model, tokens = llama(), torch.zeros(32768, dtype=torch.int64)
    machine = Machine(monkeypatch, 0.001, 1e12, memory=10000)
    assert cost._estimate_pass(model, tokens, 0.25) > 0 and max(machine.read) == 8192
    machine.memory = 100
    with pytest.raises(torch.OutOfMemoryError):
        cost._estimate_pass(model, tokens, 0.25)


def test_a_cpu_reads_one_short_pass(tmp_path, monkeypatch):
    model, texts = llama(), [Text("a", "", tuple(range(90)) * 20)]
    machine = Machine(monkeypatch, 0.0, 1e9)
    found = cost.estimate_cost(model, texts, PerplexityConfig(("plain", "infoscale"), (0, 1800)), None, tmp_path)
    assert machine.read == [512, 512] and found.passes == 2 and not found.compiles
    assert found.seconds == pytest.approx((1 + cost.RECIPE_COST) * machine.time(model, 1800))


def test_words():
    line = CostEstimate(140, 95.0, 1 << 30, compiles=True).format(32768)
    assert line.startswith(
        "estimate: 140 passes of 32768 tokens, about 95 s, more where kernels are compiled first, and"
    )
    line = CostEstimate(2, 9000.0, 1 << 20).format(8)
    assert line == "estimate: 2 passes of 8 tokens, about 2.5 h and 1 MiB for the model"
