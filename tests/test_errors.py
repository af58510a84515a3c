"""Bad input: a ValueError that names the argument, what was expected and what came. Never a silent default."""

import math
import re

import pytest
import torch

import isentrope as ise
from isentrope import Recipe, attention

NAN, INF = math.nan, math.inf


def x(*shape, dtype=torch.float32, **options):
    return torch.zeros(*shape, dtype=dtype, **options)


Q, K = x(2, 4, 6, 8), x(2, 2, 6, 8)


def call(q=Q, k=K, v=K, recipe=None, **options):
    return attention(q, k, v, recipe, **options)


def refused(action, *words):
    with pytest.raises(ValueError, match=re.escape(words[0])) as caught:
        action()
    message = str(caught.value)
    missing = [word for word in words if word not in message]
    assert not missing, f"{missing} not in: {message}"
    return message


# --- tensors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        pytest.param({"q": x(4, 6, 8)}, ["q:", "(batch, heads, length, size)", "(4, 6, 8)"], id="q of rank 3"),
        pytest.param({"k": x(2, 6, 8)}, ["k:", "(batch, heads, length, size)", "(2, 6, 8)"], id="k of rank 3"),
        pytest.param({"v": x(1, 2, 2, 6, 8)}, ["v:", "(batch, heads", "(1, 2, 2, 6, 8)"], id="v of rank 5"),
        pytest.param({"q": [[1.0]]}, ["q:", "tensor", "list"], id="q a list"),
        pytest.param({"v": None}, ["v:", "tensor", "NoneType"], id="v None"),
        pytest.param({"q": x(2, 4, 6, 8, dtype=torch.int64)}, ["q:", "floating-point", "torch.int64"], id="q integer"),
        pytest.param(
            {"q": x(2, 4, 6, 8, dtype=torch.complex64)}, ["q:", "floating-point", "complex64"], id="q complex"
        ),
        pytest.param({"k": K.double()}, ["k:", "torch.float32", "like q", "torch.float64"], id="k of another dtype"),
        pytest.param({"v": K.bfloat16()}, ["v:", "torch.float32", "torch.bfloat16"], id="v of another dtype"),
        pytest.param({"k": x(2, 2, 6, 8, device="meta")}, ["k:", "cpu", "like q", "meta"], id="k on another device"),
        pytest.param({"v": x(2, 2, 6, 8, device="meta")}, ["v:", "cpu", "like q", "meta"], id="v on another device"),
        pytest.param({"k": x(3, 2, 6, 8), "v": x(3, 2, 6, 8)}, ["k:", "batch 2", "got 3"], id="k of another batch"),
        pytest.param({"v": x(1, 2, 6, 8)}, ["v:", "batch 2", "got 1"], id="v of another batch"),
        pytest.param({"k": x(2, 2, 6, 16)}, ["k:", "head size 8", "like q", "got 16"], id="k of another head size"),
        pytest.param({"v": x(2, 2, 5, 8)}, ["v:", "(2, 6)", "like k", "(2, 5)"], id="v shorter than k"),
        pytest.param({"v": x(2, 4, 6, 8)}, ["v:", "(2, 6)", "like k", "(4, 6)"], id="v with other heads than k"),
        pytest.param(
            {"k": x(2, 3, 6, 8), "v": x(2, 3, 6, 8)}, ["k:", "divides", "4", "got 3"], id="heads not divisible"
        ),
        pytest.param({"k": x(2, 8, 6, 8), "v": x(2, 8, 6, 8)}, ["k:", "divides", "4", "got 8"], id="more key heads"),
        pytest.param({"k": x(2, 2, 0, 8), "v": x(2, 2, 0, 8)}, ["k:", "at least one", "(2, 2, 0, 8)"], id="no keys"),
        pytest.param({"q": x(2, 4, 0, 8)}, ["q:", "at least one", "(2, 4, 0, 8)"], id="no queries"),
        pytest.param({"q": x(2, 0, 6, 8)}, ["q:", "at least one", "(2, 0, 6, 8)"], id="no heads"),
        pytest.param({"v": x(2, 2, 6, 0)}, ["v:", "at least one", "(2, 2, 6, 0)"], id="empty values"),
    ],
)
def test_tensors(arguments, words):
    refused(lambda: call(**arguments), *words)


