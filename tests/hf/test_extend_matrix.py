"""The contract matrix under `extend`, and parts from outside the package, against a Llama written out in fp64."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

import isentrope as ise
from isentrope.core.region import EVERYTHING, band, first_keys
from isentrope.hf.rope import get_streaming_window
from isentrope.masks import Mask, Sink
from isentrope.positions import Branch, Lengths, NoPE, Position, ReRoPE, RoPE
from isentrope.positions.rope import PI, PositionMap, Rotary
from tests.contract.matrix import MASKS, POSITIONS, SCORES, TEMPERATURES, Setting, build
from tests.fixtures.models import llama, tokens

LENGTH = 40
SETTING = Setting(LENGTH, LENGTH, d=16)
# what a model that rotates whole heads in halves has no place for
REFUSED = {"rope:rotary_dim=8": "rotates 16 entries", "interleaved": "laid out 'half'"}


@pytest.fixture(scope="module")
def model():
    return llama(hidden_size=64, num_hidden_layers=1).double()


def dense(model, ids, recipe):
    """Logits of a Llama whose attention is the reference backend's, over queries and keys that nothing has rotated."""
    inner = model.model
    x = inner.embed_tokens(ids)
    for layer in inner.layers:
        attention, hidden = layer.self_attn, layer.input_layernorm(x)
        q, k, v = (
            projection(hidden).unflatten(-1, (-1, attention.head_dim)).transpose(1, 2)
            for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        out = ise.attention(q, k, v, recipe, causal=True, backend="reference")
        x = x + attention.o_proj(out.transpose(1, 2).flatten(2))
        x = x + layer.mlp(layer.post_attention_layernorm(x))
    return model.lm_head(inner.norm(x))


def positioned(recipe):
    """A recipe that leaves a model's positions as they are, for one that has none."""
    return ise.Recipe(recipe.score, recipe.position or RoPE(), recipe.temperature, recipe.mask)


def check(model, recipe):
    ids = tokens(1, LENGTH)
    with torch.no_grad():
        expected = dense(model, ids, positioned(recipe))
        with ise.extended(model, recipe, allow_untrained=True):
            actual = model(ids).logits
    # a model holds its frequencies in fp32: angles are off by 40 roundings
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-4 * expected.abs().max().item())


def streams(recipe):
    """Whether `extend` measures distances inside a cache: StreamingLLM, which test_families compares."""
    return get_streaming_window(recipe.mask, recipe.position) is not None


