"""Bad arguments: a ValueError that names the argument, what was expected and what came. Never a silent default."""

import pytest
import torch

import isentrope as ise
from isentrope import Recipe
from tests.fixtures.errors import NAN, K, call, refused, x


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
