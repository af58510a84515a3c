"""What only a GPU can tell: long lengths without n × n memory, few compilations, and the fused kernels' own edges."""

from __future__ import annotations

import pytest
import torch

import isentrope as ise

pytestmark = pytest.mark.gpu

RECIPES = (
    "rope+infoscale:train_length=2048",
    "rerope:window=1024+infoscale:train_length=2048",
    "rerope:window=1024+lambda:sinks=5,window=1024",
    "alibi",
)


@pytest.mark.parametrize("recipe", RECIPES)
def test_no_square_allocation_at_131072_tokens(recipe):
    n, heads, d = 131072, 2, 64
    q, k, v = (torch.randn(1, heads, n, d, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = ise.attention(q, k, v, recipe, causal=True)
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    assert torch.isfinite(out).all()
    # one bit for each pair would be 2 GiB
    assert peak < 1 << 29, f"{peak / 2**20:.0f} MiB"


def test_compilations_stay_few_over_changing_lengths():
    from torch._dynamo.utils import counters

    ise.attention(
        *(torch.randn(1, 2, 64, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3)), "rerope:window=16"
    )
    counters.clear()
    for n in range(300, 1300, 100):
        q, k, v = (torch.randn(1, 2, n, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
        ise.attention(q, k, v, "rerope:window=64+infoscale:train_length=128", causal=True)
        ise.attention(q, k, v, "rope+window:size=128", causal=True)
    frames = counters["stats"]["unique_graphs"]
    assert frames <= 12, dict(counters["stats"])
