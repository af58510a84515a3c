"""Bad options of recipe parts: a ValueError that names the option, its bound and the value."""

import pytest
import torch

import isentrope as ise
from isentrope import Recipe
from tests.fixtures.errors import INF, NAN, call, refused

# (option, how it is given, what is expected)
WHOLE = [
    ("Window(size", lambda n: ise.Window(n), 1),
    ("Sink(size", lambda n: ise.Sink(4, n), 1),
    ("Sink(sinks", lambda n: ise.Sink(n, 4), 0),
    ("Lambda(window", lambda n: ise.Lambda(5, n), 1),
    ("Lambda(sinks", lambda n: ise.Lambda(n, 4), 0),
    ("ReRoPE(window", lambda n: ise.ReRoPE(n), 1),
    ("LeakyReRoPE(window", lambda n: ise.LeakyReRoPE(n), 1),
    ("SelfExtend(window", lambda n: ise.SelfExtend(n, 4), 1),
    ("SelfExtend(group", lambda n: ise.SelfExtend(4, n), 1),
    ("JetLong(window", lambda n: ise.JetLong(n), 1),
    ("LaMPE(tail", lambda n: ise.LaMPE(tail=n), 0),
    ("SelfExtend(length", lambda n: ise.SelfExtend(4, length=n), 1),
    ("SelfExtend(train_length", lambda n: ise.SelfExtend(4, train_length=n), 1),
    ("DPE(window", lambda n: ise.DPE(n, (2,)), 1),
    ("LongRoPE(original_length", lambda n: ise.LongRoPE((1.0,), original_length=n), 1),
    ("CoPE(clip", lambda n: ise.CoPE(n), 0),
    ("YaRN(original_length", lambda n: ise.YaRN(2.0, n), 1),
    ("NTK(original_length", lambda n: ise.NTK(2.0, True, n), 1),
    ("RoPE(rotary_dim", lambda n: ise.RoPE(rotary_dim=n), 2),
    ("CLEX(dim", lambda n: ise.CLEX(n, 64), 4),
    ("CLEX(train_length", lambda n: ise.CLEX(8, n), 1),
    ("CLEX(max_factor", lambda n: ise.CLEX(8, 64, n), 1),
    ("CLEX(hidden", lambda n: ise.CLEX(8, 64, hidden=n), 1),
    ("PoSE(target_length", lambda n: ise.PoSE(n), 1),
    ("LogN(train_length", lambda n: ise.LogN(n), 2),
    ("Power(train_length", lambda n: ise.Power(n), 2),
    ("Share(reference", lambda n: ise.Share(1.0, n), 1),
    ("YaRNTemperature(train_length", lambda n: ise.YaRNTemperature(n), 1),
    ("InfoScale(train_length", lambda n: ise.InfoScale(n), 1),
    ("InfoScaleExact(train_length", lambda n: ise.InfoScaleExact(n), 1),
    ("Llama4(floor", lambda n: ise.Llama4(n), 1),
    ("SSMax(heads", lambda n: ise.SSMax(n), 1),
    ("SSMax(init_length", lambda n: ise.SSMax(4, n), 4),
]
NUMBERS = [
    ("Cosine(alpha", lambda n: ise.Cosine(n), " ≥ 0.0001", [0, -1]),
    ("PI(factor", lambda n: ise.PI(n), " ≥ 1", [0, -2, 0.5]),
    ("NTK(factor", lambda n: ise.NTK(n), " ≥ 1", [0, -2, 0.5]),
    ("YaRN(factor", lambda n: ise.YaRN(n, 64), " ≥ 1", [0, -2, 0.5]),
    ("Resonance(factor", lambda n: ise.Resonance(n, 64), " ≥ 1", [0, -2, 0.5]),
    ("YaRN(beta_fast", lambda n: ise.YaRN(2.0, 64, beta_fast=n), " ≥ 1e-06", [0, -1]),
    ("YaRN(beta_slow", lambda n: ise.YaRN(2.0, 64, beta_slow=n), " ≥ 1e-06", [0, -1]),
    ("LeakyReRoPE(leak", lambda n: ise.LeakyReRoPE(4, n), " ≥ 1", [0, -2, 0.5]),
    ("RoPE(base", lambda n: ise.RoPE(n), " > 1", [1, 0, -10000]),
    ("ReRoPE(base", lambda n: ise.ReRoPE(4, base=n), " > 1", [1, 0, -10000]),
    ("CLEX(base", lambda n: ise.CLEX(8, 64, base=n), " > 1", [1, 0]),
    ("SoftmaxPlus(base", lambda n: ise.SoftmaxPlus(n), " > 1", [1, 0, -512]),
    ("YaRNTemperature(factor", lambda n: ise.YaRNTemperature(factor=n), " ≥ 1", [0, -2, 0.5]),
    ("InfoScale(epsilon", lambda n: ise.InfoScale(64, n), " ≥ -20", [-21]),
    ("Llama4(coefficient", lambda n: ise.Llama4(coefficient=n), " ≥ 0", [-0.1]),
]


