"""The kernels that only a GPU has, against the dense reference: bands, one query a row, heads in turn."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.autograd import forward_ad

import isentrope as ise
from isentrope import dispatch
from isentrope.backends.band.backend import plan_band
from isentrope.builder import Inputs, build_call
from isentrope.core import compile as compiled
from isentrope.core.region import Region
from isentrope.core.rotation import _rotate_and_scale, compute_angles, rotate_and_scale
from isentrope.core.switches import BAND_ENTROPY, list_switches, set_switches
from isentrope.functional import attention
from tests.contract.matrix import Setting
from tests.fixtures.turns import in_turns

hopper = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability()[0] < 9, reason="band wants Hopper or later"
)
INTERPRETED = compiled.HAS_TRITON and compiled.TRITON_INTERPRETED
RECIPES = (
    "rope+infoscale:train_length=16",
    "cosine:alpha=16+rope+infoscale:train_length=16",
    "rerope:window=24+infoscale:train_length=16",
    "leakyrerope:window=24,leak=4",
    "selfextend:window=24,group=4",
    "rope+window:size=40",
    "rope+sink:sinks=3,size=20",
    "rerope:window=24+lambda:sinks=5,window=24",
    "rerope:window=24+cosine:alpha=16+ssmax:heads=6,bias=True",
)
ROWS = (
    Setting(333, 333, heads=6, d=64, dv=64),
    Setting(1, 700, heads=6, d=64, dv=64),
    Setting(77, 200, heads=6, kv_heads=6, d=64, dv=32),
    Setting(130, 130, batch=1, heads=6, d=40, dv=40),
)

FAR = (*RECIPES[2:5], RECIPES[8])
SQUARE = Setting(333, 333, heads=6, d=64, dv=64)
FEWER = Setting(77, 500, batch=1, heads=6, kv_heads=3, d=64, dv=32)
NARROW = Setting(130, 130, batch=1, heads=6, kv_heads=3, d=64, dv=32)
LARGE = Setting(600, 600, batch=1, heads=6, kv_heads=1, d=128, dv=128)


def error(actual, truth):
    return ((actual.double() - truth).abs().max() / truth.abs().max().clamp_min(1e-3)).item()


def recipe_of(text, device="cpu"):
    recipe = ise.Recipe.parse(text)
    for part in recipe.learned:
        part.to(device)
    return recipe


def check_gradients(text, setting, causal, dtype, device, backend):
    q, k, v = setting.tensors(dtype, device)
    recipe = recipe_of(text, device)
    actual, exact = [], []
    for kind, name, results in ((dtype, backend, actual), (torch.float64, "reference", exact)):
        inputs = [x.detach().to(kind).requires_grad_() for x in (q, k, v)]
        out, aux = attention(*inputs, recipe, causal=causal, backend=name, return_lse=True)
        weights = torch.linspace(0.5, 1.5, out.numel(), device=device, dtype=torch.float64).view_as(out)
        (out.double() * weights).sum().backward()
        results += [out.detach(), aux.lse.detach(), *(x.grad for x in inputs)]
    near = 1e-4 if dtype == torch.float32 else 2e-2
    for name, a, b in zip(("out", "lse", "dq", "dk", "dv"), actual, exact, strict=True):
        assert error(a, b) < (near if name in ("out", "lse") else 2 * near), name


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("setting", ROWS, ids=str)
@pytest.mark.parametrize("text", RECIPES)
def test_bands_forward_and_backward(text, setting, causal):
    check_gradients(text, setting, causal, torch.bfloat16, "cuda", "sdpa")


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize("text", FAR)
def test_band_backward(text):
    for setting in (SQUARE, NARROW, LARGE):
        check_gradients(text, setting, True, torch.bfloat16, "cuda", "band")


@pytest.mark.parametrize(("queries", "keys"), [(60, 60), (13, 60)])
def test_what_is_asked_is_cut_into_what_kernels_have(queries, keys):
    cuts = 0
    for text in (*RECIPES, "(window:size=9|sink:sinks=2,size=3)&lambda:sinks=1,window=30", "rerope:window=9"):
        for causal in (True, False):
            recipe = recipe_of(text)
            q, k, _ = Setting(queries, keys, batch=1, heads=6).tensors(torch.float32)
            call = build_call(Inputs(q, k, k, causal=causal), recipe)
            layout, regions = call.layout, [branch.region for branch in call.branches]
            if (plan := plan_band(regions, queries, keys, rectangles=True, both=True)) is None:
                continue
            apart = layout.key[:, None] - layout.query[..., None]
            seen = {plan.near_branch: (apart >= -plan.left) & (apart <= plan.right)}
            if plan.sink_branch is not None:
                early = (layout.key < plan.sinks)[:, None] & (apart < -plan.left)
                seen[plan.sink_branch] = seen.get(plan.sink_branch, False) | early
            for n, span, part in plan.far:
                far = layout.visible(Region((span,))).view(1, queries, keys)
                seen[n] = seen.get(n, False) | far
                assert part.full or part.causal or part.anticausal
            assert seen.keys() == set(range(len(regions)))
            for n, actual in seen.items():
                truth = layout.visible(regions[n]).view(queries, keys)
                assert torch.equal(actual.view(queries, keys), truth), (text, causal)
            cuts += 1
    assert cuts >= (10 if queries == keys else 8)


def check_band(text, causal, setting, dtype, device):
    q, k, v = setting.tensors(dtype, device)
    recipe = recipe_of(text, device)
    given = {"causal": causal, "return_lse": True, "return_entropy": True}
    before = set_switches(list_switches() - {BAND_ENTROPY})  # which computes intervals in place of bands
    with torch.no_grad():
        try:
            actual, aux = attention(q, k, v, recipe, backend="band", **given)
        finally:
            set_switches(before)
        truth, exact = attention(q.double(), k.double(), v.double(), recipe, backend="reference", **given)
    bound = 5e-5 if dtype == torch.float32 else 2e-2
    assert error(actual, truth) < bound and error(aux.lse, exact.lse) < bound
    assert (aux.entropy - exact.entropy).abs().max() < (1e-3 if dtype == torch.float32 else 0.3)


BANDS = [(text, True, SQUARE) for text in RECIPES[2:]] + [(text, True, FEWER) for text in RECIPES[5:8]]
BANDS += [
    ("sink:sinks=1,size=30&window:size=34", True, Setting(73, 73, heads=6, d=64, dv=64)),  # far keys end before queries
    ("rope+sink:sinks=5,size=3", False, SQUARE),
    ("rope+sink:sinks=40,size=3", True, Setting(5, 5, heads=6, d=64, dv=64)),
]
BANDS += [("rope+window:size=40", False, SQUARE), ("window:size=9", False, FEWER)]
WIDE = ("window:size=500", False, LARGE)
NOT_SO_WIDE = ("window:size=100", False, LARGE)  # where it is shortened


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize("given", [*BANDS, WIDE, *((text, True, LARGE) for text in RECIPES[2:])], ids=str)
def test_band(given):
    check_band(*given, torch.bfloat16, "cuda")


def check_memory_order(dtype, device):
    """Off their place, in rows of odd length, shared by all rows of the batch, and all of that together."""
    make = torch.Generator(device).manual_seed(0)

    def vectors(batch, row, first=0):
        x = torch.randn(batch, 3, 90, row, generator=make, device=device).to(dtype)
        return x[..., first : first + 64].expand(2, -1, -1, -1)

    q = vectors(2, 67, 1)
    every = [vectors(*kind) for kind in ((2, 64), (2, 67, 1), (1, 67, 1), (1, 64), (2, 68), (2, 72, 1))]
    for k, v in zip(every, (*every[1:], every[0]), strict=True):
        with torch.no_grad():
            actual = attention(q, k, v, "window:size=9", causal=True, backend="band")
            truth = attention(q.double(), k.double(), v.double(), "window:size=9", causal=True, backend="reference")
        assert error(actual, truth) < (5e-5 if dtype == torch.float32 else 2e-2)


@pytest.mark.gpu
@hopper
def test_band_takes_any_memory_order():
    check_memory_order(torch.bfloat16, "cuda")


def check_fold(turned, heated, normalise, size, dtype, device):
    make = torch.Generator(device).manual_seed(0)
    x = torch.randn(2, 11, 70, size, generator=make, device=device).to(dtype)[:, 1:]
    position = torch.arange(70.0, device=device)[None]
    turn = (
        compute_angles(position, torch.rand(size // 2, generator=make, device=device), torch.float32)
        if turned
        else None
    )
    tau = torch.rand(2, 10, 70, generator=make, device=device) + 0.5 if heated else None
    if turn is None and tau is None and not normalise:
        return
    results = []
    for run in (
        rotate_and_scale,
        lambda x, turn, tau, normalise: _rotate_and_scale(x, *(turn or (None, None)), tau, normalise, False),
    ):
        given = x.detach().clone(memory_format=torch.preserve_format).requires_grad_(not normalise)
        out = run(given, turn, tau, normalise)
        out.sum().backward() if given.requires_grad else None
        results.append([out.detach(), given.grad])
    bound = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    for a, b in zip(*results, strict=True):
        if b is not None:
            torch.testing.assert_close(a, b, **bound)


FOLDS = [(t, h, n, size) for t in (True, False) for h in (True, False) for n in (True, False) for size in (64, 40)]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("given", FOLDS)
def test_fold(given, dtype):
    check_fold(*given, dtype, "cuda")


interprets = pytest.mark.skipif(
    not INTERPRETED, reason="kernels run on a CPU with TRITON_INTERPRET=1, as `make interpreted` does"
)


def shortened(setting, text):
    """One row of it, of three blocks of queries at most, and few heads: the interpreter is slow."""
    less = max(0, setting.queries - 140)
    return take_few_heads(replace(setting, batch=1, queries=setting.queries - less, keys=setting.keys - less), text)


def take_few_heads(setting, text):
    """One key head and the query heads that share it, unless the recipe has a number for each of six heads."""
    few = replace(setting, heads=setting.heads // setting.kv_heads, kv_heads=1)
    return setting if "heads=6" in text or "(" in text else few


def check_decoding(text, rows, dtype, device):
    keys = (700 if rows else 1300) // (1 if device == "cuda" else 4)
    batch = 1 if device == "cpu" and not rows else 2  # the interpreter is slow
    setting = Setting(1, keys, rows, batch=batch, heads=6, kv_heads=2, d=64, dv=32)
    setting = take_few_heads(setting, text) if device == "cpu" else setting
    q, k, v = setting.tensors(dtype, device)
    recipe = recipe_of(text, device)
    given = {"causal": True, "return_lse": True, "return_entropy": True} | setting.arguments(device)
    with torch.no_grad():
        actual, aux = attention(q, k, v, recipe, backend="decode", **given)
        truth, exact = attention(q.double(), k.double(), v.double(), recipe, backend="reference", **given)
    bound = 5e-5 if dtype == torch.float32 else 2e-2
    assert error(actual, truth) < bound and error(aux.lse, exact.lse) < bound
    assert (aux.entropy - exact.entropy).abs().max() < (1e-3 if dtype == torch.float32 else 0.3)
    assert aux.backend == "decode"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", ["", "lengths", "left"])
@pytest.mark.parametrize("text", RECIPES)
def test_decoding(text, rows, dtype):
    check_decoding(text, rows, dtype, "cuda")


# whole and padded rows, which take turns; bf16 is not known to the interpreter
HALVES = [("", torch.float32), ("", torch.float16), ("lengths", torch.float32), ("left", torch.float32)]


@interprets
@pytest.mark.parametrize(("text", "rows", "dtype"), in_turns(RECIPES, HALVES), ids=str)
def test_decoding_interpreted(text, rows, dtype):
    check_decoding(text, rows, dtype, "cpu")


@interprets
@pytest.mark.parametrize("rows", ["lengths", "left"])
def test_interpreted_decoding_never_reads_padding(rows):
    setting = Setting(1, 170, rows, heads=6, kv_heads=2, d=32, dv=32)
    q, k, v = setting.tensors(torch.float32)
    options = setting.arguments() | {"causal": True, "backend": "decode", "return_entropy": True}
    live = torch.arange(170) < 113 if rows == "lengths" else torch.arange(170) >= 170 - 113  # of the second row
    texts = ("rope", "rerope:window=24+cosine:alpha=16")
    for text, bad in zip(texts if rows == "lengths" else texts[::-1], (torch.nan, torch.inf), strict=True):
        expected, exact = attention(q, k, v, text, **options)
        padding = torch.arange(2)[:, None, None, None].bool() & ~live[:, None]
        spoiled = [x.masked_fill(padding, bad) for x in (k, v)]
        out, aux = attention(q, *spoiled, text, **options)
        assert torch.equal(out, expected) and torch.equal(aux.entropy, exact.entropy)


@interprets
@pytest.mark.parametrize(("text", "causal", "setting"), [*BANDS, NOT_SO_WIDE], ids=str)
def test_band_interpreted(text, causal, setting):
    check_band(text, causal, shortened(setting, text), torch.float32, "cpu")


@interprets
@pytest.mark.parametrize(("text", "setting"), in_turns(FAR, (SQUARE, NARROW)), ids=str)
def test_band_backward_interpreted(text, setting):
    check_gradients(text, shortened(setting, text), True, torch.float32, "cpu", "band")


@interprets
def test_interpreted_band_takes_any_memory_order():
    check_memory_order(torch.float32, "cpu")


@interprets
@pytest.mark.parametrize("backend", ["decode", "band"])
def test_interpreted_kernels_leave_gradients_to_others(backend):
    recipe = ise.Recipe.parse("ssmax:heads=6+rope+window:size=2")
    recipe.temperature.requires_grad_()
    q, k, v = Setting(1, 9, heads=6, d=64, dv=64).tensors(torch.float32)
    with pytest.raises(ValueError, match="no backward"):
        attention(q, k, v, recipe, causal=True, backend=backend)
    assert attention(q, k, v, recipe, causal=True).requires_grad


@interprets
def test_interpreted_weights_of_forward_and_backward_are_the_same():
    """Where scores are large, a query rounded once more in one of them would tell: then gradients do not add up."""
    q, k, v = Setting(200, 200, batch=1, heads=2, kv_heads=2, d=64, dv=64).tensors(torch.float16)
    q[..., :4] += 16
    k[..., :4] += 16
    grads = {}
    for backend in ("band", "sdpa"):
        inputs = [x.detach().requires_grad_() for x in (q, k, v)]
        attention(*inputs, "rerope:window=24", causal=True, backend=backend).float().square().sum().backward()
        grads[backend] = [x.grad.double() for x in inputs]
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    attention(*exact, "rerope:window=24", causal=True, backend="reference").square().sum().backward()
    for band, sdpa, truth in zip(grads["band"], grads["sdpa"], exact, strict=True):
        assert error(band, truth.grad) < 1.5 * error(sdpa, truth.grad) + 1e-3


@interprets
def test_interpreted_bands_without_far_keys_take_all_heads_at_once(monkeypatch):
    q, k, v = Setting(40, 40, heads=6, d=64, dv=64).tensors(torch.float32)
    text = "rerope:window=8+lambda:sinks=5,window=8"
    truth = attention(q.double(), k.double(), v.double(), text, causal=True, backend="reference")
    monkeypatch.setattr(dispatch, "MAX_BRANCHED_Q_ELEMENTS", q.numel() // 3)
    monkeypatch.setattr(dispatch, "_run_by_heads", lambda *given: pytest.fail("a few heads at a time"))
    with torch.no_grad():
        actual, aux = attention(q, k, v, text, causal=True, return_lse=True)
    assert aux.backend == "band" and error(actual, truth) < 5e-5


@interprets
def test_interpreted_bands_have_a_key_for_every_query_and_decoding_takes_no_rows():
    q, k, v = Setting(40, 17, heads=6, d=64, dv=64).tensors(torch.float32)
    with pytest.raises(ValueError, match="whole rows"), torch.no_grad():
        attention(q, k, v, "rope+window:size=3", causal=True, backend="band")
    with torch.no_grad():
        assert attention(q[:0, :, :1], k[:0], v[:0], "rope", causal=True, backend="decode").shape == (0, 6, 1, 64)
        actual = attention(q[:0, :, :17], k[:0], v[:0], "rope+window:size=3", causal=True, backend="band")
        assert actual.shape == (0, 6, 17, 64)


@interprets
def test_interpreted_and_traced_decoding_have_one_shape():
    q, k, v = (x.transpose(1, 2) for x in Setting(6, 2, heads=1, kv_heads=300, d=64, dv=32).tensors(torch.float32))
    bounds = torch.tensor([[[0, 300, 0, 0]]], dtype=torch.int32)
    turn = compute_angles(torch.zeros(1, 1), torch.ones(32), torch.float32)
    given = ([q, k, v], bounds, list(turn), [True, False], [None, torch.ones(1, 1, 1)], 0.125, False)
    torch.library.opcheck(torch.ops.isentrope.decode.default, given, test_utils=("test_schema", "test_faketensor"))


@interprets
@pytest.mark.parametrize("given", FOLDS)
def test_fold_interpreted(given):
    check_fold(*given, torch.float32, "cpu")


@interprets
def test_interpreted_fold_refuses_derivatives_that_it_does_not_have():
    x, turn = torch.randn(1, 2, 8, 32), torch.randn(1, 1, 8, 16)
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="jvp"):
        rotate_and_scale(forward_ad.make_dual(x, torch.randn_like(x)), (turn, turn))


def test_a_few_heads_at_a_time_are_all_heads():
    q, k, v = Setting(63, 63, heads=6, kv_heads=3).tensors(torch.float32)
    for text in ("rerope:window=8+infoscale:train_length=16", "alibi", "ssmax:heads=6,bias=True"):
        recipe = recipe_of(text).resolve()
        call = build_call(Inputs(q, k, v, causal=True), recipe)
        assert len(list(call.split_heads(q.numel() // 3))) == 3
        with torch.no_grad():
            for needed in (False, True):
                whole = dispatch._run(call, "auto", needed, needed)
                parts = dispatch._run_by_heads(call, q.numel() // 3, "auto", needed, needed)
                torch.testing.assert_close(parts.out, whole.out)
                if needed:
                    torch.testing.assert_close((parts.lse, parts.entropy), (whole.lse, whole.entropy))


def test_more_entries_than_32_bits_count_go_a_few_heads_at_a_time(monkeypatch):
    q, k, v = Setting(63, 63, heads=6, kv_heads=3).tensors(torch.float32)
    with torch.no_grad():
        expected = ise.attention(q, k, v, "alibi", causal=True)
        monkeypatch.setattr(dispatch, "MAX_BIASED_Q_ELEMENTS", q.numel() // 3)
        shares, run = [], dispatch._run
        monkeypatch.setattr(dispatch, "_run", lambda call, *rest: shares.append(0) or run(call, *rest))
        torch.testing.assert_close(ise.attention(q, k, v, "alibi", causal=True), expected)
        assert len(shares) == 3
    ise.attention(q, k, v, "alibi", causal=True)  # a backward may want all of it
    assert len(shares) == 4
