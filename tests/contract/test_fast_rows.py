"""The band kernel by intervals: padded and packed rows, both directions, entropy, backward, loads by pointers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from isentrope import dispatch
from isentrope.backends.band import backend as band_backend
from isentrope.backends.band.backend import _get_plan
from isentrope.backends.band.gradients import find_query_ranges
from isentrope.builder import Inputs, build_call
from isentrope.core import switches
from isentrope.core.caching import clear_caches
from isentrope.core.layout import Layout, Rows
from isentrope.core.partial_layout import PartialLayout, RowTable
from isentrope.core.switches import (
    BAND_BACKWARD,
    BAND_CHUNKED_PREFILL,
    BAND_ENTROPY,
    BAND_POINTERS,
    BAND_ROWS,
    DEFAULTS,
)
from isentrope.functional import attention
from tests.contract.matrix import Setting
from tests.contract.test_fast import error, hopper, interprets, recipe_of

TEXTS = (
    "rope+infoscale:train_length=16",
    "rerope:window=24+infoscale:train_length=16",
    "selfextend:window=24,group=4+cosine:alpha=16",
    "rerope:window=24+logn:train_length=16,keys=far+share:beta=0.5,reference=8",
    "rope+window:size=20",
    "rope+sink:sinks=3,size=20",
    "rerope:window=24+lambda:sinks=5,window=24",
    "dualchunk:chunk=40,local=8",
)
ROWS = ("lengths", "left", "documents", "position_ids", "no_keys", "")
# each method meets padding, documents and both directions in turn; the interpreter is slow
TURNS = [[(text, ROWS[(n + turn) % 6], (n + turn) % 3 != 0) for n, text in enumerate(TEXTS)] for turn in range(3)]
CASES = [*TURNS[0], *(pytest.param(*case, marks=pytest.mark.slow) for case in (*TURNS[1], *TURNS[2]))]
BACKWARD = [TURNS[0][1], *(pytest.param(*TURNS[0][n], marks=pytest.mark.slow) for n in (3, 4, 5, 7))]
BOTH_DIRECTIONS = [(TEXTS[1], "", False), *(pytest.param(t, "", False, marks=pytest.mark.slow) for t in TEXTS[2:5:2])]
ALL = (BAND_ROWS, BAND_ENTROPY, BAND_BACKWARD)
SIZES = {"documents": (100, 100), "lengths": (63, 63), "left": (100, 100), "": (63, 63)}


@pytest.fixture
def every_switch(monkeypatch):
    monkeypatch.setattr(switches, "_on", frozenset(ALL))


def make_setting(rows, d=32, dv=32, scale=1):
    queries, keys = SIZES.get(rows, (63, 63))
    heads = (2, 1) if scale == 1 else (6, 3)
    return Setting(queries * scale, keys * scale, rows, heads=heads[0], kv_heads=heads[1], d=d, dv=dv)


def compare(text, setting, causal, dtype, device, gradients):
    """Compare output, log-sum-exp, entropy and gradients with the reference in fp64."""
    options = {"causal": causal, "return_lse": True, "return_entropy": True} | setting.arguments(device)
    recipe, results = recipe_of(text, device), []
    for kind, backend in ((dtype, "band"), (torch.float64, "reference")):
        inputs = [x.to(kind).requires_grad_(gradients) for x in setting.tensors(dtype, device)]
        out, aux = attention(*inputs, recipe, backend=backend, **options)
        values = {"out": out.detach(), "lse": aux.lse.detach(), "entropy": aux.entropy.detach()}
        if gradients:
            weights = torch.linspace(0.5, 1.5, out.numel(), device=device, dtype=torch.float64).view_as(out)
            (out.double() * weights).sum().backward()
            values |= {name: x.grad for name, x in zip(("dq", "dk", "dv"), inputs, strict=True)}
        results.append(values)
    actual, truth = results
    near = 5e-5 if dtype == torch.float32 else 2e-2
    for name, value in actual.items():
        exact = truth[name]
        if name == "entropy":
            assert (value - exact).abs().max() < (1e-3 if dtype == torch.float32 else 5e-2), name
            continue
        seen = exact > -torch.inf
        assert torch.equal(value > -torch.inf, seen), name
        assert error(value[seen], exact[seen]) < near * (1 if name in ("out", "lse") else 4), name


@interprets
@pytest.mark.parametrize(("text", "rows", "causal"), CASES, ids=str)
def test_intervals_interpreted(text, rows, causal, every_switch):
    setting = make_setting(rows)
    if not rows and dispatch.BAND.refusal(build(text, setting, causal)) is not None:
        pytest.skip("whole rows in triangles are PyTorch's")
    with torch.no_grad():
        compare(text, setting, causal, torch.float32, "cpu", gradients=False)


@interprets
@pytest.mark.parametrize(("text", "rows", "causal"), BACKWARD, ids=str)
def test_backward_by_intervals_interpreted(text, rows, causal, every_switch):
    compare(text, make_setting(rows), causal, torch.float32, "cpu", gradients=True)


@interprets
@pytest.mark.parametrize(("text", "rows", "causal"), BOTH_DIRECTIONS, ids=str)
def test_both_directions_interpreted(text, rows, causal, every_switch):
    compare(text, make_setting(rows), causal, torch.float32, "cpu", gradients=True)


@interprets
def test_far_keys_on_both_sides_are_triangles_interpreted(monkeypatch):
    monkeypatch.setattr(switches, "_on", DEFAULTS)
    setting = make_setting("")
    assert _get_plan(build(TEXTS[3], setting, False)) is None  # in short rows
    monkeypatch.setattr(band_backend, "MIN_TURNED_QUERIES", 40)
    clear_caches()  # plans, which do not know of this
    before, after = (part.band for part in _get_plan(build(TEXTS[3], setting, False)).far)
    assert before.causal and after.anticausal
    with torch.no_grad():
        compare(TEXTS[3], setting, False, torch.float32, "cpu", gradients=False)
    clear_caches()


@interprets
@pytest.mark.parametrize("text", [TEXTS[1], pytest.param(TEXTS[4], marks=pytest.mark.slow)])
def test_padded_queries_that_nobody_reads_are_not_computed_interpreted(text, every_switch):
    lengths, results = torch.tensor([40, 7]), []
    for matter in (True, False):
        generator = torch.Generator().manual_seed(0)
        q, k, v = (torch.randn(2, 2, 40, 32, generator=generator, requires_grad=True) for _ in range(3))
        layout = Layout(2, 40, 40, torch.device("cpu"), Rows(lengths=lengths))
        layout.padded_queries_matter = matter
        out = attention(q, k, v, text, causal=True, layout=layout, backend="band")
        results.append([out.detach(), *torch.autograd.grad(out[0].sum() + out[1, :, :7].sum(), (q, k, v))])
    assert results[1][0][1, :, 7:].abs().max() == 0
    for ours, expected in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(ours[0], expected[0])
        torch.testing.assert_close(ours[1, :, :7], expected[1, :, :7])


@interprets
@pytest.mark.slow
def test_half_precision_by_intervals_interpreted(every_switch):
    compare(TEXTS[1], make_setting("documents"), True, torch.float16, "cpu", gradients=True)


@interprets
@pytest.mark.parametrize("text", [TEXTS[0], TEXTS[3]])
def test_entropy_in_one_pass_interpreted(text, every_switch):
    """Whole rows too, where output and entropy are wanted together: "auto" takes the band kernel, off it does not."""
    setting = Setting(100, 100, batch=1, heads=2, kv_heads=1, d=32, dv=64)
    q, k, v = setting.tensors(torch.float32)
    options = {"causal": True, "return_lse": True, "return_entropy": True}
    with torch.no_grad():
        out, aux = attention(q, k, v, text, **options)
        truth, exact = attention(q.double(), k.double(), v.double(), text, backend="reference", **options)
    assert aux.backend == "band"
    assert error(out, truth) < 5e-5 and error(aux.lse, exact.lse) < 5e-5
    assert (aux.entropy - exact.entropy).abs().max() < 2e-5  # no difference of large numbers


@interprets
def test_large_scores_keep_their_entropy_interpreted(every_switch):
    q, k, v = make_setting("lengths").tensors(torch.float32)
    options = {"causal": True, "return_entropy": True, "lengths": [63, 20]}
    with torch.no_grad():
        aux = attention(q * 40, k, v, "rope", backend="band", **options)[1]
        exact = attention(q.double() * 40, k.double(), v.double(), "rope", backend="reference", **options)[1]
    assert (aux.entropy - exact.entropy).abs().max() < 1e-3


@interprets
@pytest.mark.parametrize("text", [TEXTS[1], pytest.param(TEXTS[6], marks=pytest.mark.slow)])
def test_loads_by_pointers_interpreted(text, monkeypatch, every_switch):
    """What a card without a copy engine runs, for whole and for padded rows."""
    from isentrope.backends.band import kernel

    monkeypatch.setattr(kernel, "has_copy_engine", lambda device: False)
    with torch.no_grad():
        compare(text, Setting(63, 63, batch=1, heads=2, kv_heads=1, d=32, dv=32), True, torch.float32, "cpu", False)
        compare(text, make_setting("lengths"), True, torch.float32, "cpu", gradients=False)


PREFILL = Setting(63, 170, batch=1, heads=2, kv_heads=1, d=32, dv=32)


@interprets
@pytest.mark.parametrize("text", [TEXTS[3], pytest.param(TEXTS[2], marks=pytest.mark.slow)])
def test_a_chunk_of_queries_against_a_longer_cache_interpreted(text, monkeypatch):
    """Far keys are a rectangle and a triangle of PyTorch's kernels; with the switch off the band kernel refuses."""
    monkeypatch.setattr(switches, "_on", DEFAULTS - {BAND_CHUNKED_PREFILL, BAND_ENTROPY})
    with torch.no_grad(), pytest.raises(ValueError, match="whole rows"):
        compare(text, PREFILL, True, torch.float32, "cpu", gradients=False)
    monkeypatch.setattr(switches, "_on", frozenset({BAND_CHUNKED_PREFILL}))
    with torch.no_grad():
        compare(text, PREFILL, True, torch.float32, "cpu", gradients=False)
    plan = _get_plan(build(text, PREFILL, True))
    rectangle, triangle = (part.band for part in plan.far)
    assert rectangle.full and triangle.causal
    assert _get_plan(build(text, replace(PREFILL, queries=16), True)) is None  # a mask costs less


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize("text", TEXTS[1:4])
def test_a_chunk_of_queries_against_a_longer_cache(text, monkeypatch):
    monkeypatch.setattr(switches, "_on", frozenset({BAND_CHUNKED_PREFILL}))
    for d in (64, 128):
        setting = Setting(512, 4000, batch=1, heads=6, kv_heads=3, d=d, dv=d)
        with torch.no_grad():
            compare(text, setting, True, torch.bfloat16, "cuda", gradients=False)


