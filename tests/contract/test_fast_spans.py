"""The band's kernel for Hopper, which attends over near and far keys in one pass, and which calls it takes."""

from __future__ import annotations

import pytest
import torch

from isentrope.backends.band import spans
from isentrope.backends.band.key_span import MAX_SPANS
from isentrope.backends.band.spans import _find_places
from isentrope.builder import Inputs, build_call
from isentrope.core import switches
from isentrope.core.caching import clear_caches
from isentrope.core.layout import Layout, Rows
from isentrope.core.partial_layout import PartialLayout, RowTable
from isentrope.core.region import Region, Span
from isentrope.core.switches import BAND_BACKWARD, BAND_ENTROPY, DEFAULTS
from isentrope.functional import attention
from tests.contract.matrix import Setting
from tests.contract.test_fast import RECIPES, error, recipe_of
from tests.contract.test_fast_rows import TEXTS, check_padding, compare, make_setting

ONLY_HOPPER = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability()[0] != 9, reason="the kernel is for Hopper alone"
)
METHODS = (
    "rope+window:size=40",
    "rerope:window=24+infoscale:train_length=16",
    "leakyrerope:window=24,leak=4",
    "selfextend:window=24,group=4+cosine:alpha=16",
    "rerope:window=24+cosine:alpha=16+ssmax:heads=6,bias=True",
    "rerope:window=24+logn:train_length=16,keys=far+share:beta=0.5,reference=8",
)
ALL = DEFAULTS | {BAND_BACKWARD}
WAYS = (ALL, ALL - {BAND_ENTROPY})  # entropy in the same pass, and not


@pytest.fixture
def launches(monkeypatch):
    """Let the kernel take short rows too, and count what it takes."""
    from isentrope.backends.band.span_launch import SpanLaunch

    count, run = [], SpanLaunch.run

    def counted(launch, *tensors):
        count.append(launch)
        return run(launch, *tensors)

    monkeypatch.setattr(switches, "_on", ALL)
    monkeypatch.setattr(spans, "MIN_TILES", 0)
    monkeypatch.setattr(SpanLaunch, "run", counted)
    clear_caches(keep_compiled=True)  # whether it takes a call is kept with that
    yield count
    clear_caches(keep_compiled=True)


@pytest.mark.gpu
@ONLY_HOPPER
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("text", METHODS)
def test_prompts(text, dtype, d, launches, monkeypatch):
    for queries, keys in ((441, 441), (128, 128), (300, 1001), (1001, 1001)):
        setting = Setting(queries, keys, heads=6, kv_heads=3, d=d, dv=d)
        for switched in WAYS:
            monkeypatch.setattr(switches, "_on", switched)
            with torch.no_grad():
                compare(text, setting, True, dtype, "cuda", gradients=False)
    assert len(launches) >= 8


@pytest.mark.gpu
@ONLY_HOPPER
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("rows", ["lengths", "left", "documents", "position_ids", "no_keys", ""])
@pytest.mark.parametrize("text", METHODS)
def test_rows_and_directions(text, rows, d, launches, monkeypatch):
    setting = make_setting(rows, d, d, scale=7)
    for causal in (True, False):
        for switched in WAYS:
            monkeypatch.setattr(switches, "_on", switched)
            with torch.no_grad():
                compare(text, setting, causal, torch.bfloat16, "cuda", gradients=False)
        if rows or not causal:
            compare(text, setting, causal, torch.bfloat16, "cuda", gradients=True)
    assert len(launches) >= 3


@pytest.fixture
def gradients(monkeypatch):
    """Count what the backward for Hopper takes."""
    from isentrope.backends.band import hopper_backward_kernel

    count, launch = [], hopper_backward_kernel.launch
    monkeypatch.setattr(hopper_backward_kernel, "launch", lambda *a, **k: count.append(a) or launch(*a, **k))
    return count


@pytest.mark.gpu
@ONLY_HOPPER
def test_gradients_in_any_order(gradients):
    """Of an output whose gradient has a stride between the entries of a vector."""
    q, k, v = (torch.randn(2, 4, 300, 64, device="cuda").bfloat16().requires_grad_() for _ in range(3))
    out = attention(q, k, v, METHODS[1], causal=True, lengths=[300, 200], backend="band")
    grad = torch.randn(*out.shape, 2, device="cuda").bfloat16()[..., 0]
    ours = torch.autograd.grad(out, (q, k, v), grad, retain_graph=True)
    expected = torch.autograd.grad(out, (q, k, v), grad.contiguous())
    assert all(torch.equal(x, y) for x, y in zip(ours, expected, strict=True)) and gradients