# --- the other arguments of attention ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lengths", "words"),
    [
        pytest.param([3], ["(2,)", "(1,)"], id="too few"),
        pytest.param([3, 3, 3], ["(2,)", "(3,)"], id="too many"),
        pytest.param(3, ["(2,)", "()"], id="one number"),
        pytest.param(torch.tensor([[3, 3]]), ["(2,)", "(1, 2)"], id="rank 2"),
        pytest.param([-1, 3], ["0 … 6", "[-1, 3]"], id="negative"),
        pytest.param([7, 3], ["0 … 6", "[7, 3]"], id="too large"),
        pytest.param([1.0, 3.0], ["integers", "torch.float32"], id="float"),
        pytest.param([NAN, 3], ["integers", "torch.float32"], id="nan"),
        pytest.param(torch.tensor([True, False]), ["integers", "torch.bool"], id="bool"),
        pytest.param("ab", ["integers", "ab"], id="text"),
        pytest.param([None, 3], ["integers", "None"], id="none inside"),
    ],
)
def test_lengths(lengths, words):
    refused(lambda: call(lengths=lengths), "lengths:", *words)
    refused(lambda: call(mask=ise.Padding(lengths, "left")), "lengths:", *words)


@pytest.mark.parametrize(
    ("position_ids", "words"),
    [
        pytest.param(torch.arange(5), ["6 positions for the keys", "3 for the queries", "(1, 5)"], id="wrong length"),
        pytest.param(torch.zeros(3, 6).long(), ["(2, length)", "(3, 6)"], id="wrong batch"),
        pytest.param(torch.zeros(1, 2, 6).long(), ["(2, length)", "(1, 2, 6)"], id="rank 3"),
        pytest.param((torch.arange(6), torch.arange(3)), ["a pair", "(1, 6)", "(1, 3)"], id="pair the wrong way round"),
        pytest.param((torch.arange(3),) * 3, ["a pair", "(1, 3) and (1, 3) and (1, 3)"], id="three"),
        pytest.param(torch.arange(6.0), ["integers", "torch.float32"], id="float"),
        pytest.param(
            torch.tensor([0, 1, 2, 1, 3, 4]), ["do not decrease", "got a decrease", "Document"], id="decreasing"
        ),
        pytest.param((torch.arange(3), torch.arange(6).flip(0)), ["do not decrease", "got a decrease"], id="reversed"),
        pytest.param((None, torch.arange(6)), ["integers", "None"], id="half a pair"),
    ],
)
def test_position_ids(position_ids, words):
    refused(lambda: call(q=x(2, 4, 3, 8), position_ids=position_ids), "position_ids", *words)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        pytest.param(
            {"backend": "cudnn"},
            ["backend:", "auto, reference, dense, sdpa, flex, chunked, decode, band", "'cudnn'"],
            id="unknown",
        ),
        pytest.param({"backend": None}, ["backend:", "reference", "None"], id="none"),
        pytest.param({"recipe": 5}, ["recipe:", "Recipe", "got 5"], id="recipe a number"),
        pytest.param(
            {"recipe": {"position": "rope"}}, ["recipe:", "Recipe", "{'position': 'rope'}"], id="recipe a dict"
        ),
        pytest.param({"recipe": ise.RoPE()}, ["recipe:", "a Recipe", "RoPE("], id="recipe a part"),
        pytest.param({"mask": torch.ones(6, 6)}, ["mask:", "a mask such as", "tensor("], id="mask a tensor"),
        pytest.param({"mask": "causal"}, ["mask:", "a mask such as", "'causal'"], id="mask a text"),
        pytest.param({"scale": NAN}, ["scale", "nan"], id="scale nan"),
        pytest.param({"scale": "big"}, ["scale", "'big'"], id="scale a text"),
        pytest.param({"scale": 0.0, "causal": True}, ["scale", "from 1e-06 to 1e+06", "got 0.0"], id="scale 0"),
        pytest.param({"scale": -1.0, "causal": True}, ["scale", "from 1e-06", "got -1.0"], id="scale negative"),
        pytest.param({"scale": 1e38}, ["scale", "to 1e+06", "got 1e+38"], id="scale beyond fp32"),
        pytest.param({"scale": 10**400}, ["scale", "to 1e+06", "(401 characters)"], id="scale of 401 digits"),
    ],
)
def test_other_arguments(arguments, words):
    refused(lambda: call(**arguments), *words)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        pytest.param(
            {"mask": ise.Padding(torch.tensor([1, 2])), "lengths": [1, 2]},
            ["lengths:", "one Padding", "more than one"],
            id="lengths and padding",
        ),
        pytest.param(
            {"mask": ise.Padding(torch.tensor([1, 2])) & ise.Padding(torch.tensor([1, 2]), "left")},
            ["Padding", "more than one"],
            id="two paddings",
        ),
        pytest.param(
            {"mask": ise.Document(torch.zeros(6).long()) & ise.Document(torch.zeros(6).long())},
            ["mask:", "one Document", "got 2"],
            id="two documents",
        ),
        pytest.param(
            {"mask": ise.Document(torch.zeros(6).long()), "recipe": Recipe(mask=ise.Document(torch.zeros(6).long()))},
            ["mask:", "one Document", "got 2"],
            id="a document in the recipe and in the call",
        ),
        pytest.param(
            {"mask": ise.Padding(torch.tensor([1, 2])) | ise.Window(2)},
            ["mask:", "Padding", "joined with &", "under |"],
            id="padding under |",
        ),
        pytest.param(
            {"mask": ise.Window(2) & (ise.Causal() | (ise.Window(3) & ise.Document(torch.zeros(6).long())))},
            ["mask:", "Document", "joined with &", "under |"],
            id="document deep under |",
        ),
        pytest.param(
            {"mask": ise.Document(torch.zeros(5).long())},
            ["Document", "(6,)", "(2, 6)", "(5,)"],
            id="document too short",
        ),
        pytest.param(
            {"mask": ise.Document(torch.zeros(3, 6).long())}, ["Document", "(2, 6)", "(3, 6)"], id="document of 3 rows"
        ),
        pytest.param({"mask": ise.Document([0, 0, 1])}, ["Document", "(6,)", "(3,)"], id="document a short list"),
        pytest.param(
            {"mask": ise.Document(torch.zeros(6))}, ["Document", "integers", "float32"], id="document of floats"
        ),
    ],
)
def test_masks_of_a_call(arguments, words):
    refused(lambda: call(**arguments), *words)


