"""A linear bias in the band kernel: what it leaves out is below rounding, the rest is exact."""

from __future__ import annotations

from dataclasses import replace
from math import inf, log

import pytest
import torch
from torch.autograd import forward_ad

from isentrope import dispatch
from isentrope.builder import Inputs, build_call
from isentrope.core import switches
from isentrope.core.switches import BAND_ENTROPY, BAND_SLOPES, DEFAULTS
from isentrope.functional import attention
from tests.contract.matrix import Setting
from tests.contract.test_fast import error, hopper, interprets, recipe_of

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")
from isentrope.backends.band.slopes_kernel import find_reach  # noqa: E402  (needs Triton)

# the steepest of six slopes leaves out half of the keys
SMALL = Setting(150, 150, batch=1, heads=6, kv_heads=3, d=32, dv=32)
CHUNK = Setting(40, 170, batch=1, heads=3, kv_heads=1, d=32, dv=64)
ONE_HEAD = Setting(70, 70, heads=1, kv_heads=1, d=64, dv=32)
CASES = [
    ("alibi", SMALL, True),
    ("alibi", SMALL, False),
    ("alibi", CHUNK, True),
    ("alibi", CHUNK, False),
    ("alibi", ONE_HEAD, True),
    ("alibi+infoscale:train_length=16", SMALL, True),
    ("alibi+cosine:alpha=16+infoscale:train_length=16", CHUNK, True),
    ("alibi+window:size=40", SMALL, True),
    ("alibi+window:size=100", SMALL, False),
    ("alibi+window:size=30", CHUNK, True),
]


def compare(text, setting, causal, dtype, device):
    """Compare output, log-sum-exp and entropy with the reference in fp64."""
    recipe, results = recipe_of(text, device), []
    for kind, backend in ((dtype, "band"), (torch.float64, "reference")):
        q, k, v = (x.to(kind) for x in setting.tensors(dtype, device))
        options = {"causal": causal, "return_lse": True, "return_entropy": True, "backend": backend}
        with torch.no_grad():
            out, aux = attention(q, k, v, recipe, **options)
        results.append((out, aux.lse, aux.entropy))
    near = 5e-6 if dtype == torch.float32 else 2e-2
    for actual, exact in zip(*results, strict=True):
        assert (actual - exact).abs().max() < near * max(1.0, exact.abs().max().item())


@interprets
@pytest.mark.parametrize(("text", "setting", "causal"), CASES, ids=str)
def test_slopes_interpreted(text, setting, causal):
    compare(text, setting, causal, torch.float32, "cpu")


@interprets
def test_slopes_in_half_precision_interpreted():
    compare("alibi+infoscale:train_length=16", SMALL, True, torch.float16, "cpu")


@interprets
def test_slopes_with_loads_by_pointers_interpreted(monkeypatch):
    from isentrope.backends.band import kernel

    monkeypatch.setattr(kernel, "has_copy_engine", lambda device: False)
    compare("alibi", SMALL, True, torch.float32, "cpu")


@interprets
def test_entropy_without_its_switch_interpreted(monkeypatch):
    monkeypatch.setattr(switches, "_on", DEFAULTS - {BAND_ENTROPY})
    compare("alibi", SMALL, True, torch.float32, "cpu")


def make_call(q, k, v, slopes, causal=True, text="alibi"):
    call = build_call(Inputs(q, k, v, causal=causal), recipe_of(text).resolve())
    return replace(call, branches=[replace(call.branches[0], slopes=torch.tensor(slopes, dtype=torch.float64))])


def run(q, k, v, slopes, causal=True):
    """Return output and log-sum-exp of the kernel, and those of the reference in fp64."""
    with torch.no_grad():
        call = make_call(q, k, v, slopes, causal)
        assert dispatch.BAND.refusal(call) is None
        exact = make_call(q.double(), k.double(), v.double(), slopes, causal)
        return *dispatch.BAND.forward(call, True), *dispatch.REFERENCE.forward(exact, True)