@pytest.mark.gpu
@ONLY_HOPPER
@pytest.mark.parametrize("text", METHODS[1:])
def test_gradients(text, launches, gradients):
    for d in (64, 128):
        setting = Setting(441, 441, heads=6, kv_heads=3, d=d, dv=d)
        compare(text, setting, True, torch.bfloat16, "cuda", gradients=True)
    assert launches and gradients


@pytest.mark.gpu
@ONLY_HOPPER
@pytest.mark.parametrize("rows", ["lengths", "left"])
def test_padding_may_be_anything(rows, launches, monkeypatch):
    for d in (64, 128):
        for switched in WAYS:
            monkeypatch.setattr(switches, "_on", switched)
            check_padding(make_setting(rows, d, d, scale=7), torch.bfloat16, "cuda")
    assert launches


@pytest.mark.gpu
@ONLY_HOPPER
@pytest.mark.parametrize("left_padded", [False, True])
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("text", METHODS[:4])
def test_gradients_with_any_padding(text, d, left_padded, launches, gradients):
    """NaN in padding changes no gradient, and has none itself."""
    generator = torch.Generator("cuda").manual_seed(0)
    sizes, lengths = ((2, 6, 700, d), (2, 3, 700, d), (2, 3, 700, d)), torch.tensor([700, 300], device="cuda")
    clean = [torch.randn(size, generator=generator, device="cuda").bfloat16() for size in sizes]
    layout = Layout(2, 700, 700, clean[0].device, Rows(lengths=lengths, left_padded=left_padded))
    layout.padded_queries_matter = False
    padded = layout.padding()[0][:, None, :, None]
    results = []
    for bad in (0.0, torch.nan, torch.inf):
        q, k, v = (x.masked_fill(padded, bad).requires_grad_() for x in clean)
        out = attention(q, k, v, recipe_of(text, "cuda"), causal=True, layout=layout, backend="band")
        weights = torch.linspace(0.5, 1.5, out.numel(), device="cuda", dtype=out.dtype).view_as(out)
        results.append(torch.autograd.grad(out, (q, k, v), weights.masked_fill(padded, bad)))
    for grads in results:
        for ours, expected in zip(grads, results[0], strict=True):
            assert torch.equal(ours, expected)
            assert not ours.masked_select(padded).any()
    assert launches and gradients


@pytest.mark.gpu
@ONLY_HOPPER
@pytest.mark.parametrize("text", [METHODS[0], METHODS[1], METHODS[3]])
def test_gradients_of_a_part_of_a_row(text, launches, gradients):
    """As processes that share a row compute them, each for its queries and some of the keys."""
    queries, keys = range(512, 1024), range(300, 900)
    generator = torch.Generator("cuda").manual_seed(0)
    inputs = [
        torch.randn(2, heads, len(part), 64, generator=generator, device="cuda").bfloat16()
        for heads, part in ((6, queries), (3, keys), (3, keys))
    ]
    results = []
    for dtype, backend in ((torch.bfloat16, "band"), (torch.float64, "reference")):
        layout = PartialLayout(2, queries, keys, RowTable(1024), False, inputs[0].device)
        leaves = [x.to(dtype).requires_grad_() for x in inputs]
        out = attention(*leaves, recipe_of(text, "cuda"), causal=True, layout=layout, backend=backend)
        weights = torch.linspace(0.5, 1.5, out.numel(), device="cuda", dtype=torch.float64).view_as(out)
        results.append([out.detach(), *torch.autograd.grad((out.double() * weights).sum(), leaves)])
    for ours, exact in zip(*results, strict=True):
        assert error(ours, exact) < 8e-2
    assert gradients