def test_padding_side():
    refused(lambda: ise.Padding(torch.tensor([1]), "top"), "Padding(side", "right, left", "'top'")


@pytest.mark.parametrize("mask", [ise.Padding(torch.tensor([1, 2])), ise.Document(torch.zeros(6).long())])
@pytest.mark.parametrize("wrap", [lambda m: m, lambda m: m & ise.Causal()])
def test_masks_with_data_are_not_stored(mask, wrap):
    recipe = Recipe(mask=wrap(mask))
    for store in (recipe.to_dict, lambda: str(recipe)):
        refused(store, type(mask).__name__, "a batch's data", "attention(mask=…)")


# --- recipes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("rop", ["unknown part 'rop'", "did you mean 'rope'?"]),
        ("infoscal:train_length=64", ["unknown part 'infoscal'", "did you mean 'infoscale'?"]),
        ("RoPE", ["unknown part 'RoPE'"]),
        ("zzzzzz", ["unknown part 'zzzzzz'", "known are", "selfextend"]),
        ("padding:lengths=(1,)", ["unknown part 'padding'"]),
        ("rope+", ["unknown part ''"]),
        ("plain+rope", ["unknown part 'plain'"]),
        ("yarn:factr=4", ["'yarn'", "unknown option 'factr'", "did you mean 'factor'?"]),
        ("infoscale:train_len=64", ["'infoscale'", "unknown option 'train_len'", "did you mean 'train_length'?"]),
        ("alibi:base=3", ["'alibi'", "unknown option 'base'"]),
        ("yarn", ["'yarn'", "missing option 'factor'"]),
        ("selfextend", ["'selfextend'", "missing option 'window', 'group'"]),
        ("logn", ["'logn'", "missing option 'train_length'"]),
        ("window", ["'window'", "missing option 'size'"]),
        ("fitted:lengths=(64,)", ["'fitted'", "missing option 'table'"]),
        ("sink", ["'sink'", "missing option", "'size'"]),
        ("lambda:sinks=3", ["'lambda'", "missing option", "'window'"]),
        ("yarn:4", ["'yarn:4'", "expected name=value", "'4'"]),
        ("yarn:factor=4,factor=8", ["option 'factor' is given twice"]),
        ("yarn:factor=4,", ["expected name=value"]),
        ("rope+alibi", ["one position", "rope", "alibi", "ALiBi takes the place of rotation"]),
        ("alibi+yarn:factor=2", ["one position", "alibi", "yarn", "ALiBi takes the place of rotation"]),
        ("rope+pi:factor=2", ["one position", "rope", "pi:factor=2"]),
        ("logn:train_length=4+infoscale:train_length=4", ["one temperature", "logn", "infoscale"]),
        ("dot+cosine:alpha=2", ["one score", "dot", "cosine"]),
        ("window:size=4+causal", ["one mask", "window:size=4", "causal"]),
        ("rope&causal", ["only masks are joined with &", "position rope"]),
        ("causal|dot", ["only masks are joined with |", "score dot"]),
        ("(causal&window:size=4", ["matching brackets"]),
        ("and:masks=(1,2)", ["mask"]),
        ("rope:base=big", ["RoPE(base", "a number > 1", "'big'"]),
        ("rope:layout=both", ["RoPE(layout", "half, interleaved", "'both'"]),
        ("logn:train_length=64,count=keys", ["LogN(count", "visible, sequence, position", "'keys'"]),
        ("logn:train_length=64,clamp=1", ["LogN(clamp", "True or False", "got 1"]),
        ("ntk:factor=2,dynamic=yes", ["NTK(dynamic", "True or False", "'yes'"]),
        ("", ["recipe:", "expected text such as", "''"]),
        ("  ", ["recipe:", "expected text such as"]),
    ],
)
def test_recipe_text(text, words):
    refused(lambda: Recipe.parse(text), *words)
    refused(lambda: call(recipe=text), *words)


