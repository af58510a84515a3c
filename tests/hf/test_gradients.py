"""Gradients of an extended model: against a dense computation, backends, checkpointing, autocast."""

from __future__ import annotations

import pytest
import torch
from torch.func import functional_call, grad, vmap
from torch.testing import assert_close

import isentrope as ise
from tests.fixtures.dense_llama import (
    dense_logits,
    dpe,
    first_and_near,
    infoscale,
    leaky,
    logn,
    rerope,
    selfextend,
    streaming,
    theta,
    yarn_theta,
)
from tests.fixtures.finetuning import LONG, assert_same_gradients, gradients, next_token_loss, sample_beyond_one
from tests.fixtures.models import TRAINED, extend, llama, tokens
from tests.fixtures.turns import in_turns

pytestmark = pytest.mark.filterwarnings("ignore:.*size=70 leaves distances:UserWarning")  # for logn to act
ORACLES = {
    "pi:factor=2": {"theta": theta() / 2},
    "ntk:factor=4": {"theta": theta(10000 * 4 ** (8 / 6))},
    "ntk:factor=4,dynamic=true": {"theta": theta(10000 * (4 * LONG / TRAINED - 3) ** (8 / 6))},
    "yarn:factor=4": {"theta": yarn_theta()},
    "infoscale": {"theta": theta(), "tau": infoscale},
    "rerope:window=32+infoscale": {"theta": theta(), "distance": rerope(32), "tau": infoscale},
    "leakyrerope:window=32": {"theta": theta(), "distance": leaky},
    "selfextend:window=32,group=4": {"theta": theta(), "distance": selfextend},
    "dpe:window=24,scales=(1,2,8)": {"theta": theta(), "distance": dpe},
    "longrope:factors=(1,2,3,4),short=(1,1,1,1)": {"theta": theta() / torch.arange(1, 5)},
    "cope:clip=3": {"theta": theta() * torch.tensor([1, 1, 0.5, 0])},
    "window:size=24": {"theta": theta(), "seen": first_and_near(0, 24)},
    "window:size=70+logn": {"theta": theta(), "seen": first_and_near(0, 70), "tau": logn},
    "sink:sinks=4,size=24": {"theta": theta(), "distance": streaming, "seen": first_and_near(4, 24)},
    "rerope:window=24+lambda:sinks=5,window=24": {
        "theta": theta(),
        "distance": rerope(24),
        "seen": first_and_near(5, 24),
    },
    "cosine:alpha=16": {"theta": theta(), "alpha": 16},
    "cosine:alpha=16+infoscale": {"theta": theta(), "alpha": 16, "tau": infoscale},
    "alibi": {"slopes": 2.0 ** -torch.arange(2, 10, 2).double()},
}


@pytest.mark.parametrize("recipe", ORACLES)
def test_logits_and_gradients_are_those_of_a_dense_computation(recipe):
    ids = tokens(2, LONG)
    plain, model = llama().double(), extend(llama().double(), recipe)
    expected = dense_logits(plain, ids, **ORACLES[recipe])
    logits = model(input_ids=ids).logits
    # RMSNorm works in fp32 whatever the dtype, and so do the angles of the model's own rotary module
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
    next_token_loss(expected, ids).backward()
    next_token_loss(logits, ids).backward()
    assert_same_gradients(gradients(model), gradients(plain), 1e-4)


@pytest.mark.parametrize("recipe", [*ORACLES, "clex:max_factor=4", "ssmax"])
def test_gradients_do_not_depend_on_the_backend(recipe):
    ids = tokens(2, LONG)
    actual = []
    for backend in ("auto", "reference", "chunked"):
        model = extend(llama().double(), recipe, backend=backend)
        for part in model.modules():
            if isinstance(part, ise.CLEX):
                torch.nn.init.normal_(part.down.weight, std=0.1, generator=torch.Generator().manual_seed(1))
                torch.nn.init.normal_(part.up.weight, std=0.5, generator=torch.Generator().manual_seed(2))
        next_token_loss(model(input_ids=ids).logits, ids).backward()
        actual.append(gradients(model))
    assert_same_gradients(actual[0], actual[1], 1e-5)
    assert_same_gradients(actual[2], actual[1], 1e-5)


RECIPES = [
    "rerope:window=16+infoscale:train_length=32",
    "ntk:factor=4,dynamic=true",
    "sink:sinks=4,size=24",
    "yarn:factor=4",
    "clex:max_factor=4",
    "ssmax",
]


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
def test_gradient_checkpointing(recipe, reentrant):
    ids = tokens(2, LONG)
    mask = torch.ones_like(ids)
    mask[0, :9] = 0
    labels = ids.masked_fill(mask == 0, -100)
    actual, calls = [], []
    for checkpointing in (False, True):
        model = extend(llama(), recipe).train()
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
            model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
        sample_beyond_one(model)
        model(input_ids=ids, attention_mask=mask, labels=labels).loss.backward()
        actual.append(gradients(model))
    assert len(calls) == 2  # forward, and again for the backward
    assert_same_gradients(actual[1], actual[0], 1e-5)


@pytest.mark.parametrize(("recipe", "quiet"), in_turns(RECIPES, [torch.inference_mode, torch.no_grad]))
def test_evaluation_does_not_spoil_training(recipe, quiet):
    """What is worked out once for a shape, or for a batch, must serve training after evaluation too."""
    ids = tokens(2, 48)
    mask = torch.ones_like(ids)
    jumping = torch.arange(48).expand(2, -1) + 50 * (torch.arange(48) >= 20)
    for extra in ({}, {"attention_mask": mask, "position_ids": jumping}):
        model, fresh = (extend(llama(), recipe).train() for _ in range(2))
        sample_beyond_one(model)
        sample_beyond_one(fresh)
        with quiet():
            model(input_ids=ids, **extra)
        model(input_ids=ids, labels=ids, **extra).loss.backward()
        fresh(input_ids=ids, labels=ids, **{key: x.clone() for key, x in extra.items()}).loss.backward()
        assert_same_gradients(gradients(model), gradients(fresh), 1e-6)


def test_autocast():
    ids = tokens(2, LONG)
    model = ise.extend(llama(initializer_range=0.1), "rerope:window=16+infoscale").train()
    exact = model(input_ids=ids, labels=ids).loss
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    assert abs(loss - exact) < 0.02 * exact
    assert all(x.grad.isfinite().all() and x.grad.any() for x in model.parameters())


@pytest.mark.parametrize("recipe", ["rerope:window=16+share", "dualchunk:chunk=32,local=8", "sink:sinks=2,size=30"])
def test_torch_func_over_weights(recipe):
    model, ids = llama(), tokens(1, 90)
    ise.extend(model, recipe)
    weights = {name: weight.detach() for name, weight in model.named_parameters()}

    def compute_loss(weights):
        return functional_call(model, weights, (ids,), {"use_cache": False, "labels": ids}).loss

    found = grad(compute_loss)(weights)
    model(ids, labels=ids, use_cache=False).loss.backward()
    for name, weight in model.named_parameters():
        assert_close(found[name], weight.grad, rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        both = vmap(compute_loss)({name: torch.stack((weight, 2 * weight)) for name, weight in weights.items()})
        assert_close(both[0], compute_loss(weights), rtol=1e-5, atol=1e-5)
