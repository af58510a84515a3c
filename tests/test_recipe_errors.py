"""Bad recipes: text, data and parts that are refused by name."""

import pytest

import isentrope as ise
from isentrope import Recipe
from tests.fixtures.errors import call, refused


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("rop", ["unknown part 'rop'", "did you mean 'rope'?"]),
        ("infoscal:train_length=64", ["unknown part 'infoscal'", "did you mean 'infoscale'?"]),
        ("RoPE", ["unknown part 'RoPE'; did you mean 'rope'?"]),
        ("ReRoPE:window=32", ["did you mean 'rerope'?"]),
        ("self-extend:window=32", ["did you mean 'selfextend'?"]),
        ("leaky", ["did you mean 'leakyrerope:window=…'?"]),
        ("streamingllm", ["did you mean 'sink:sinks=4,size=…'?"]),
        ("LM-Infinite", ["did you mean 'rerope:window=…+lambda:sinks=4,window=…'?"]),
        ("yarn4", ["did you mean 'yarn:factor=4'?"]),
        ("dca", ["did you mean 'dualchunk'?"]),
        ("CosScale", ["did you mean 'cosine:alpha=…'?"]),
        ("Plain", ["did you mean 'plain'?"]),
        ("auto", ["'auto' is chosen for one model", "isentrope.extend(model, 'auto', length='4x')"]),
        ("rope+auto", ["'auto' is chosen for one model"]),
        ("zzzzzz", ["unknown part 'zzzzzz'", "known are", "selfextend"]),
        ("padding:lengths=(1,)", ["unknown part 'padding'"]),
        ("rope+", ["unknown part ''; each + stands between two parts"]),
        ("rerope window=32", ["did you mean 'rerope:window=32'?"]),
        ("rerope(window=32)", ["did you mean 'rerope:window=32'?"]),
        ("share+ReRoPE (window=32)", ["did you mean 'rerope:window=32'?"]),
        ("fitted(lengths=(1,2),table=(3,4))", ["did you mean 'fitted:lengths=(1,2),table=(3,4)'?"]),
        ("rerop(window=32)", ["did you mean 'rerope'?"]),
        ("leaky(window=32)", ["did you mean 'leakyrerope:window=…'?"]),
        ("Auto", ["did you mean 'auto:length=4x'?"]),
        ("plain+rope", ["'plain' stands alone"]),
        ("yarn:factr=4", ["'yarn'", "unknown option 'factr'", "did you mean 'factor'?"]),
        ("infoscale:train_len=64", ["'infoscale'", "unknown option 'train_len'", "did you mean 'train_length'?"]),
        ("alibi:base=3", ["'alibi'", "unknown option 'base'"]),
        ("yarn", ["'yarn'", "missing option 'factor'"]),
        ("selfextend", ["'selfextend'", "missing option 'window'"]),
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
        (
            "rerope:window=4+logn:train_length=4+power:train_length=4,keys=far",
            ["one temperature, or one with keys=near and one with keys=far", "logn:train_length=4 and power"],
        ),
        ("rerope:window=4+logn:train_length=4,keys=far+constant:keys=far", ["one with keys=near", "logn", "constant"]),
        (
            "rerope:window=4+constant:keys=far+constant:keys=near+constant:keys=near",
            ["one temperature", "constant:keys=far and constant:keys=near and constant:keys=near"],
        ),
        ("rerope:window=4+share+share:beta=1", ["one share", "share and share:beta=1"]),
        (
            "share:beta=0.25",
            ["share:beta=0.25 needs a position method with near and far keys", "rerope:window=…", "got none"],
        ),
        (
            "yarn:factor=4+share:beta=2",
            ["share:beta=2 needs a position method with near and far keys", "got yarn:factor=4"],
        ),
        ("rope+logn:train_length=4,keys=far", ["logn:train_length=4,keys=far needs a position method", "got rope"]),
        ("alibi+constant:keys=near", ["constant:keys=near needs a position method", "got alibi"]),
        ("logn:train_length=64,keys=both", ["LogN(keys", "all, near, far", "'both'"]),
        ("rerope:window=4+share:betta=1", ["'share'", "unknown option 'betta'", "did you mean 'beta'?"]),
        ("rerope:window=4+share:count=near", ["Share(count", "far, visible", "'near'"]),
        ("power", ["'power'", "missing option 'train_length'"]),
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
        pytest.param(
            {"share": {"name": "rope"}}, ["a share under 'share'", "the position rope"], id="a position as share"
        ),
        pytest.param({"temperature": []}, ["a dictionary with a name", "[]"], id="an empty pair"),
        pytest.param({"temperature": [3]}, ["a dictionary with a name", "3"], id="a pair of numbers"),
        pytest.param(
            {"temperature": [{"name": "rope"}]}, ["a temperature under 'temperature'", "rope"], id="a pair of positions"
        ),
        pytest.param(
            {"position": [{"name": "rope"}, {"name": "alibi"}]}, ["a dictionary with a name"], id="a pair of others"
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
        ({"temperature": (1.5, 2.5)}, ["Recipe(temperature", "Constant()", "1.5"]),
        ({"temperature": ({}, {})}, ["Recipe(temperature", "Constant()", "{}"]),
        ({"temperature": [ise.LogN, ise.LogN]}, ["Recipe(temperature", "Constant()", "class"]),
        ({"temperature": (None, ise.LogN(4, keys="far"))}, ["one with keys=near", "None and logn"]),
        ({"position": ise.ReRoPE(4), "share": 0.5}, ["Recipe(share", "Share()", "0.5"]),
        ({"position": ise.ReRoPE(4), "share": ise.Share}, ["Recipe(share", "Share()", "class"]),
        ({"position": ise.RoPE(), "share": ise.Share(0.25)}, ["share:beta=0.25 needs a position method", "got rope"]),
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
        pytest.param(lambda: Recipe.parse(DEEP), ["at most 32 nested brackets", "(10008 characters)"], id="brackets"),
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
    assert len(message) < 700 and "\n" not in message


def test_masks_inside_masks_have_an_end():
    data = {"name": "causal"}
    for _ in range(5000):
        data = {"name": "and", "masks": [data]}
    refused(lambda: Recipe.from_dict({"mask": data}), "at most 32 nested masks")
    refused(lambda: Recipe.from_dict({"position": {"name": "rope", "base": data}}), "RoPE(base", "too large to print")


def test_one_mask_joined_with_none_reads_as_itself():
    inner = {"name": "or", "masks": [{"name": "window", "size": 4}, {"name": "causal"}]}
    recipe = Recipe.from_dict({"mask": {"name": "and", "masks": [{"name": "and", "masks": [inner]}]}})
    assert str(recipe) == "window:size=4|causal" and Recipe.parse(str(recipe)).mask.region(False)


def test_masks_join_masks():
    refused(lambda: ise.Window(4) & 3, "mask", "3")
    refused(lambda: ise.Window(4) | ise.RoPE(), "mask", "RoPE")