@pytest.mark.parametrize("text", [None, 5, ["rope"]])
def test_recipe_text_of_another_type(text):
    refused(lambda: Recipe.parse(text), "recipe:", "expected text such as", repr(text))


@pytest.mark.parametrize(
    ("data", "words"),
    [
        pytest.param([1], ["a dictionary", "[1]"], id="a list"),
        pytest.param("rope", ["a dictionary", "'rope'"], id="a text"),
        pytest.param(
            {"positon": {"name": "rope"}}, ["unknown key 'positon'", "did you mean 'position'?"], id="unknown key"
        ),
        pytest.param({"name": "rope"}, ["unknown key 'name'"], id="a part instead of a recipe"),
        pytest.param({1: {"name": "rope"}}, ["unknown key 1"], id="a key that is no text"),
        pytest.param({"position": "rope"}, ["a dictionary with a name", "'rope'"], id="a part as text"),
        pytest.param({"position": None}, ["a dictionary with a name", "None"], id="a part that is none"),
        pytest.param({"position": {}}, ["a dictionary with a name", "{}"], id="no name"),
        pytest.param({"position": {"name": 3}}, ["a dictionary with a name", "3"], id="a name that is no text"),
        pytest.param({"position": {"name": "rop"}}, ["'rop'", "did you mean 'rope'?"], id="unknown name"),
        pytest.param({"position": {"name": "pi"}}, ["'pi'", "missing option 'factor'"], id="missing option"),
        pytest.param(
            {"position": {"name": "pi", "factr": 2}}, ["'pi'", "'factr'", "did you mean 'factor'?"], id="unknown option"
        ),
        pytest.param(
            {"score": {"name": "rope"}}, ["a score under 'score'", "the position rope"], id="a part in the wrong place"
        ),
        pytest.param({"mask": {"name": "and"}}, ["'and'", "missing option 'masks'"], id="and without masks"),
        pytest.param({"mask": {"name": "and", "masks": 5}}, ["masks", "5"], id="and of a number"),
        pytest.param({"mask": {"name": "or", "masks": []}}, ["masks"], id="or of nothing"),
        pytest.param({"mask": {"name": "or", "masks": [3]}}, ["a dictionary with a name", "3"], id="or of numbers"),
        pytest.param({"mask": {"name": "and", "masks": [{"name": "rope"}]}}, ["masks"], id="and of a position"),
        pytest.param({"mask": {"name": "window", "size": "4"}}, ["Window(size", "'4'"], id="an option of another type"),
    ],
)
def test_recipe_data(data, words):
    refused(lambda: Recipe.from_dict(data), *words)


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({"position": "rope"}, ["Recipe(position", "RoPE()", "'rope'"]),
        ({"position": ise.RoPE}, ["Recipe(position", "RoPE()", "class"]),
        ({"position": ise.Dot()}, ["Recipe(position", "RoPE()", "Dot()"]),
        ({"position": ise.PoSE()}, ["Recipe(position", "RoPE()", "PoSE("]),
        ({"score": ise.RoPE()}, ["Recipe(score", "Dot()", "RoPE("]),
        ({"temperature": 1.5}, ["Recipe(temperature", "Constant()", "1.5"]),
        ({"temperature": ise.InfoScale}, ["Recipe(temperature", "Constant()", "class"]),
        ({"mask": True}, ["Recipe(mask", "Full()", "True"]),
        ({"mask": ise.LogN(64)}, ["Recipe(mask", "Full()", "LogN("]),
    ],
)
def test_recipe_parts(parts, words):
    refused(lambda: Recipe(**parts), *words)


