"""Pages that hold keys as the model rotates them: who reads them, and how exactly."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import isentrope as ise
from isentrope.hf.layer import get_layer
from isentrope.positions import RoPE
from tests.fixtures.generation import extended, gemma
from tests.fixtures.models import llama

LENGTH = 200


def list_layers(model):
    return [get_layer(layer.self_attn) for layer in model.model.layers]


@pytest.mark.parametrize(
    ("recipe", "rotated"),
    [
        ("rerope:window=16+share", True),
        ("selfextend:window=16,group=4", True),
        ("sink:sinks=4,size=24", True),
        ("layers:0=rerope:window=16;1=selfextend:window=16,group=4", True),
        ("infoscale", False),  # the model rotates anyway
        ("nope+infoscale", False),
        ("layers:0=rerope:window=16;1=yarn:factor=4", False),  # one rotary module, two sets of frequencies
        ("rerope:window=8+retrieve:blocks=2,size=4,sinks=4,queries=1", False),
    ],
)
@pytest.mark.filterwarnings("ignore:.*was not trained with:UserWarning")
def test_which_recipes_read_rotated_pages(recipe, rotated):
    layers = list_layers(extended(recipe))
    assert [layer.rotated_recipe is not None for layer in layers] == [rotated] * len(layers)


def test_windowed_layers_keep_their_own_rotation():
    recipes = [layer.rotated_recipe for layer in list_layers(extended("rerope:window=16", gemma()))]
    assert recipes[0] is None and recipes[1] is not None


def test_passes_without_pages_are_unrotated_after_a_step():
    """Every pass sets anew whether the rotary module rotates."""
    model = extended("rerope:window=16")
    ids = torch.arange(3, 80)[None]
    with torch.no_grad():
        before = model(ids).logits
        model.model.layers[0].self_attn.isentrope.layouts.set_paged(True)
        assert torch.equal(model(ids).logits, before)


@pytest.mark.parametrize("recipe", ["rerope:window=32", "selfextend:window=32,group=4", "dpe:window=32,scales=(1,2)"])
def test_rotated_keys_are_about_as_exact_as_the_plain_models(recipe):
    """In half precision: far keys have been rounded once more than raw ones, as all keys of the plain model are."""
    layer = list_layers(ise.extend(llama(head_dim=32), recipe))[0]
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, heads, LENGTH, 32, generator=generator).bfloat16() for heads in (4, 2, 2))
    positions = torch.arange(LENGTH)[None]
    rotated = [layer.rope.rotate(x, positions) for x in (q, k)]

    def attend(q, k, v, recipe, backend="auto"):
        return ise.attention(q, k, v, recipe, causal=True, backend=backend).double()

    def find_error(position, out):
        truth = attend(q.double(), k.double(), v.double(), replace(layer.recipe, position=position), "reference")
        return (out - truth).abs().max()

    with torch.no_grad():
        plain = find_error(RoPE(), attend(*rotated, v, None))
        assert find_error(layer.recipe.position, attend(*rotated, v, layer.rotated_recipe)) < 2 * plain