@interprets
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("size", [0.5, 4.0])
def test_largest_scores_far_away_interpreted(size, causal):
    """The own key has the lowest score that norms allow, and keys as far as some count the highest."""
    n, d = 260, 32
    direction = torch.ones(d) / d**0.5
    q = (size * d**0.5 * direction).expand(1, 2, n, d).contiguous()  # scores are ± size · scale · d = ± size · d^0.5
    k = (-(d**0.5) * direction).expand(1, 1, n, d).contiguous()
    far = torch.arange(n) % 130 < 65
    k[:, :, far] *= -1
    v = torch.randn(1, 1, n, d, generator=torch.Generator().manual_seed(0))
    for slopes in ([1.0, 0.25], [0.31, 3.0], [0.02, 0.0]):
        out, lse, truth, exact = run(q, k, v, slopes, causal)
        assert error(out, truth) < 3e-6 and (lse - exact).abs().max() < 3e-6 * max(1.0, exact.abs().max().item())


@interprets
def test_far_keys_are_left_out_interpreted():
    """Values that are not numbers show which keys are read: none too far for a steep slope, all for none."""
    q, k, v = Setting(200, 200, batch=1, heads=3, kv_heads=1, d=32, dv=32).tensors(torch.float32)
    v[:, :, :64] = torch.nan
    slopes = [2.0, 0.0, -0.5]
    out, *_ = run(q, k, v, slopes)
    assert out[:, 0, -40:].isfinite().all() and out[:, 1:].isnan().all()


@interprets
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter
@pytest.mark.parametrize("bad", [torch.nan, inf, -inf, 1e30])
def test_numbers_that_are_not_finite_leave_nothing_out_interpreted(bad):
    """1e30 is finite, its square is not."""
    setting = Setting(200, 200, batch=1, heads=2, kv_heads=2, d=64, dv=32)
    for place in ("query", "key"):
        q, k, v = setting.tensors(torch.float32)
        (q if place == "query" else k)[0, 0, 3, 0] = bad
        v[:, :, 0] = torch.nan  # far from the last queries
        out, *_ = run(q, k, v, [2.0, 2.0])
        seen = out.isnan().any(-1)[0]
        assert not seen[1, -40:].any()  # heads and rows of others are as they were
        assert seen[0, -40:].all() if place == "key" else not seen[0, -40:].any()


@triton.jit
def _store_reach(q, own, norm, slope, out, scale, keys, ROWS: tl.constexpr, SIZE: tl.constexpr):
    row = tl.arange(0, ROWS)
    q_block = tl.load(q + row[:, None] * SIZE + tl.arange(0, SIZE)[None, :])
    own_keys = own + row[:, None] * SIZE
    reach = find_reach(q_block, own_keys, row < ROWS, tl.load(norm), tl.load(slope), scale, keys, SIZE)
    tl.store(out, reach)


def find_limit(q, k, slope, scale, keys):
    """Return the distance beyond which the kernel leaves out keys of a block of queries, k being their own first."""
    out, m = torch.zeros(1, dtype=torch.int32), torch.tensor([slope / log(2)])
    norm = torch.linalg.vector_norm(k, dim=-1).amax()[None]
    _store_reach[(1,)](q, k, norm, m, out, scale / log(2), keys, *q.shape)
    return out.item()


def sum_weights_beyond(limit, q, k, slope, scale, keys):
    """Return the largest sum of weights beyond a limit, relative to a query's own key: each has its best key there."""
    scores = scale * (q.double() @ k.double().mT)
    gap = scores.amax(1) - scores.diagonal()
    distance = torch.arange(limit + 1, keys, dtype=torch.float64)
    return (2 * torch.exp(gap[:, None] - slope * distance).sum(1)).max().item()


@interprets
def test_what_is_left_out_is_below_rounding_interpreted():
    make = torch.Generator().manual_seed(0)
    largest, ends = 0.0, 0
    for turn in range(60):
        size = 10.0 ** torch.empty(2).uniform_(-2, 1, generator=make)
        q, k = (torch.randn(16, 32, generator=make) * x for x in size)
        k[turn % 16] = -q[turn % 16] * 3  # some query has the lowest score for its own key,
        k = torch.cat((k, -k))  # and a key at the bound elsewhere
        slope, keys = float(torch.empty(()).uniform_(0.01, 4, generator=make)), 4000
        limit = find_limit(q, k, slope, 32**-0.5, keys)
        beyond = sum_weights_beyond(limit, q, k, slope, 32**-0.5, keys)
        assert beyond <= 2.0**-24
        largest, ends = max(largest, beyond), ends + (limit < keys)
    assert largest > 2.0**-30 and ends > 30  # the limit is not much further than it has to be


