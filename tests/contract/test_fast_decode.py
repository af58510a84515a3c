"""The kernel for one query a row: key heads that a program takes together, and splits of the keys."""

from __future__ import annotations

import pytest
import torch

from isentrope.core import compile as compiled
from isentrope.functional import attention
from tests.contract.matrix import Setting
from tests.contract.test_fast import error, interprets


@interprets
@pytest.mark.parametrize(("heads", "kv_heads"), [(9, 3), (4, 4), (5, 5), (16, 1), (40, 2)])
def test_interpreted_decoding_keeps_key_heads_of_a_program_apart(heads, kv_heads):
    q, k, v = Setting(1, 150, heads=heads, kv_heads=kv_heads, d=32, dv=32).tensors(torch.float16)
    groups, text = heads // kv_heads, "rerope:window=24+infoscale:train_length=16"
    truth = attention(q.double(), k.double(), v.double(), text, causal=True, backend="reference")
    actual = attention(q, k, v, text, causal=True, backend="decode")
    assert error(actual, truth) < 5e-3
    for spoiled in (0, 1):
        inputs = [q, k.clone(), v.clone()]
        inputs[1 + spoiled][:, 0, 70] = torch.nan
        out = attention(*inputs, text, causal=True, backend="decode")
        assert out[:, :groups].isnan().any() and torch.equal(out[:, groups:], actual[:, groups:])


@interprets
@pytest.mark.parametrize("text", ["rope", "rerope:window=24", "rope+sink:sinks=3,size=20"])
def test_interpreted_decoding_merges_more_splits_than_there_are_keys_for(text, monkeypatch):
    from isentrope.backends.decode import kernel

    monkeypatch.setattr(kernel, "count_splits", lambda *given: 67)
    q, k, v = Setting(1, 700, batch=1, heads=2, kv_heads=1, d=32, dv=32).tensors(torch.float32)
    actual, aux = attention(q, k, v, text, causal=True, backend="decode", return_lse=True)
    options = {"causal": True, "backend": "reference", "return_lse": True}
    truth, exact = attention(q.double(), k.double(), v.double(), text, **options)
    assert error(actual, truth) < 5e-5 and error(aux.lse, exact.lse) < 5e-5


@interprets
@pytest.mark.parametrize(("position", "rows"), [("rerope:window=8", ""), ("selfextend:window=8,group=4", "left")])
def test_interpreted_decoding_of_a_cache_in_parts(position, rows):
    from tests.parallel.decoding import compare_decoding
    from tests.parallel.workers import Case

    case = Case(position, "logn:train_length=16", "sink:sinks=3,size=30", rows=rows, length=61)
    assert compare_decoding(case, 2, 1, torch.float32, "decode", head_dim=32) < 5e-5


@pytest.mark.gpu
@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 1), (8, 2), (9, 9)])
@pytest.mark.parametrize("d", [32, 64, 128, 256])
def test_blocks_of_decoding_fit_a_multiprocessor(d, heads, kv_heads):
    q, k, v = Setting(1, 700, heads=heads, kv_heads=kv_heads, d=d, dv=d).tensors(torch.bfloat16, "cuda")
    for text in ("rope", "rerope:window=24"):
        truth = attention(q.double(), k.double(), v.double(), text, causal=True, backend="reference")
        assert error(attention(q, k, v, text, causal=True, backend="decode"), truth) < 2e-2


@pytest.mark.gpu
def test_a_captured_query_is_merged_after_its_splits():
    """The merge is launched before they are done; several calls in turn, whose memory is used again."""
    tensors = Setting(1, 4000, heads=9, kv_heads=3, d=64, dv=64).tensors(torch.bfloat16, "cuda")

    def run():
        with torch.no_grad():
            return [attention(*tensors, "rerope:window=24", causal=True, backend="decode") for _ in range(4)]

    run()  # kernels are compiled
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        outs = run()
    for _ in range(3):
        for x in tensors:
            x.copy_(torch.randn_like(x))
        truth = attention(*(x.double() for x in tensors), "rerope:window=24", causal=True, backend="reference")
        graph.replay()
        assert all(error(out, truth) < 2e-2 for out in (*outs, *run()))


@pytest.mark.skipif(not compiled.HAS_TRITON, reason="needs Triton")
def test_splits_of_decoding_fill_the_multiprocessors():
    from isentrope.backends.decode.blocks import (
        CONSUMER_BLOCKS,
        SERVER_BLOCKS,
        count_splits,
        divide_block,
        fit_angles,
        share_heads,
    )

    assert [share_heads(*sizes) for sizes in ((3, 3, 4), (8, 4, 2), (8, 4, 4), (5, 1, 4), (1, 40, 4))] == [
        3,
        2,
        4,
        1,
        1,
    ]
    assert [fit_angles(SERVER_BLOCKS[d], 1) for d in (32, 64, 128, 256)] == [128, 64, 32, 32]
    assert [fit_angles(CONSUMER_BLOCKS[d], 1) for d in (32, 64, 128, 256)] == [64, 32, 32, 16]
    assert all(fit_angles(blocks, 2) == blocks.vectors for blocks in SERVER_BLOCKS.values())
    blocks = SERVER_BLOCKS[64]  # three heads leave a quarter of a block to a third program
    assert [divide_block(blocks, 128, n) for n in (1, 2, 3, 4)] == [(128, 2), (64, 2), (32, 3), (32, 2)]
    assert divide_block(SERVER_BLOCKS[256], 32, 3) == (8, 1)
    assert count_splits(8, 128, 264) == 32 and count_splits(24, 128, 264) == 11  # 256 and 264 programs of 264
    assert count_splits(264, 128, 264) == 1 and count_splits(0, 0, 264) == 1
    assert count_splits(1, 3, 264) == 3  # few keys
    assert count_splits(300, 128, 264) == 5  # 1500 programs are 6 waves, the last one two thirds full; 300 would be 2