@interprets
def test_a_part_of_a_row_interpreted(every_switch):
    """As processes that share a text attend to blocks of it; the second row is two documents."""
    slots = torch.arange(150)
    low = torch.stack((torch.zeros(150, dtype=torch.int64), torch.where(slots < 70, 0, 70)))
    high = torch.stack((torch.full((150,), 150), torch.where(slots < 70, 70, 150)))
    setting = Setting(50, 80, heads=2, kv_heads=1, d=32, dv=32)
    for frames in (None, (low, high)):
        q, k, v = setting.tensors(torch.float32)
        layout = PartialLayout(2, range(60, 110), range(30, 110), RowTable(150, frames), False, q.device)
        with torch.no_grad():
            options = {"causal": True, "layout": layout, "return_lse": True}
            out, aux = attention(q, k, v, TEXTS[1], backend="band", **options)
            truth, exact = attention(q.double(), k.double(), v.double(), TEXTS[1], backend="reference", **options)
        assert error(out, truth) < 5e-5 and error(aux.lse, exact.lse) < 5e-5


def check_padding(setting, dtype, device):
    """Compare with clean padding: the kernel reads padded values as zeros, and padded keys where scores are masked."""
    q, k, v = setting.tensors(dtype, device)
    options = {"causal": True, "backend": "band", "return_lse": True, "return_entropy": True}
    options |= setting.arguments(device)
    padded = build(TEXTS[1], setting, True).layout.padding()[1][:, None, :, None].to(device)
    assert padded.any()
    with torch.no_grad():
        expected, exact = attention(q.masked_fill(padded, 0), k, v, TEXTS[1], **options)
        for bad in (torch.nan, -torch.inf, 1e30):
            spoiled = [x.masked_fill(padded, bad) for x in (k, v)]
            q = q.masked_fill(padded, torch.nan)  # zeros where they are not finite
            out, aux = attention(q, *spoiled, TEXTS[1], **options)
            for ours, clean in ((out, expected), (aux.lse, exact.lse), (aux.entropy, exact.entropy)):
                assert torch.equal(ours, clean), bad