@pytest.mark.gpu
@ONLY_HOPPER
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("text", ["rope+window:size=700", "rerope:window=700"])
def test_many_tiles_of_one_launch(text, d, causal, launches):
    """More tiles than programs, each of which takes several, of one to three spans, and twice the same bits."""
    setting = Setting(3001, 3001, batch=3, heads=12, kv_heads=3, d=d, dv=d)
    q, k, v = setting.tensors(torch.bfloat16, "cuda")
    with torch.no_grad():
        out, again = (attention(q, k, v, text, causal=causal, backend="band") for _ in range(2))
        truth = attention(q.float(), k.float(), v.float(), text, causal=causal, backend="chunked")
    assert len(launches) == 2 and torch.equal(out, again)
    assert error(out, truth.double()) < 2e-2


@pytest.mark.gpu
@ONLY_HOPPER
@pytest.mark.parametrize("left_padded", [False, True])
@pytest.mark.parametrize("d", [64, 128])
def test_many_padded_tiles_of_one_launch(d, left_padded, launches):
    """Tiles of nothing but padding, which is NaN, between those that programs take."""
    setting = Setting(3001, 3001, batch=3, heads=12, kv_heads=3, d=d, dv=d)
    check_many_padded_tiles("cuda", torch.bfloat16, "band", setting, torch.tensor([3001, 40, 1500]), left_padded)
    assert launches


def check_many_padded_tiles(device, dtype, backend, setting, lengths, left_padded):
    """Compare output, log-sum-exp and entropy of padded rows, outside their padding, with those in fp32."""
    tensors, rows = setting.tensors(dtype, device), Rows(lengths=lengths.to(device), left_padded=left_padded)
    results = []
    for kind, name, padding in ((dtype, backend, torch.nan), (torch.float32, "chunked", 0.0)):
        layout = Layout(setting.batch, setting.queries, setting.keys, tensors[0].device, rows)
        layout.padded_queries_matter = False
        padded = layout.padding()[0][:, None]
        inputs = [x.to(kind).masked_fill(padded[..., None], padding) for x in tensors]
        options = {"causal": True, "layout": layout, "return_lse": True, "return_entropy": True}
        with torch.no_grad():
            out, aux = attention(*inputs, "rerope:window=700", backend=name, **options)
        results.append([out.float().masked_fill(padded[..., None], 0.0)])
        results[-1] += [x.float().masked_fill(padded, 0.0) for x in (aux.lse, aux.entropy)]
    for ours, exact in zip(*results, strict=True):
        assert error(ours, exact.double()) < 2e-2


def test_whole_rows_without_a_querys_own_key_are_left_to_other_kernels():
    """Its tiles might have no key at all."""
    layout = Layout(1, 60, 60, torch.device("cpu"))
    assert _find_places(layout, (Region((Span(low=20),)),)) is None
    assert _find_places(layout, (Region((Span(high=-19),)),)) is None
    assert _find_places(layout, (Region((Span(low=-20, high=1),)),)) is not None


def test_places_are_what_regions_see():
    """Spans of whole rows by distances, and of padded rows by intervals."""
    count = 0
    for text in (*METHODS, *RECIPES, *TEXTS):
        for rows, queries, keys in (("", 60, 60), ("", 13, 60), ("lengths", 60, 60), ("documents", 60, 60)):
            for causal in (True, False):
                setting = Setting(queries, keys, rows, heads=6)
                q, k, v = setting.tensors(torch.float32)
                call = build_call(Inputs(q, k, v, causal=causal, **setting.arguments()), recipe_of(text).resolve())
                layout, regions = call.layout, tuple(branch.region for branch in call.branches)
                places = _find_places(layout, regions)
                if places is None:
                    continue
                assert len(places) <= MAX_SPANS
                seen = [torch.zeros(layout.visible(region)[:, 0].shape, dtype=torch.bool) for region in regions]
                slot = torch.arange(keys)
                for n, left, right, interval in places:
                    if interval is None:
                        apart = slot - torch.arange(keys - queries, keys)[:, None]
                        part = ((apart >= -left) & (apart <= right))[None]
                    else:
                        part = (slot >= interval[0][..., None]) & (slot < interval[1][..., None])
                    assert not (seen[n] & part).any()
                    seen[n] = seen[n] | part
                for region, ours in zip(regions, seen, strict=True):
                    truth = layout.visible(Region(region.spans))[:, 0]
                    if rows and not layout.padded_queries_matter:
                        truth = truth & ~layout.padding()[0][..., None]
                    assert torch.equal(ours.expand_as(truth), truth), (text, rows, causal)
                count += 1
    assert count > 100