@pytest.mark.parametrize(
    ("name", "make", "least", "value"),
    [
        pytest.param(name, make, least, value, id=f"{name}={value!r})")
        for name, make, least in WHOLE
        for value in (-1, 0, 1.5, NAN, True, "4", [4])
        if not (value == 0 and least == 0)
    ],
)
def test_whole_numbers(name, make, least, value):
    refused(lambda: make(value), f"{name}=…)", f"an integer ≥ {least}", f"got {value!r}")


def test_infinity_is_no_whole_number():
    refused(lambda: ise.Window(INF), "Window(size=…)", "an integer ≥ 1", "got inf")


@pytest.mark.parametrize(
    ("name", "make", "bound", "value"),
    [
        pytest.param(name, make, bound, value, id=f"{name}={value!r})")
        for name, make, bound, outside in NUMBERS
        for value in (*outside, NAN, INF, True, "2")
    ],
)
def test_numbers(name, make, bound, value):
    refused(lambda: make(value), f"{name}=…)", f"a number{bound}", f"got {value!r}")


LARGE = [
    ("Window(size", lambda n: ise.Window(n), 2**53 + 2, "≤ 2^53"),
    ("LogN(train_length", lambda n: ise.LogN(n), 10**400, "≤ 2^53"),
    ("SSMax(heads", lambda n: ise.SSMax(n), 10**16, "≤ 65536"),
    ("RoPE(rotary_dim", lambda n: ise.RoPE(rotary_dim=n), 1 << 17, "≤ 65536"),
    ("CLEX(dim", lambda n: ise.CLEX(n, 64), 1 << 13, "≤ 4096"),
    ("CLEX(hidden", lambda n: ise.CLEX(8, 64, hidden=n), 10**9, "≤ 16384"),
    ("CLEX(max_factor", lambda n: ise.CLEX(8, 64, n), 10**9, "≤ 65536"),
    ("RoPE(base", lambda n: ise.RoPE(n), 1e300, "≤ 1e+12"),
    ("NTK(factor", lambda n: ise.NTK(n), 1e300, "≤ 1e+09"),
    ("LeakyReRoPE(leak", lambda n: ise.LeakyReRoPE(4, n), 1e10, "≤ 1e+09"),
    ("YaRN(beta_fast", lambda n: ise.YaRN(2.0, 64, beta_fast=n), 1e7, "≤ 1e+06"),
    ("Cosine(alpha", lambda n: ise.Cosine(n), 1e16, "≤ 10000"),
    ("SoftmaxPlus(base", lambda n: ise.SoftmaxPlus(n), 1e300, "≤ 9.0072e+15"),
    ("InfoScale(epsilon", lambda n: ise.InfoScale(1 << 53, n), 37.0, "≤ 36"),
    ("Llama4(coefficient", lambda n: ise.Llama4(coefficient=n), 1e300, "≤ 100"),
    ("Fitted(lengths", lambda n: ise.Fitted((64, n), (1.0, 2.0)), 10**400, "≤ 2^53"),
    ("Fitted(table", lambda n: ise.Fitted((64,), (n,)), 1e300, "from 0 to 1000"),
    ("Fitted(table", lambda n: ise.Fitted((64,), (n,)), 10**400, "from 0 to 1000"),
    ("Fitted(table", lambda n: ise.Fitted((64,), (n,)), -1.0, "from 0 to 1000"),
    ("Power(gamma", lambda n: ise.Power(64, n), 4.1, "from -4 to 4"),
    ("Power(gamma", lambda n: ise.Power(64, (0.1, n)), -(10**400), "from -4 to 4"),
    ("Share(beta", ise.Share, 1e300, "from -4 to 4"),
    ("Share(reference", lambda n: ise.Share(1.0, n), 10**400, "≤ 2^53"),
]