@interprets
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of inf - inf
@pytest.mark.parametrize("rows", ["lengths", pytest.param("left", marks=pytest.mark.slow)])
def test_padding_is_never_read_interpreted(rows, every_switch):
    check_padding(make_setting(rows), torch.float32, "cpu")


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize("rows", ["lengths", "left"])
def test_padding_is_never_read(rows, every_switch):
    for d in (32, 64, 128, 256):
        check_padding(make_setting(rows, d, d, scale=7), torch.bfloat16, "cuda")


@interprets
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_padded_queries_that_nobody_reads_may_be_anything_interpreted(every_switch):
    q, k, v = make_setting("lengths").tensors(torch.float32)
    layout = Layout(2, 63, 63, q.device, Rows(lengths=torch.tensor([63, 20])))
    layout.padded_queries_matter = False
    padded = layout.padding()[0][:, None, :, None]
    with torch.no_grad():
        expected, exact = attention(q, k, v, TEXTS[1], causal=True, layout=layout, backend="band", return_lse=True)
        spoiled = [x.masked_fill(padded, torch.nan) for x in (q, k, v)]
        out, aux = attention(*spoiled, TEXTS[1], causal=True, layout=layout, backend="band", return_lse=True)
    assert torch.equal(out, expected) and torch.equal(aux.lse, exact.lse)
    assert out[1, :, 20:].abs().max() == 0


