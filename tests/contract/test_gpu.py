"""What only a GPU can tell: long lengths without n × n memory, few compilations, which kernel a call goes to."""

from __future__ import annotations

import pytest
import torch

import isentrope as ise
from isentrope.backends.band.spans import has_kernel
from isentrope.core.layout import Layout, Rows
from isentrope.functional import attention
from tests.contract.matrix import Setting
from tests.contract.test_fast import RECIPES as METHODS
from tests.contract.test_fast import hopper

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


@hopper
@pytest.mark.parametrize(
    "method",
    [
        "rope", "rerope:window=64", "selfextend:window=64,group=8", "rope+window:size=64",
        "rerope:window=64+retrieve:blocks=2,size=16,sinks=16",
    ],
)  # fmt: skip
@pytest.mark.parametrize("queries", [300, 1])
def test_a_repeated_launch_gives_the_same_bits_at_any_length_and_alignment(method, queries):
    """A launch like an earlier one is not bound again: one that is, after the caches are cleared, must agree."""
    from isentrope.core import launching

    recipe, calls = f"{method}+infoscale:train_length=64", []
    for shift, keys in ((0, 300), (1, 300), (8, 300), (0, 301), (0, 320)):  # entries before the first query
        q, k, v = (torch.randn(2 * n * 64 + 8, device="cuda", dtype=torch.bfloat16) for n in (queries, keys, keys))
        calls.append([x[first : first + x.numel() - 8].view(1, 2, -1, 64) for x, first in ((q, shift), (k, 0), (v, 0))])
    expected = []
    for call in calls:
        ise.clear_caches(keep_compiled=True)
        expected.append(ise.attention(*call, recipe, causal=True))
    for _ in range(3):
        actual = [ise.attention(*call, recipe, causal=True) for call in calls]
        assert all(map(torch.equal, actual, expected))
    assert launching._known


@hopper
def test_each_goes_where_it_is_fastest():
    q, k, v = Setting(300, 300, d=64, dv=64).tensors(torch.bfloat16, "cuda")
    chosen = {}
    for text in METHODS[:-1]:
        for grad in (False, True):
            q.requires_grad_(grad)
            chosen[text, grad] = attention(q, k, v, text, causal=True, return_lse=True)[1].backend
    sorts = ["sdpa"] * 4 + ["band"] * 6 + ["band", "flex"] * 3
    assert list(chosen.values()) == sorts, chosen


@hopper
def test_padded_rows_and_both_directions_go_where_they_are_fastest():
    q, k, v = Setting(300, 300, d=64, dv=64).tensors(torch.bfloat16, "cuda")
    ids = torch.arange(300, device="cuda")[None] // 100
    ways = {"padded": {"causal": True, "lengths": [300, 200]}, "packed": {"causal": True, "mask": ise.Document(ids)}}
    ways["both directions"] = {"causal": False}
    gradients = {"band"} if has_kernel(q.device) else {"flex", "sdpa"}
    for how, options in ways.items():
        for grad, expected in ((False, {"band"}), (True, gradients)):
            q.requires_grad_(grad)
            chosen = attention(q, k, v, "rerope:window=24", return_lse=True, **options)[1].backend
            assert chosen in expected, (how, grad, chosen)
    q.requires_grad_(False)
    assert attention(q, k, v, "rope", causal=True, return_entropy=True)[1].backend == "band"
    assert attention(q[:, :, :40], k, v, "rerope:window=24", causal=True, return_lse=True)[1].backend == "band"
    for grad, expected in ((False, "band"), (True, "flex")):
        q.requires_grad_(grad)
        assert attention(q, k, v, "alibi", causal=True, return_lse=True)[1].backend == expected


@hopper
@pytest.mark.parametrize("text", ["rerope:window=24+infoscale:train_length=16", "rope+window:size=40"])
def test_padded_rows_are_captured(text):
    """Nothing is read from the GPU: a graph gives for new tensors what the call gives."""
    setting = Setting(300, 300, "lengths", heads=6, d=64, dv=64)
    tensors, options = setting.tensors(torch.bfloat16, "cuda"), {"causal": True, "return_lse": True}
    rows = Rows(lengths=torch.tensor([300, 200], device="cuda"))

    def run():
        with torch.no_grad():
            return attention(*tensors, text, layout=Layout(2, 300, 300, tensors[0].device, rows), **options)

    run()  # kernels are compiled
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        out, aux = run()
    for x in tensors:
        x.copy_(torch.randn_like(x))
    expected, exact = run()
    graph.replay()
    assert aux.backend == "band" and torch.equal(out, expected) and torch.equal(aux.lse, exact.lse)