@pytest.mark.parametrize(("name", "make", "value", "bound"), LARGE, ids=lambda x: x if isinstance(x, str) else "")
def test_numbers_beyond_any_meaning(name, make, value, bound):
    refused(lambda: make(value), f"{name}=…)", bound)


@pytest.mark.parametrize(
    ("action", "words"),
    [
        pytest.param(lambda: ise.RoPE(rotary_dim=5), ["RoPE(rotary_dim", "even", "5"], id="odd rotary_dim"),
        pytest.param(
            lambda: ise.ReRoPE(4, rotary_dim=3), ["ReRoPE(rotary_dim", "even", "3"], id="odd rotary_dim, rerope"
        ),
        pytest.param(lambda: ise.CLEX(7, 64), ["CLEX(dim", "even", "7"], id="odd dim, clex"),
        pytest.param(lambda: ise.CLEX(8, 64, rotary_dim=6), ["CLEX(rotary_dim", "dim=8", "6"], id="rotary_dim, clex"),
        pytest.param(lambda: ise.RoPE(layout="split"), ["RoPE(layout", "half, interleaved", "'split'"], id="layout"),
        pytest.param(lambda: ise.NTK(2.0, 1), ["NTK(dynamic", "True or False", "got 1"], id="dynamic a number"),
        pytest.param(lambda: ise.LogN(64, clamp="no"), ["LogN(clamp", "True or False", "'no'"], id="clamp a text"),
        pytest.param(lambda: ise.LogN(64, count="all"), ["LogN(count", "visible, sequence", "'all'"], id="count"),
        pytest.param(
            lambda: ise.SSMax(4, count="all"), ["SSMax(count", "visible, sequence", "'all'"], id="count, ssmax"
        ),
        pytest.param(lambda: ise.SSMax(4, clamp=True), ["SSMax(clamp", "False", "True"], id="clamp, ssmax"),
        pytest.param(lambda: ise.SSMax(4, bias=1), ["SSMax(bias", "True or False", "got 1"], id="bias, ssmax"),
        pytest.param(
            lambda: ise.YaRNTemperature(),
            ["YaRNTemperature", "either train_length or factor", "train_length=None, factor=None"],
            id="yarn temperature with neither",
        ),
        pytest.param(
            lambda: ise.YaRNTemperature(64, 4.0),
            ["YaRNTemperature", "either train_length or factor", "train_length=64, factor=4.0"],
            id="yarn temperature with both",
        ),
        pytest.param(
            lambda: ise.InfoScale(1),
            ["InfoScale", "ln train_length > epsilon", "train_length=1", "epsilon=0"],
            id="infoscale at length 1",
        ),
        pytest.param(
            lambda: ise.InfoScaleExact(64, 5.0),
            ["InfoScaleExact", "ln train_length > epsilon", "train_length=64", "epsilon=5"],
            id="infoscale with a large epsilon",
        ),
        pytest.param(
            lambda: ise.InfoScale(64, clamp=False).scale(torch.tensor([1, 2, 64]), 128),
            ["InfoScale", "ln n > epsilon", "n=1", "train_length=64", "epsilon=0"],
            id="infoscale unclamped at n = 1",
        ),
        pytest.param(
            lambda: ise.InfoScaleExact(64, 2.0, clamp=False).scale(torch.tensor([64.0, 7.0]), 128),
            ["InfoScaleExact", "ln n > epsilon", "n=7", "train_length=64", "epsilon=2"],
            id="infoscale unclamped below epsilon",
        ),
        pytest.param(
            lambda: call(recipe=Recipe(temperature=ise.InfoScale(64, 2.0, clamp=False))),
            ["InfoScale", "ln n > epsilon", "n=6", "train_length=64", "epsilon=2"],
            id="infoscale unclamped in attention",
        ),
        pytest.param(lambda: ise.PoSE(8).sample(1, 9), ["PoSE", "target_length=8", "9"], id="pose of a longer row"),
    ],
)
def test_options(action, words):
    refused(action, *words)