DEEP = "(" * 5000 + "causal" + ")" * 5000


@pytest.mark.parametrize(
    ("make", "words"),
    [
        pytest.param(lambda: Recipe.parse(DEEP), ["at most 32 brackets", "(10008 characters)"], id="brackets"),
        pytest.param(lambda: Recipe.parse("rope:base=" + "9" * 400), ["RoPE(base", "99999… ("], id="400 digits"),
        pytest.param(lambda: Recipe.parse("rope:base=" + "9" * 5000), ["RoPE(base", "≤ 1e+12"], id="5000 digits"),
        pytest.param(lambda: Recipe.parse("rope:base=" + "-" * 5000 + "1"), ["RoPE(base"], id="5000 signs"),
        pytest.param(lambda: Recipe.parse("rope:base={[]: 1}"), ["RoPE(base", "'{[]: 1}'"], id="no key"),
        pytest.param(lambda: Recipe.parse("rope:base=10**400"), ["RoPE(base", "'10**400'"], id="a power"),
        pytest.param(lambda: Recipe.parse("x" * 100_000), ["unknown part 'xxx", "100002 characters"], id="a long name"),
        pytest.param(lambda: Recipe.parse("&".join(["causal"] * 33)), ["at most 32 masks", "got 33"], id="33 masks"),
        pytest.param(lambda: Recipe.parse("window:size=1" + "0" * 20), ["Window(size", "2^53"], id="20 zeros"),
    ],
)
def test_large_recipes_are_refused_in_a_line(make, words):
    message = refused(make, *words)
    assert len(message) < 500 and "\n" not in message


def test_masks_inside_masks_have_an_end():
    data = {"name": "causal"}
    for _ in range(5000):
        data = {"name": "and", "masks": [data]}
    refused(lambda: Recipe.from_dict({"mask": data}), "at most 32 masks inside one another")
    refused(lambda: Recipe.from_dict({"position": {"name": "rope", "base": data}}), "RoPE(base", "too large to print")


def test_one_mask_joined_with_none_reads_as_itself():
    inner = {"name": "or", "masks": [{"name": "window", "size": 4}, {"name": "causal"}]}
    recipe = Recipe.from_dict({"mask": {"name": "and", "masks": [{"name": "and", "masks": [inner]}]}})
    assert str(recipe) == "window:size=4|causal" and Recipe.parse(str(recipe)).mask.region(False)


def test_masks_join_masks():
    refused(lambda: ise.Window(4) & 3, "mask", "3")
    refused(lambda: ise.Window(4) | ise.RoPE(), "mask", "RoPE")


# --- options of the parts ---------------------------------------------------------------------------------------------

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
    ("YaRN(original_length", lambda n: ise.YaRN(2.0, n), 1),
    ("NTK(original_length", lambda n: ise.NTK(2.0, True, n), 1),
    ("RoPE(rotary_dim", lambda n: ise.RoPE(rotary_dim=n), 2),
    ("CLEX(dim", lambda n: ise.CLEX(n, 64), 4),
    ("CLEX(train_length", lambda n: ise.CLEX(8, n), 1),
    ("CLEX(max_factor", lambda n: ise.CLEX(8, 64, n), 1),
    ("CLEX(hidden", lambda n: ise.CLEX(8, 64, hidden=n), 1),
    ("PoSE(target_length", lambda n: ise.PoSE(n), 1),
    ("LogN(train_length", lambda n: ise.LogN(n), 2),
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


def test_fitted_layers():
    layered = ise.Fitted((4, 8), (((1.0, 2.0),),) * 3)
    refused(lambda: call(recipe=Recipe(temperature=layered)), "Fitted", "layer axis", "for_layer")
    refused(lambda: layered.for_layer(3), "Fitted", "0 … 2", "got 3")
    refused(lambda: layered.for_layer(-1), "Fitted", "0 … 2", "got -1")