@interprets
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter
def test_limits_at_the_edges_interpreted():
    q, k = torch.randn(16, 32), torch.randn(16, 32)
    for slope in (0.0, -1.0, torch.nan, 1e-30):
        assert find_limit(q, k, slope, 0.2, 500) == 500
    for bad in (torch.nan, inf, -inf, 1e30):
        spoiled = q.clone()
        spoiled[5, 7] = bad
        assert find_limit(spoiled, k, 2.0, 0.2, 500) == find_limit(k, spoiled, 2.0, 0.2, 500) == 500
    assert find_limit(q, k, 1e9, 0.2, 500) <= 1 and find_limit(q * 0, k, 1.0, 0.2, 500) < 30
    # squares below the range of fp32: norms are not 0
    assert find_limit(q * 1e30, k * 1e-30, 1.0, 0.2, 500) == 500


def refusal(text="alibi", setting=SMALL, causal=True, dtype=torch.float32, **rows):
    q, k, v = setting.tensors(dtype)
    return dispatch.BAND.refusal(build_call(Inputs(q, k, v, causal=causal, **rows), recipe_of(text).resolve()))


@interprets
def test_what_slopes_are_for_interpreted(monkeypatch):
    with torch.no_grad():
        assert all(refusal(text, setting, causal) is None for text, setting, causal in CASES)
        for text, setting in (
            ("alibi", replace(SMALL, queries=16)),  # a mask costs less
            ("alibi", replace(SMALL, queries=151)),  # some queries have no key of their own
            ("alibi+sink:sinks=3,size=20", SMALL),
        ):
            assert "no bias" in refusal(text, setting)
        for rows in ("lengths", "left", "documents", "position_ids"):
            assert "no bias" in refusal(**replace(SMALL, rows=rows).arguments())
        call = make_call(*SMALL.tensors(torch.float32), [0.5] * 6)
        assert dispatch._choose_fastest(call) is dispatch.BAND and dispatch.BAND.computes_all(call)
        assert "no bias" in dispatch.DECODE.refusal(
            make_call(*replace(SMALL, queries=1).tensors(torch.float32), [1.0] * 6)
        )
        monkeypatch.setattr(switches, "_on", DEFAULTS - {BAND_SLOPES})
        assert "no bias" in refusal()
    monkeypatch.setattr(switches, "_on", DEFAULTS)
    call.q.requires_grad_()
    assert "no bias" in dispatch.BAND.refusal(call)


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize("d", [32, 64, 128, 256])
@pytest.mark.parametrize(("text", "setting", "causal"), CASES, ids=str)
def test_slopes(text, setting, causal, d):
    for dtype in (torch.bfloat16, torch.float16):
        wide = replace(setting, queries=setting.queries * 7, keys=setting.keys * 7, d=d, dv=d)
        compare(text, wide, causal, dtype, "cuda")


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("keys", [333, 70000, 131072])
def test_slopes_of_long_rows(keys, dtype):
    """Against fp64 for the last queries: no further off than FlexAttention, twice over."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 8, keys, 128, device="cuda", dtype=dtype) for _ in range(3))
    tail, off = slice(-64, None), {}
    truth = attention(q[:, :, tail].double(), k.double(), v.double(), "alibi", causal=True, backend="chunked")
    for backend in ("band", "flex"):
        with torch.no_grad():
            out = attention(q, k, v, "alibi", causal=True, backend=backend)
        off[backend] = (out[:, :, tail].double() - truth).norm() / truth.norm()
    assert off["band"] <= 2 * max(off["flex"].item(), torch.finfo(dtype).eps / 2), off


@interprets
def test_tangents_are_refused_interpreted():
    """A launch would drop them without a word; a backend chosen before does not stay."""
    q, k, v = SMALL.tensors(torch.float32)
    options = {"causal": True, "return_lse": True}
    assert attention(q, k, v, "alibi", **options)[1].backend == "band"
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(q, torch.ones_like(q))
        with pytest.raises(ValueError, match="forward-mode"):
            attention(dual, k, v, "alibi", backend="band", **options)
        call = build_call(Inputs(dual, k, v, causal=True), recipe_of("alibi"))
        assert dispatch.choose_backend(call, "auto").name != "band"