def build(text, setting, causal):
    q, k, v = setting.tensors(torch.float32)
    with torch.no_grad():
        return build_call(Inputs(q, k, v, causal=causal, **setting.arguments()), recipe_of(text).resolve())


@interprets
def test_without_switches_kernels_refuse_interpreted(monkeypatch):
    monkeypatch.setattr(switches, "_on", frozenset())
    q, k, v = make_setting("lengths").tensors(torch.float32)
    with pytest.raises(ValueError, match=r"whole rows that see a window.*far ones$"), torch.no_grad():
        attention(q, k, v, TEXTS[1], causal=True, lengths=[63, 20], backend="band")
    assert dispatch.BAND.forward_with_entropy(build(TEXTS[1], make_setting(""), True)) is None


@interprets
def test_what_intervals_are_for_interpreted(monkeypatch):
    """Padded rows and both directions without gradients; the rest goes where it went without the switch."""
    monkeypatch.setattr(switches, "_on", DEFAULTS)
    taken = [("lengths", True), ("left", True), ("documents", True), ("position_ids", True), ("lengths", False)]
    for rows, causal in (*taken, ("", False)):
        call = build(TEXTS[1], make_setting(rows), causal)
        with torch.no_grad():
            assert dispatch._choose_fastest(call) is dispatch.BAND
        call.q.requires_grad_()
        assert "no backward" in dispatch.BAND.refusal(call)
        chosen = dispatch._choose_fastest(call)
        monkeypatch.setattr(switches, "_on", frozenset())
        assert chosen is dispatch._choose_fastest(call) is not dispatch.BAND
        monkeypatch.setattr(switches, "_on", DEFAULTS)
    few = Setting(16, 100, "left", heads=2, kv_heads=1, d=32, dv=32)
    whole = Setting(63, 100, heads=2, kv_heads=1, d=32, dv=32)  # a chunk of plain causal attention
    for text, setting in ((TEXTS[1], few), (TEXTS[0], whole), (TEXTS[0], make_setting("")), (TEXTS[7], whole)):
        with torch.no_grad():
            assert "17 queries or more" in dispatch.BAND.refusal(build(text, setting, True))