# --- what a recipe asks of the tensors --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("law", "words"),
    [
        (ise.SSMax(3), ["temperature", "1 or 4 heads", "3"]),
        (ise.Fitted((2, 4), ((1.0, 2.0),) * 3), ["temperature", "1 or 4 heads", "3"]),
    ],
)
def test_a_temperature_for_other_heads(law, words):
    refused(lambda: call(recipe=Recipe(temperature=law)), *words)


ROTATIONS = {
    "RoPE": ise.RoPE(),
    "PI": ise.PI(2.0),
    "NTK": ise.NTK(2.0),
    "YaRN": ise.YaRN(2.0, 64),
    "ReRoPE": ise.ReRoPE(4),
    "LeakyReRoPE": ise.LeakyReRoPE(4),
    "SelfExtend": ise.SelfExtend(4, 2),
}


@pytest.mark.parametrize("name", ROTATIONS)
def test_an_odd_head_size_cannot_turn(name):
    q, k = x(1, 1, 6, 7), x(1, 1, 6, 7)
    refused(lambda: call(q, k, k, Recipe(position=ROTATIONS[name])), name, "even head size", "7")


@pytest.mark.parametrize("make", [ise.RoPE, lambda **o: ise.ReRoPE(4, **o), lambda **o: ise.YaRN(2.0, 64, **o)])
def test_more_than_the_head_cannot_turn(make):
    refused(lambda: call(recipe=Recipe(position=make(rotary_dim=10))), "rotary_dim", "at most the head size 8", "10")


def test_clex_larger_than_the_head():
    refused(lambda: call(recipe=Recipe(position=ise.CLEX(10, 64))), "CLEX(dim", "at most the head size 8", "10")


def test_ntk_of_one_pair():
    refused(lambda: call(recipe=Recipe(position=ise.NTK(2.0, rotary_dim=2))), "NTK", "two rotated pairs", "one")


@pytest.mark.parametrize(
    "text",
    [
        "yarn:factor=4",
        "ntk:factor=2,dynamic=True",
        "yarn:factor=4+yarntemperature:factor=4",
        "ntk:factor=2,dynamic=True+loglength",
    ],
)
def test_no_training_length_anywhere(text):
    refused(lambda: call(recipe=text), "original_length", "trained at", "None", "train_length")


@pytest.mark.parametrize("name", ["ReRoPE", "LeakyReRoPE", "SelfExtend"])
def test_far_methods_need_raw_keys(name):
    recipe = Recipe(position=ROTATIONS[name])
    refused(lambda: call(recipe=recipe, rotated_keys=True), "rotated_keys", name.lower(), "raw keys", "before rotation")


@pytest.mark.parametrize("position", [ise.NTK(2.0, dynamic=True, original_length=4), ise.CLEX(8, 64)])
def test_growing_angles_need_raw_keys(position):
    refused(lambda: call(recipe=Recipe(position=position), rotated_keys=True), "rotated_keys", "raw keys", "cache")


def test_cosine_scores_need_raw_keys():
    refused(lambda: call(recipe="rope+cosine:alpha=16", rotated_keys=True), "rotated_keys", "cosine", "before rotation")


# --- backends refuse, they do not fall back ---------------------------------------------------------------------------


def test_sdpa_refuses_wide_values():
    v = x(2, 2, 6, 1536)
    refused(lambda: call(v=v, backend="sdpa"), "'sdpa'", "up to 256", "1536", "'chunked'")
    assert call(v=v).shape == (2, 4, 6, 1536)
    _, aux = call(v=v, return_lse=True)
    assert aux.backend == "dense"


def test_flex_refuses_gradients_on_a_cpu():
    for which in ("q", "k", "v"):
        tensors = {"q": Q.clone(), "k": K.clone(), "v": K.clone()}
        tensors[which].requires_grad_()
        refused(lambda tensors=tensors: call(**tensors, backend="flex"), "'flex'", "no backward on a CPU", "'chunked'")
        with torch.no_grad():
            assert call(**tensors, backend="flex").shape == Q.shape


def test_flex_refuses_long_rows_on_a_cpu():
    q = x(1, 1, 4097, 8)
    refused(lambda: call(q, q, q, backend="flex"), "'flex'", "4096", "4097", "'sdpa'")
