"""Parts that a model is trained with, CLEX and SSMax among them."""

from __future__ import annotations

import pytest
import torch

import isentrope as ise
from tests.fixtures.dense_llama import HEAD_DIM, HEADS, dense_logits, theta
from tests.fixtures.finetuning import memorise, next_token_loss, part, sample_beyond_one
from tests.fixtures.models import TRAINED, extend, llama, tokens

PAIR = "rerope:window=16+ssmax:keys=near+ssmax:bias=true,keys=far+share:beta=1"


@pytest.mark.parametrize("recipe", ["cosine:alpha=16", "cosine:alpha=16+infoscale", "alibi", "ssmax", "nope"])
def test_training_from_scratch(recipe):
    model = llama(initializer_range=0.02, max_position_embeddings=16)  # so that InfoScale has something to do
    with pytest.raises(ValueError, match="allow_untrained"):
        ise.extend(model, recipe)
    with pytest.warns(UserWarning, match="not trained with"):
        ise.extend(model, recipe, allow_untrained=True)
    before = {name: x.detach().clone() for name, x in model.named_parameters()}
    losses = memorise(model.train(), tokens(2, 24), 40)
    assert losses[-1] < 0.3 * losses[0]
    assert not any(torch.equal(x, before[name]) for name, x in model.named_parameters())


def test_clex_is_part_of_the_model():
    plain, model = llama(), ise.extend(llama(), "clex")
    clex = part(model, ise.CLEX)
    added = {name: x for name, x in model.named_parameters() if name not in dict(plain.named_parameters())}
    assert len(added) == 2 and {id(x) for x in added.values()} == {id(clex.up.weight), id(clex.down.weight)}
    assert added.keys() == model.state_dict().keys() - plain.state_dict().keys()
    assert sum(isinstance(module, ise.CLEX) for module in model.modules()) == 1  # one for all layers
    assert not clex.training and model.train() is model and clex.training
    assert not model.eval().training and not clex.training
    assert part(ise.extend(llama().train(), "clex"), ise.CLEX).training
    model.to(torch.float64)
    assert clex.up.weight.dtype == clex.down.weight.dtype == torch.float64
    assert dict(ise.restore(model).named_parameters()).keys() == dict(plain.named_parameters()).keys()


def test_clex_starts_as_ntk():
    ids = tokens(2, 2 * TRAINED)
    model = ise.extend(llama(), "clex")
    # t = 2 for rows of twice the training length: base · (2t - 1)^{d/(d-2)}
    expected = dense_logits(llama(), ids, theta=theta(10000 * 3 ** (8 / 6)))
    torch.testing.assert_close(model(ids).logits, expected, atol=2e-3, rtol=2e-3)


def test_clex_trains():
    """Several steps on one shape: angles follow the parameters and the t that was drawn."""
    ids = tokens(2, 40)
    model = ise.extend(llama(initializer_range=0.1), "clex:max_factor=4").train()
    clex = part(model, ise.CLEX)
    sample_beyond_one(model)
    model(input_ids=ids, labels=ids).loss.backward()
    assert clex.down.weight.grad.any()
    optimiser = torch.optim.SGD(clex.parameters(), 1.0)
    optimiser.step()
    optimiser.zero_grad()
    model(input_ids=ids, labels=ids).loss.backward()
    assert clex.down.weight.grad.any() and clex.up.weight.grad.any()  # up was behind a zero before

    drawn, generator = set(), torch.Generator().manual_seed(0)
    with torch.no_grad():
        while len(drawn) < 4:
            drawn.add(t := clex.sample(generator))
            frequencies = clex.path(4, torch.float64, torch.device("cpu"))[t - 1]
            expected = dense_logits(llama(initializer_range=0.1), ids, theta=frequencies)
            torch.testing.assert_close(model(input_ids=ids).logits, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("recipe", ["clex:max_factor=3", "ssmax", "ssmax:bias=true", PAIR])
def test_learned_parts_by_finite_differences(recipe):
    ids = tokens(2, 2 * TRAINED + 5)
    model = extend(llama(initializer_range=0.2).double(), recipe)
    model.to(torch.float64)
    own = {name for name, _ in llama().named_parameters()}
    learned = {name: x for name, x in model.named_parameters() if name not in own}
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for x in learned.values():
            x.add_(0.1 * torch.randn(x.shape, generator=generator))

    def loss():
        return next_token_loss(model(input_ids=ids).logits, ids)

    loss().backward()
    for name, x in learned.items():
        way = torch.randn(x.shape, generator=generator, dtype=x.dtype)
        step = 1e-3 / way.norm()
        values = []
        with torch.no_grad():
            for sign in (1, -2):
                x.add_(sign * step * way)
                values.append(loss().item())
            x.add_(step * way)
        slope = (x.grad * way).sum().item()
        assert x.grad.any()
        # RMSNorm's fp32 is the noise here
        assert slope == pytest.approx((values[0] - values[1]) / (2 * step.item()), rel=1e-2, abs=1e-3), name


def test_ssmax_learns_in_every_layer():
    model = extend(llama(initializer_range=0.1), "ssmax:bias=true").train()
    plain = {name for name, _ in llama().named_parameters()}
    added = {name: x for name, x in model.named_parameters() if name not in plain}
    laws = [module for module in model.modules() if isinstance(module, ise.SSMax)]
    assert len(laws) == 2 and len(added) == 4
    assert {id(x) for law in laws for x in law.parameters()} == {id(x) for x in added.values()}
    memorise(model, tokens(2, 40), 3)
    assert all(x.shape == (HEADS,) and x.grad.abs().min() > 0 for x in added.values())
    assert (laws[0].slope != laws[1].slope).any()
    before = laws[0].slope.detach().clone()
    model.to(torch.bfloat16)
    assert torch.equal(laws[0].slope, before.to(torch.bfloat16))


def test_a_pair_learns_in_every_layer():
    model = extend(llama(initializer_range=0.1), PAIR).train()
    plain = {name for name, _ in llama().named_parameters()}
    added = {name: x for name, x in model.named_parameters() if name not in plain}
    assert sorted({name.split("temperature.")[1] for name in added}) == ["far.offset", "far.slope", "near.slope"]
    assert len(added) == 6
    memorise(model, tokens(2, 40), 2)
    assert all(x.shape == (HEADS,) and x.grad.abs().min() > 0 for x in added.values())
    alone = extend(llama(), "rerope:window=16+ssmax:keys=far")
    assert {name.split("temperature.")[1] for name in alone.state_dict().keys() - plain} == {"far.slope"}


def test_a_recipe_given_twice_is_not_shared():
    """What one model learns stays with it."""
    recipe = ise.Recipe.parse("clex", dim=HEAD_DIM, train_length=TRAINED)
    one, other = ise.extend(llama(), recipe), ise.extend(llama(), recipe)
    with torch.no_grad():
        part(one, ise.CLEX).down.weight.fill_(1)
    assert not part(other, ise.CLEX).down.weight.any() and not recipe.position.down.weight.any()
