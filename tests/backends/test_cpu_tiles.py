"""Bands as rectangles and triangles on a CPU: every pair once, and the numbers of the dense reference."""

from __future__ import annotations

from math import inf

import pytest
import torch
from torch.testing import assert_close

import isentrope as ise
from isentrope.core import band_tiles
from isentrope.core.band_tiles import cut_span, find_band_tiles
from isentrope.core.frame_calls import list_frames
from isentrope.core.layout import Layout, Rows
from isentrope.core.region import Region, Span, band

CPU = torch.device("cpu")
SPANS = [
    Span(), Span(high=1), Span(low=-8, high=1), Span(high=-8), Span(low=-8, high=9), Span(low=8), Span(stop=3),
    Span(start=2, stop=30, low=-20, high=-3), Span(low=-1, high=0),
]  # fmt: skip
OWN_SLOTS = torch.arange(4, 24)[None]
LAYOUTS = {
    "whole": lambda: Layout(2, 40, 40, CPU),
    "cached": lambda: Layout(1, 17, 40, CPU),
    "right": lambda: Layout(3, 40, 40, CPU, Rows([40, 23, 23])),
    "left": lambda: Layout(2, 40, 40, CPU, Rows([31, 12], left_padded=True)),
    "packed": lambda: Layout(1, 40, 40, CPU, Rows(documents=(torch.arange(40) // 15)[None])),
    "evicted": lambda: Layout(
        1,
        20,
        24,
        CPU,
        frames=tuple(x[None] for x in (torch.full((20,), -5), torch.full((20,), 24), torch.arange(4, 24))),
    ),
}


@pytest.fixture(params=["one mask", "groups"])
def _small_groups(monkeypatch, request):
    """Several groups of a band, and frames, at lengths of a test."""
    if request.param == "groups":
        monkeypatch.setattr(band_tiles, "MAX_ONE_MASK_QUERIES", 0)
    monkeypatch.setattr(band_tiles, "choose_group_sizes", lambda sharing=1: ((0, 4),))
    monkeypatch.setattr(band_tiles, "MIN_FRAME_QUERIES", 1)


def cover(tiles, layout):
    """How often each pair is covered."""
    total = torch.zeros(layout.batch, layout.queries, layout.keys)
    for tile in tiles:
        for n in range(tile.repeats):
            block = torch.ones(tile.rows, tile.columns)
            if tile.kind == "lower":
                block = block.tril()
            elif tile.kind == "upper":
                block = block.triu()
            elif tile.kind == "band":
                block = block.triu(-tile.lead).tril(tile.width - 1 - tile.lead)
            assert block.any(1).all()  # or a kernel would divide by nothing
            first, begin = tile.first + n * tile.rows, tile.begin + n * tile.rows
            total[tile.batch, first : first + tile.rows, begin : begin + tile.columns] += block
    return total


@pytest.mark.usefixtures("_small_groups")
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_tiles_cover_every_visible_pair_once(layout):
    layout = layout()
    for span in SPANS:
        region = Region((span,))
        tiles = find_band_tiles(region, layout)
        expected = layout.visible(region)[:, 0].expand(layout.batch, -1, -1)
        assert torch.equal(cover(tiles, layout), expected.float()), span
        assert all(tile.rows and tile.columns for tile in tiles)


def test_rows_that_are_padded_alike_are_one_frame():
    frames = list_frames(LAYOUTS["right"](), True)
    assert [(frame.rows.start, frame.rows.stop) for frame in frames] == [(0, 1), (1, 3)]
    assert len(list_frames(LAYOUTS["packed"](), True)) == 3
    (whole,) = list_frames(LAYOUTS["whole"](), True)
    assert whole.rows == slice(None)


@pytest.mark.usefixtures("_small_groups")
def test_padded_queries_are_left_out_where_they_do_not_matter():
    layout = LAYOUTS["left"]()
    layout.padded_queries_matter = False
    tiles = find_band_tiles(Region((Span(low=-8, high=1),)), layout)
    expected = layout.visible(Region((Span(low=-8, high=1),)))[:, 0] & ~layout.padding()[0][:, :, None]
    assert torch.equal(cover(tiles, layout), expected.float())


def test_far_keys_of_a_causal_row_are_one_triangle():
    layout = Layout(1, 4096, 4096, CPU)
    (far,) = cut_span(Span(high=1 - 1024), list_frames(layout, True)[0])
    assert (far.first, far.begin, far.rows, far.columns, far.kind) == (1024, 0, 3072, 3072, "lower")
    near = list(cut_span(Span(low=1 - 1024, high=1), list_frames(layout, True)[0]))
    assert [(tile.kind, tile.repeats * tile.rows) for tile in near] == [("lower", 1024), ("band", 3072)]


@pytest.mark.parametrize("window", [99, 1024, 2049])
def test_groups_of_a_band_have_an_even_number_of_keys(window):
    layout = Layout(1, 4000, 4000, CPU)
    _, *groups = find_band_tiles(band(1 - window, 1), layout)
    assert groups
    assert all(tile.kind == "band" and tile.columns % 2 == 0 for tile in groups)


def test_masks_serve_chunks_positions_and_few_queries():
    near = band(-8, 1)
    assert find_band_tiles(Region((Span(chunk=4, chunk_high=0),)), Layout(1, 40, 40, CPU)) is None
    assert find_band_tiles(near, Layout(1, 40, 40, CPU, position_ids=torch.arange(0, 80, 2)[None])) is None
    assert find_band_tiles(near, Layout(2, 1, 40, CPU, Rows([40, 20]))) is None
    assert find_band_tiles(near, Layout(1, 40, 40, CPU, Rows(documents=(torch.arange(40) // 2)[None]))) is None
    assert find_band_tiles(band(-inf, inf), Layout(1, 1, 40, CPU)) is not None


@pytest.mark.usefixtures("_small_groups")
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"lengths": [40, 23]},
        {"mask": ise.Padding([37, 20], side="left")},
        {"mask": ise.Document([0] * 25 + [1] * 15)},
    ],
    ids=["whole", "right", "left", "packed"],
)
def test_attention_over_tiles_is_the_reference(causal, options):
    torch.manual_seed(0)
    q = torch.randn(2, 4, 40, 8, dtype=torch.float64, requires_grad=True)
    k = torch.randn(2, 2, 40, 8, dtype=torch.float64, requires_grad=True)
    v = torch.randn(2, 2, 40, 6, dtype=torch.float64, requires_grad=True)
    for recipe in (
        "rerope:window=9+infoscale:train_length=8",
        "sink:sinks=2,size=7+rope",
        "selfextend:window=5,group=3",
    ):
        results = []
        for backend in ("reference", "sdpa"):
            out, aux = ise.attention(q, k, v, recipe, causal=causal, backend=backend, return_lse=True, **options)
            gradients = torch.autograd.grad(out.square().sum(), (q, k, v))
            with torch.no_grad():
                again = ise.attention(q, k, v, recipe, causal=causal, backend=backend, **options)
            results.append((out, aux.lse, *gradients, again))
        for expected, ours in zip(*results, strict=True):
            assert_close(ours, expected)