@pytest.mark.parametrize(
    ("lengths", "table", "words"),
    [
        pytest.param((), (), ["lengths", "positive integers", "()"], id="no lengths"),
        pytest.param((0, 4), (1.0, 2.0), ["lengths", "positive integers", "(0, 4)"], id="a length of 0"),
        pytest.param((4, -8), (1.0, 2.0), ["lengths", "positive integers", "(4, -8)"], id="a negative length"),
        pytest.param((4.5, 8), (1.0, 2.0), ["lengths", "positive integers", "(4.5, 8)"], id="a broken length"),
        pytest.param(
            (True, 8), (1.0, 2.0), ["lengths", "positive integers", "(True, 8)"], id="a truth value as length"
        ),
        pytest.param(64, (1.0,), ["lengths", "positive integers", "64"], id="lengths a number"),
        pytest.param((8, 4), (1.0, 2.0), ["lengths", "increasing", "(8, 4)"], id="falling lengths"),
        pytest.param((4, 4), (1.0, 2.0), ["lengths", "increasing", "(4, 4)"], id="equal lengths"),
        pytest.param((10**6, 10**6 + 1), (1.0, 2.0), ["lengths", "0.1 % apart", "1000001"], id="lengths too close"),
        pytest.param((4,), [[[[[[1.0]]]]]], ["table", "layers of heads"], id="a table of rank 6"),
        pytest.param((4,), (True,), ["table", "nested numbers", "True"], id="a truth value in the table"),
        pytest.param((4, 8), (1.0,), ["table", "2 lengths", "(1,)"], id="a short table"),
        pytest.param((4, 8), 1.0, ["table", "2 lengths", "()"], id="a number as table"),
        pytest.param((4, 8), ((1.0,), (2.0,)), ["table", "2 lengths", "(2, 1)"], id="a table the wrong way round"),
        pytest.param((4,), ((((1.0,),),),), ["table", "lengths", "(1, 1, 1, 1)"], id="a table of rank 4"),
        pytest.param((4, 8), ((1.0, 2.0), (1.0,)), ["table", "nested numbers", "((1.0, 2.0), (1.0,))"], id="ragged"),
        pytest.param((4, 8), ("a", "b"), ["table", "nested numbers", "('a', 'b')"], id="letters"),
        pytest.param((4, 8), (1.0, NAN), ["table", "nan"], id="nan in the table"),
        pytest.param((4, 8), (1.0, INF), ["table", "inf"], id="inf in the table"),
    ],
)
def test_fitted_tables(lengths, table, words):
    refused(lambda: ise.Fitted(lengths, table), "Fitted(", *words)


@pytest.mark.parametrize("make", [ise.Share, lambda table: ise.Power(64, table)], ids=["beta", "gamma"])
@pytest.mark.parametrize(
    "table",
    ["1", True, NAN, INF, (), ((),), [[]], (1, True), (1, "a"), (1.0, NAN), ((1, 2), (3,)), ((1,), 2), (1, (2,)),
     (((1.0,),),), {}, torch.ones(2, 2, 2)],
    ids=str,
)  # fmt: skip
def test_tables_by_head(make, table):
    refused(lambda: make(table), "expected a number from -4 to 4, or a table of them, (heads) or (layers, heads), got")


def test_tables_by_layer():
    heads = ise.ReRoPE(2)
    for part, parts in (
        (ise.Share(((1, 2), (3, 4)), 1), {"share": ise.Share(((1, 2), (3, 4)), 1)}),
        (ise.Power(2, [[1, 2], [3, 4]]), {"temperature": ise.Power(2, [[1, 2], [3, 4]])}),
    ):
        name = type(part).__name__
        refused(lambda parts=parts: call(recipe=Recipe(position=heads, **parts)), name, "layer axis", "for_layer")
        refused(lambda part=part: part.for_layer(2), name, "0 … 1", "got 2")
        refused(lambda part=part: part.for_layer(-1), name, "0 … 1", "got -1")
        row = part.for_layer(1)
        assert 3.0 in (getattr(row, "beta", ()) or row.gamma) and row.for_layer(7) is row
    refused(lambda: call(recipe="rerope:window=2+share:beta=(1,2,3),reference=1"), "share", "1 or 4 heads", "(1, 3, 6)")


def test_a_share_law_without_a_reference():
    words = ("Share", "expected a reference, or a training length", "got neither", "reference=…", "train_length")
    refused(lambda: call(recipe="rerope:window=2+share"), *words)
    refused(lambda: call(recipe="rerope:window=2+loglength+share"), *words)
    call(recipe="rerope:window=2+share:reference=1")
    call(recipe="rerope:window=6+share")  # no far key is visible


def test_fitted_layers():
    layered = ise.Fitted((4, 8), (((1.0, 2.0),),) * 3)
    refused(lambda: call(recipe=Recipe(temperature=layered)), "Fitted", "layer axis", "for_layer")
    refused(lambda: layered.for_layer(3), "Fitted", "0 … 2", "got 3")
    refused(lambda: layered.for_layer(-1), "Fitted", "0 … 2", "got -1")
