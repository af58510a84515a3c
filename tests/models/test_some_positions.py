"""The last layer of GAU-α at some positions alone."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

import isentrope as ise
from isentrope.models.gau.modeling import gather_positions
from tests.fixtures.gau import model, tokens
from tests.fixtures.recipes import TRAINABLE
from tests.fixtures.turns import in_turns

# the last layer at some positions alone; the training length is 8, so that every method is at work
SOMEWHERE = {
    "plain": "rope",
    "CosScale": "rope+cosine:alpha=16",
    "ReRoPE": "rerope:window=8+infoscale",
    "Leaky ReRoPE": "leakyrerope:window=8,leak=4+power:keys=far+share",
    "SelfExtend": "selfextend:window=8,group=4",
    "ALiBi": "alibi",
    "window": "window:size=5+infoscale:count=sequence",
    "visible keys": "window:size=5+infoscale:count=visible",
    "position": "llama4:floor=4",
    "LM-Infinite": "rerope:window=6+lambda:sinks=2,window=6",
    "sinks": "sink:sinks=3,size=4+logn",
    "causal": "causal+infoscale",
    "dynamic NTK": "ntk:factor=4,dynamic=True",
    "YaRN": "yarn:factor=4+yarntemperature:factor=4",
    "CLEX": "clex",
    "SSMax": "ssmax",
}
ROWS = {"whole": None, "left": (slice(9, 30), slice(0, 30)), "right": (slice(0, 21), slice(0, 30))}


def somewhere(rows):
    """Positions in each row, real ones, and the mask that says which are."""
    mask = torch.zeros(2, 30, dtype=torch.int64)
    for row, real in enumerate(ROWS[rows] or (slice(0, 30), slice(0, 30))):
        mask[row, real] = 1
    at = torch.stack([row.nonzero()[:, 0][torch.tensor([0, 3, 4, 11, 20])] for row in mask])
    return at, None if ROWS[rows] is None else mask


def assert_the_same_somewhere(gau, ids, at, **options):
    """Logits and every gradient, with `at` and picked from the whole."""
    actual = []
    for alone in (True, False):
        gau.zero_grad()
        logits = gau(ids, at=at, **options).logits if alone else gather_positions(gau(ids, **options).logits, at)
        (logits.log_softmax(-1)[..., :7].sum() / logits.numel()).backward()
        gradients = {name: x.grad for name, x in gau.named_parameters() if x.requires_grad}
        assert all(x is not None for x in gradients.values())
        actual.append((logits, gradients))
    assert_close(*actual, atol=1e-9, rtol=0)


@pytest.mark.parametrize(("recipe", "rows"), in_turns(SOMEWHERE, list(ROWS), every=2))
def test_the_last_layer_at_some_positions(recipe, rows):
    gau = model(recipe=SOMEWHERE[recipe], max_position_embeddings=8)
    with torch.no_grad():
        for name, x in gau.named_parameters():
            if "learned" in name:
                x.add_(0.1)
    at, mask = somewhere(rows)
    assert_the_same_somewhere(gau, tokens(), at, attention_mask=mask)


@pytest.mark.parametrize(
    ("recipe", "rows"), in_turns(["plain", "ReRoPE", "ALiBi", "LM-Infinite", "visible keys"], list(ROWS))
)
def test_some_positions_under_position_ids(recipe, rows):
    gau = model(recipe=SOMEWHERE[recipe], max_position_embeddings=8)
    at, mask = somewhere(rows)
    drawn = ise.PoSE(200).sample(2, 30, torch.Generator().manual_seed(0))
    for positions in (drawn, drawn[:1], drawn[0]):
        assert_the_same_somewhere(gau, tokens(), at, attention_mask=mask, position_ids=positions)
    with torch.no_grad():
        given = {"at": at, "attention_mask": mask}
        assert not torch.equal(gau(tokens(), position_ids=drawn, **given).logits, gau(tokens(), **given).logits)


@pytest.mark.parametrize("backend", TRAINABLE)
def test_some_positions_on_every_backend(backend):
    gau = model(recipe=SOMEWHERE["ReRoPE"], max_position_embeddings=8)
    at, mask = somewhere("left")
    assert_the_same_somewhere(gau, tokens(), at, attention_mask=mask, backend=backend)


@pytest.mark.parametrize("count", [1, 30, 45])
def test_some_positions_may_be_any_number_in_any_order(count):
    gau = model(recipe=SOMEWHERE["ReRoPE"], max_position_embeddings=8)
    at = torch.randint(0, 30, (2, count), generator=torch.Generator().manual_seed(0))
    assert_the_same_somewhere(gau, tokens(), at)


def test_some_positions_of_a_model_with_one_layer():
    assert_the_same_somewhere(model(num_hidden_layers=1), tokens(), somewhere("whole")[0])


def test_some_positions_through_an_adapter():
    from peft import LoraConfig, get_peft_model

    gau, ids = model(recipe=SOMEWHERE["ReRoPE"], max_position_embeddings=8), tokens()
    at, mask = somewhere("left")
    with torch.no_grad():
        without = gau(ids, at=at, attention_mask=mask).logits
    # B is not zero
    adapted = get_peft_model(gau, LoraConfig(r=2, target_modules=["i_dense"], init_lora_weights=False)).double().eval()
    assert_the_same_somewhere(adapted, ids, at, attention_mask=mask)
    assert sum(x.requires_grad for x in adapted.parameters()) == 6
    with torch.no_grad(), adapted.disable_adapter():
        assert_close(adapted(ids, at=at, attention_mask=mask).logits, without)
    with torch.no_grad():
        assert (adapted(ids, at=at, attention_mask=mask).logits - without).abs().max() > 0.01
