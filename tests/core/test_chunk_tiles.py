"""Regions of whole chunks as batches of rectangles, against every pair looked at one by one."""

from __future__ import annotations

from itertools import product
from math import inf

import pytest
import torch

from isentrope.core.chunk_tiles import cut_chunks, find_tiles, share_queries
from isentrope.core.layout import Layout, Rows
from isentrope.core.region import Region, Span, chunks

CPU = torch.device("cpu")
SIZES = ((23, 23), (5, 23), (1, 23), (17, 40), (40, 40))


def count_pairs(tiles, queries, keys):
    """How often each pair is covered, by way of the views that kernels are given."""
    total = torch.zeros(1, 1, queries, keys)
    for batch in tiles:
        rows = batch.view_rows(torch.arange(queries)[None, None]).flatten(0, 2)
        columns = batch.view_columns(torch.arange(keys)[None, None]).flatten(0, 2)
        assert len(rows) == len(columns) == batch.count
        for i, j in zip(rows, columns, strict=True):
            block = torch.ones(len(i), len(j))
            total[0, 0, i[:, None], j] += block.tril() if batch.corner.causal else block
    return total[0, 0]


@pytest.mark.parametrize("high", [1, inf])
def test_rectangles_cover_every_pair_once(high):
    bounds = product((-inf, -3, -1, 0, 1, 2), (inf, -1, 0, 1, 2, 5))
    spans = [Span(high=high, chunk=size, chunk_low=a, chunk_high=b) for (a, b), size in product(bounds, (3, 8))]
    cut = 0
    for (queries, keys), span in product(SIZES, (span for span in spans if not span.empty)):
        for form in {span, span.simplify(queries, keys)}:
            if (tiles := cut_chunks(form, queries, keys)) is None:
                continue
            i, j = torch.arange(keys - queries, keys)[:, None], torch.arange(keys)
            apart = j // form.chunk - i // form.chunk
            expected = (apart >= form.chunk_low) & (apart < form.chunk_high) & (j - i < form.high)
            assert torch.equal(count_pairs(tiles, queries, keys), expected.float()), (form, queries, keys)
            rows = [batch.view_rows(torch.arange(queries)[None, None]).flatten() for batch in tiles]
            times = torch.cat([torch.arange(0), *rows]).bincount(minlength=1)
            assert share_queries(tiles) == (times.max() > 1).item()
            cut += 1
    assert cut > 200


def test_a_long_staircase_takes_few_batches():
    length = 131_072
    older = cut_chunks(chunks(5120, -inf, -1).spans[0], length, length)
    assert sum(batch.count * batch.corner.rows * batch.corner.columns for batch in older) == sum(
        min(5120, length - c * 5120) * (c - 1) * 5120 for c in range(2, 26)
    )
    assert len(older) <= 10
    own = cut_chunks(Span(high=1, chunk=5120, chunk_low=0), length, length)
    assert [batch.count for batch in own] == [1, 25]


def test_other_regions_are_not_cut():
    assert cut_chunks(Span(low=-9, chunk=4, chunk_high=0), 20, 20) is None
    assert cut_chunks(Span(stop=3, chunk=4, chunk_high=0), 20, 20) is None
    assert cut_chunks(Span(high=1), 20, 20) is None
    region = chunks(4, -inf, 0)
    assert find_tiles(region, Layout(1, 20, 20, CPU)) is not None
    assert find_tiles(Region(region.spans * 2), Layout(1, 20, 20, CPU)) is None
    assert find_tiles(region, Layout(1, 25, 20, CPU)) is None
    assert find_tiles(region, Layout(1, 20, 20, CPU, Rows([12]))) is None


def test_chunks_of_two_sizes_are_refused():
    with pytest.raises(ValueError, match="expected chunks of one size, got 3 and 4"):
        chunks(3, -1, 0) & chunks(4, -1, 0)
    with pytest.raises(ValueError, match="expected chunks of one size"):
        chunks(3, -1, 0) - chunks(4, -1, 0)