@pytest.mark.filterwarnings("ignore:.*was not trained with:UserWarning")
@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("position", POSITIONS)
def test_matrix(position, model, whole):
    """Every position with every other temperature, or with each of them; masks and scores in turn."""
    why = next((why for part, why in REFUSED.items() if part in position), None)
    turn = POSITIONS.index(position)
    for i, temperature in enumerate(TEMPERATURES):
        if not whole and (turn // 2 + i) % 2:
            continue
        mask = MASKS[(turn + (i if whole else i // 2)) % len(MASKS)]  # each position meets each of them
        recipe = build(position, temperature, mask, SCORES[i % 5 == 0], SETTING)
        if why is not None:
            with pytest.raises(ValueError, match=why):
                ise.extend(model, recipe, allow_untrained=True)
        elif not streams(recipe):
            check(model, recipe)


# --- parts from outside the package ---------------------------------------------------------------------------------


class Eighth(Rotary):
    """θ_m / 8."""

    def frequencies(self, head_dim: int, length: Tensor | int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return super().frequencies(head_dim, length, dtype, device) / 8


class Unanswered(PI):
    """Frequencies of its own, and the `rescale` of PI, which does not know of them."""

    def frequencies(self, head_dim: int, length: Tensor | int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return super().frequencies(head_dim, length, dtype, device) ** 2


class Bare(Position):
    """A method that rotates and says nothing of models."""

    rotates = True
    branches = Rotary.branches

    def frequencies(self, head_dim: int, length: Tensor | int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.ones(head_dim // 2, dtype=dtype, device=device)


class Answered(Bare):
    def rescale(self, model, length: Tensor | int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return self.frequencies(model.dim, length, dtype, device)


class Halved(Rotary):
    """Twice as slow from a distance of 8 on; says nothing of caches."""

    def branches(self, query: Tensor, key: Tensor, heads: int, lengths: Lengths) -> tuple[Branch, ...]:
        far = Branch(band(-torch.inf, -7), query.double() / 2, key.double() / 2)
        return (Branch(band(-7, torch.inf), query, key), far)


class Lengthwise(Rotary):
    """Slower in longer rows; says nothing of caches."""

    def frequencies(self, head_dim: int, length: Tensor | int, dtype: torch.dtype, device: torch.device) -> Tensor:
        slower = torch.as_tensor(length, device=device).to(dtype)[..., None] ** 0.5
        return super().frequencies(head_dim, length, dtype, device) / slower


class Far(ReRoPE):
    """Not at one distance beyond the window."""

    def far(self, query, key, sign, lengths):
        return query.double() / 2, key.double() / 2


class Learned(nn.Module, Position):
    """θ_m · exp(w_m)."""

    rotates, keys_cacheable, learns = True, False, True
    branches = Rotary.branches

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 8, dtype=torch.float64))

    def to_dict(self):
        return {"name": "learned"}

    def frequencies(self, head_dim: int, length: Tensor | int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return RoPE().frequencies(head_dim, length, dtype, device) * self.weight.exp().to(dtype)

    def rescale(self, model, length: Tensor | int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return model.theta.to(device, dtype) * self.weight.exp().to(dtype)


@dataclass(frozen=True)
class Cooler:
    """τ = 1 + n / 100: not even a `Temperature`."""

    def scale(self, n: Tensor, head_dim: int) -> Tensor:
        return 1 + n / 100

    def idle(self, length: int) -> bool:
        return False

    def to_dict(self):
        return {"name": "cooler"}


@dataclass(frozen=True)
class Beginning(Mask):
    """The first 30 keys."""

    def region(self, causal: bool):
        return (band(-torch.inf, 1) if causal else EVERYTHING) & first_keys(30)


class Nowhere(Sink):
    """A sink mask in name only."""

    def region(self, causal: bool):
        return Beginning().region(causal)


OUTSIDE = {
    "frequencies": ise.Recipe(position=Eighth()),
    "any position": ise.Recipe(position=Answered()),
    "branches": ise.Recipe(position=Halved()),
    "length": ise.Recipe(position=Lengthwise()),
    "window": ise.Recipe(position=Far(8)),
    "learned": ise.Recipe(position=Learned()),
    "temperature": ise.Recipe(temperature=Cooler(), position=ReRoPE(8)),
    "mask": ise.Recipe(mask=Beginning()),
    "another sink": ise.Recipe(mask=Nowhere(2, 8)),
    "none": ise.Recipe(position=NoPE()),
}


@pytest.mark.filterwarnings("ignore:.*was not trained with:UserWarning")
@pytest.mark.parametrize("kind", OUTSIDE)
def test_parts_from_outside(kind, model):
    check(model, OUTSIDE[kind])


def test_frequencies_from_outside_are_those_of_the_model_divided():
    """At the base of the model, not at the method's own."""
    model = llama(rope_parameters={"rope_type": "default", "rope_theta": 500.0})
    ids = tokens(1, LENGTH)
    with torch.no_grad():
        with ise.extended(model, "pi:factor=8"):
            expected = model(ids).logits
        with ise.extended(model, ise.Recipe(position=Eighth())):
            torch.testing.assert_close(model(ids).logits, expected, rtol=0, atol=1e-4)


@dataclass(frozen=True)
class Grouped(PositionMap):
    """Distances ⌊i/4⌋ - ⌊j/4⌋ everywhere."""

    def branches(self, query: Tensor, key: Tensor, heads: int, lengths: Lengths) -> tuple[Branch, ...]:
        return (Branch(query=query // 4, key=key // 4),)


def test_a_position_map_keeps_scaled_frequencies():
    """Where the model's frequencies are not those of its base, which `Rotary` refuses."""
    model = llama()
    model.model.rotary_emb.inv_freq *= 0.5
    ids = tokens(1, LENGTH)
    positions = torch.arange(LENGTH)[None]
    with torch.no_grad():
        expected = model(ids, position_ids=positions // 4).logits
        with ise.extended(model, ise.Recipe(position=Grouped())):
            torch.testing.assert_close(model(ids).logits, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize(("position", "name"), [(Unanswered(2.0), "unanswered"), (Bare(), "bare")])
def test_positions_without_an_answer_are_refused(position, name, model):
    with pytest.raises(ValueError, match=rf"{name}: .*implement {type(position).__name__}\.rescale"):
        ise.extend(model, ise.Recipe(position=position))
    assert model.config._attn_implementation == "sdpa"


def test_frequencies_of_no_base_are_not_replaced():
    """The model's frequencies, changed by hand: NTK would compute others from the base."""
    model = llama()
    model.model.rotary_emb.inv_freq *= 0.5
    for recipe in ("ntk:factor=4", "yarn:factor=4", ise.Recipe(position=Eighth())):
        with pytest.raises(ValueError, match="would replace them"):
            ise.extend(model, recipe)
    with ise.extended(model, "pi:factor=4"):
        torch.testing.assert_close(model.model.rotary_emb.inv_freq[0].item(), 0.125)


@pytest.mark.parametrize("recipe", [ise.Recipe(position=Far(8), mask=Sink(2, 8)), ise.Recipe(mask=Nowhere(2, 8))])
def test_a_streaming_cache_asks_what_a_part_does(recipe):
    with ise.extended(llama(), recipe) as model, pytest.raises(ValueError, match="StreamingCache: expected"):
        ise.StreamingCache(model)


@pytest.mark.parametrize("backend", ["decode", "band"])
def test_backends_that_may_refuse_a_call(backend):
    model = ise.extend(llama(), "rerope:window=8", backend=backend)
    with pytest.raises(ValueError, match=f"backend '{backend}' cannot compute this"), torch.no_grad():
        model(tokens(1, LENGTH))