@interprets
@pytest.mark.parametrize("text", [TEXTS[1], pytest.param(TEXTS[0], marks=pytest.mark.slow)])
def test_a_chunk_of_padded_rows_interpreted(text, every_switch):
    with torch.no_grad():
        for rows in ("lengths", "left"):
            compare(text, Setting(63, 110, rows, heads=2, kv_heads=1, d=32, dv=32), True, torch.float32, "cpu", False)


def test_ranges_of_queries_are_those_that_see_a_block_of_keys():
    make = torch.Generator().manual_seed(0)
    low = torch.randint(0, 90, (2, 70), generator=make, dtype=torch.int32).sort(1).values
    high = low + torch.randint(0, 30, (2, 70), generator=make, dtype=torch.int32)
    ranges = find_query_ranges((low, high), 100, 16, 8)
    for row in range(2):
        for block in range(13):
            seeing = [
                n // 16 for n in range(70) if low[row, n] < high[row, n]
                if max(low[row, n], block * 8) < min(high[row, n], block * 8 + 8)
            ]  # fmt: skip
            first, last = ranges[row, block].tolist()
            assert set(seeing) <= set(range(first, last))
    empty = find_query_ranges((low, low), 100, 16, 8)
    assert (empty[..., 0] == empty[..., 1]).all()


def test_switches_change_the_defaults():
    every = set(switches.SWITCHES)
    assert switches.parse_switches("") == DEFAULTS == every - {BAND_BACKWARD, BAND_POINTERS}
    assert switches.parse_switches("-band-rows") == DEFAULTS - {BAND_ROWS}
    assert switches.parse_switches("band-backward, -band-rows") == DEFAULTS - {BAND_ROWS} | {BAND_BACKWARD}
    assert switches.parse_switches("all,-band-rows") == every - {BAND_ROWS}
    assert switches.parse_switches("none") == set() and switches.parse_switches("none,band-rows") == {BAND_ROWS}
    for unknown in ("band-raws", "-band-raws", "-all", "--band-rows"):
        with pytest.raises(ValueError, match=rf"ISENTROPE_KERNELS: expected all, none, or some of .*, got '{unknown}'"):
            switches.parse_switches(unknown)


def test_set_switches_is_exact():
    before = switches.set_switches([BAND_BACKWARD])
    try:
        assert switches.list_switches() == {BAND_BACKWARD} and not switches.is_on(BAND_ROWS)
    finally:
        assert switches.set_switches(before) == {BAND_BACKWARD}
    assert switches.list_switches() == before


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize("d", [32, 64, 128, 256])
@pytest.mark.parametrize(("text", "rows", "causal"), [*CASES, *BOTH_DIRECTIONS], ids=str)
def test_intervals(text, rows, causal, d, every_switch):
    setting = make_setting(rows, d, d, scale=7)
    if not rows and dispatch.BAND.refusal(build(text, make_setting(rows, d, d), causal)) is not None:
        pytest.skip("whole rows in triangles are PyTorch's")
    compare(text, setting, causal, torch.bfloat16, "cuda", gradients=False)
    compare(text, setting, causal, torch.bfloat16, "cuda", gradients=True)


@pytest.mark.gpu
@pytest.mark.parametrize("text", TEXTS[1:7])
def test_loads_by_pointers(text, monkeypatch):
    from isentrope.backends.band import kernel

    monkeypatch.setattr(switches, "_on", frozenset((*ALL, BAND_POINTERS)))
    monkeypatch.setattr(kernel, "has_copy_engine", lambda device: False)
    for d in (32, 64, 128, 256):
        for rows in ("lengths", "documents"):
            compare(text, make_setting(rows, d, d, scale=7), True, torch.bfloat16, "cuda", gradients=False)
