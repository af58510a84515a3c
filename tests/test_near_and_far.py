"""Laws for near and far keys: what they count, what they leave alone, and what can be learned through them."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import isentrope as ise
from isentrope import Recipe, attention, dispatch
from isentrope.backends.merge import merge_into
from isentrope.builder import Inputs, build_call
from isentrope.core.partial_layout import PartialLayout, RowTable
from tests.contract.matrix import CPU_BACKENDS
from tests.fixtures.recipes import TRAINABLE, D, normal, qkv
from tests.fixtures.turns import in_turns

METHODS = {
    "rerope": ise.ReRoPE(5),
    "leaky": ise.LeakyReRoPE(5, 4.0),
    "selfextend": ise.SelfExtend(5, 3),
}
PAIR = (ise.Power(6, 0.5, keys="near"), ise.LogN(6, keys="far"))


class LearnedShare(nn.Module):
    """-β_h ln n_far, of no class that recipes know."""

    def __init__(self, heads=4):
        super().__init__()
        self.beta = nn.Parameter(torch.linspace(-0.5, 1.0, heads, dtype=torch.float64))

    def bias(self, n_far):
        return -self.beta[:, None] * n_far.log()


class LearnedTemperature(nn.Module):
    """τ_h = n^{γ_h}."""

    def __init__(self, keys, heads=4):
        super().__init__()
        self.keys, self.gamma = keys, nn.Parameter(torch.linspace(-0.2, 0.3, heads, dtype=torch.float64))

    def scale(self, n, head_dim):
        return n ** self.gamma[:, None]


class Counter:
    """A share law that keeps what it is given."""

    def __init__(self, count="far"):
        self.count = count

    def bias(self, n_far):
        self.counted = n_far
        return torch.zeros_like(n_far)


# --- counts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("mask", [None, ise.Window(9), ise.Sink(2, 7)])
@pytest.mark.parametrize("count", ["far", "visible"])
def test_far_keys_are_counted_on_both_sides(count, mask, causal):
    q, k, v = qkv(0, batch=1)
    share = Counter(count)
    attention(q, k, v, Recipe(position=METHODS["rerope"], mask=mask, share=share), causal=causal)
    apart = torch.arange(20)[:, None] - torch.arange(20)
    visible = (apart >= 0) if causal else torch.ones_like(apart, dtype=torch.bool)
    if mask is not None:
        inside = apart < mask.size if causal else apart.abs() <= mask.size
        visible &= inside | (torch.arange(20) < getattr(mask, "sinks", 0))
    expected = (visible & (apart.abs() >= 5)) if count == "far" else visible
    assert torch.equal(share.counted[0, 0], expected.sum(-1).clamp_min(1).double())


def test_far_keys_of_padded_rows_and_documents_are_those_of_the_row():
    q, k, v = qkv(0)
    share = Counter()
    recipe = Recipe(position=METHODS["rerope"], share=share)
    attention(q, k, v, recipe, causal=True, lengths=[20, 12])
    expected = torch.stack([(torch.arange(20).clamp_max(n - 1) - 4).clamp_min(1) for n in (20, 12)])
    assert torch.equal(share.counted[0, 0].long(), expected[0])
    assert torch.equal(share.counted[1, 0, :12].long(), expected[1, :12])
    attention(q, k, v, recipe, causal=True, mask=ise.Document(torch.arange(20) // 10))
    assert share.counted[0, 0].tolist() == [*[1.0] * 5, 1, 2, 3, 4, 5] * 2


@pytest.mark.parametrize("backend", CPU_BACKENDS)
@pytest.mark.parametrize("count", ["far", "visible"])
# where both laws act, where that of the far temperature alone does, and where jumps leave few keys near
@pytest.mark.parametrize(("reference", "step", "train_length"), [(4, 1, 6), (18, 1, 6), (16, 7, None)])
def test_first_keys_count_as_near_ones(reference, step, train_length, count, backend):
    """Against softmax of logits written out pair by pair, with a temperature of far keys, which spares them too."""
    q, k, v = qkv(0)
    n, window, sinks = 20, 5, 3
    recipe = Recipe(
        position=ise.ReRoPE(window),
        temperature=None if train_length is None else ise.LogN(train_length, keys="far"),
        share=ise.Share(0.8, reference, count=count, sinks=sinks),
    )
    position = step * torch.arange(n)
    apart = position[:, None] - position
    far = (apart >= window) & (position >= sinks)
    theta = 10000 ** -(torch.arange(0, D, 2).double() / D)
    angle = apart.clamp_max(window)[..., None] * theta
    a, b = q[:, :, :, None].split(D // 2, -1)
    turned = torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), -1)
    keys, values = (x.repeat_interleave(2, 1) for x in (k, v))
    scores = torch.einsum("bhijd,bhjd->bhij", turned, keys) / math.sqrt(D)
    counted = far if count == "far" else apart >= 0
    n_far = counted.sum(-1, keepdim=True).clamp_min(1).double()
    visible = (apart >= 0).sum(-1, keepdim=True).double()
    tau = 1.0 if train_length is None else (visible.clamp_min(2).log() / math.log(train_length)).clamp_min(1)
    scores = torch.where(far, scores * tau - 0.8 * (n_far / reference).log().clamp_min(0), scores)
    expected = scores.masked_fill(apart < 0, -torch.inf).softmax(-1) @ values
    given = {} if step == 1 else {"position_ids": position}
    assert_close(attention(q, k, v, recipe, causal=True, backend=backend, **given), expected)


def test_first_keys_of_rows_in_parts():
    """As processes have them: no part has as many keys as the law counts."""
    q, k, v = qkv(0)
    recipe = Recipe.parse("rerope:window=5+share:beta=1,reference=8,sinks=3")
    out, lse = torch.zeros(2, 4, 20, 5, dtype=torch.float64), torch.full((2, 4, 20), -torch.inf, dtype=torch.float64)
    for keys in (range(10), range(10, 20)):
        layout = PartialLayout(2, range(20), keys, RowTable(20), False, q.device)
        part = slice(keys.start, keys.stop)
        call = build_call(Inputs(q, k[:, :, part], v[:, :, part], causal=True, layout=layout), recipe)
        result = dispatch.dispatch(call, "auto", True, False)
        merge_into(out, lse, result.out, result.lse)
    assert_close(out, attention(q, k, v, recipe, causal=True))


def test_first_keys_are_a_branch_only_where_the_law_acts():
    q, k, v = qkv(0)
    recipe = Recipe.parse("rerope:window=5+share:beta=1,reference=15,sinks=4")
    for reference, far in ((15, [False, True]), (14, [False, False, True])):
        law = replace(recipe, share=replace(recipe.share, reference=reference))
        assert [branch.far for branch in build_call(Inputs(q, k, v, causal=True), law).branches] == far
    with pytest.raises(ValueError, match="leave sinks=… out of share"):
        Recipe.parse("rerope:window=5+share:beta=1,sinks=4+retrieve:blocks=2,size=4")


@pytest.mark.parametrize(
    ("text", "reference"),
    [
        ("rerope:window=5+share:beta=0.5+logn:train_length=8", 3),
        ("rerope:window=5+share:beta=0.5+power:train_length=8,keys=far", 3),
        ("rerope:window=5+share+loglength:keys=near+power:train_length=8,keys=far", 3),
        ("selfextend:window=5,group=2+share:beta=1+fitted:lengths=(9,12),table=(1,2)", 4),
        ("rerope:window=5+share:beta=1+logn:train_length=4", 1),  # nothing was far in training
        ("rerope:window=5+share:count=visible+logn:train_length=8", 8),
        ("rerope:window=5+share:reference=7+logn:train_length=8", 7),
        ("rerope:window=5+share", None),
        ("rerope:window=5+share:count=visible", None),
    ],
)
def test_the_reference_follows_from_the_training_length(text, reference):
    recipe = Recipe.parse(text)
    assert recipe.resolve().share.reference == reference
    assert recipe.resolve().resolve() is recipe.resolve() is recipe.resolve()
    own = {"rerope:window=5+share": 95, "rerope:window=5+share:count=visible": 100}.get(text, reference)
    for filled in (recipe.fill_train_length(100), Recipe.parse(text, train_length=100)):
        assert filled.share.reference == own
    assert Recipe.from_dict(recipe.to_dict(), train_length=100).share.reference == own
    assert str(recipe) == str(Recipe.parse(str(recipe)))


def test_calls_with_one_recipe_share_its_laws():
    q, k, v = qkv(0)
    recipe = Recipe.parse("rerope:window=5+share+logn:train_length=8").resolve()
    first, again = (build_call(Inputs(q, k, v, causal=True), recipe) for _ in range(2))
    assert first.branches is again.branches
    equal = build_call(Inputs(q, k, v, causal=True), Recipe.parse(str(recipe)))
    assert all(b.offset is a.offset and b.tau is a.tau for a, b in zip(first.branches, equal.branches, strict=True))
    assert [branch.far for branch in first.branches] == [False, True]
    assert [branch.offset is None for branch in first.branches] == [True, False]
    learned = replace(recipe, share=LearnedShare())
    assert not learned.cacheable and build_call(Inputs(q, k, v), learned).needs_grad


# --- what they leave alone --------------------------------------------------------------------------------------------

# of neighbouring backends, one has each dtype with the order that the other has not
DTYPES_AND_ORDERS = [(torch.float32, False), (torch.float32, True), (torch.bfloat16, True), (torch.bfloat16, False)]


@pytest.mark.parametrize(("backend", "dtype", "causal"), in_turns([*TRAINABLE, "flex"], DTYPES_AND_ORDERS, every=2))
def test_inside_the_training_length_nothing_changes(backend, dtype, causal):
    q, k, v = qkv(1, dtype=dtype)
    pair = (ise.Power(20, (1.0, -1.0, 0.5, 2.0), keys="near"), ise.InfoScale(20, keys="far"))
    for position in METHODS.values():
        given = {"causal": causal, "backend": backend, "return_lse": True, "return_entropy": True}
        out, aux = attention(q, k, v, Recipe(position=position), **given)
        law, laws = attention(q, k, v, Recipe(None, position, pair, None, ise.Share(1.5)), **given)
        assert torch.equal(law, out) and torch.equal(laws.lse, aux.lse) and torch.equal(laws.entropy, aux.entropy)


@pytest.mark.parametrize("backend", TRAINABLE)
def test_laws_of_one_branch_leave_the_other_alone(backend):
    """Queries that see near keys only, or far keys only, see no law of the others."""
    q, k, v = qkv(2)
    plain, near, far = (
        Recipe(None, METHODS["rerope"], law, mask)
        for law, mask in ((None, None), (ise.Power(2, keys="near"), None), (ise.Power(2, keys="far"), None))
    )
    share = replace(plain, share=ise.Share(2.0, 1))
    results = [attention(q, k, v, recipe, causal=True, backend=backend) for recipe in (plain, near, far, share)]
    assert torch.equal(results[2][:, :, :5], results[0][:, :, :5])
    assert torch.equal(results[3][:, :, :5], results[0][:, :, :5])
    assert not torch.allclose(results[1][:, :, 2:5], results[0][:, :, 2:5])
    # far keys alone: their bias is the same for all, so that the softmax does not see it, but the lse does
    positions = (torch.arange(100, 120)[None], torch.arange(20)[None])
    bare, biased = (
        attention(q, k, v, recipe, position_ids=positions, backend=backend, return_lse=True)
        for recipe in (near, replace(share, temperature=near.temperature))
    )
    assert_close(biased[0], bare[0], rtol=0, atol=1e-13)
    assert_close(biased[1].lse, bare[1].lse - 2 * math.log(20), rtol=0, atol=1e-12)


# --- gradients --------------------------------------------------------------------------------------------------------


def learn(backend, causal, recipe, parameters, **options):
    q, k, v = (x.requires_grad_() for x in qkv(3))
    out = attention(q, k, v, recipe, causal=causal, backend=backend, **options)
    return torch.autograd.grad((out * normal(9, *out.shape)).sum(), (q, k, v, *parameters))


@pytest.mark.parametrize("mask", [None, ise.Lambda(3, 7)])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", METHODS)
def test_learned_laws_have_the_same_gradients_on_every_backend(name, causal, mask):
    laws = tuple(LearnedTemperature(keys) for keys in ("near", "far"))
    share = LearnedShare()
    recipe = Recipe(None, METHODS[name], laws, mask, share)
    assert set(recipe.learned) == {*laws, share}
    parameters = (share.beta, *(law.gamma for law in laws))
    options = {"lengths": [20, 13]} if mask is None and causal else {}
    expected = learn("reference", causal, recipe, parameters, **options)
    assert all(bool((x != 0).any()) for x in expected)
    for backend in CPU_BACKENDS:
        for ours, truth in zip(learn(backend, causal, recipe, parameters, **options), expected, strict=True):
            assert_close(ours, truth, rtol=0, atol=1e-11)


@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_beta_alone_may_require_a_gradient(backend):
    q, k, v = qkv(3)
    share = LearnedShare(1)
    recipe = Recipe(position=METHODS["rerope"], share=share)
    grads = []
    for name in (backend, "reference"):
        out = attention(q, k, v, recipe, causal=True, backend=name)
        grads += torch.autograd.grad(out.square().sum(), share.beta)
    assert_close(grads[0], grads[1], rtol=0, atol=1e-11)


@pytest.mark.parametrize("backend", TRAINABLE)
def test_gradients_are_those_of_differences(backend):
    q, k, v = (x.requires_grad_() for x in qkv(4, batch=1, keys=4, heads=2, kv_heads=1))
    beta = torch.tensor([0.7, -0.4], dtype=torch.float64, requires_grad=True)

    def run(q, k, v, beta):
        share = SimpleNamespace(bias=lambda n_far: -beta[:, None] * n_far.log())
        recipe = Recipe(None, ise.ReRoPE(2), ise.LogN(2, keys="far"), None, share)
        return attention(q, k, v, recipe, causal=True, backend=backend)

    assert torch.autograd.gradcheck(run, (q, k, v, beta))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # torch's tracing
@pytest.mark.parametrize("backend", ["sdpa", pytest.param("chunked", marks=pytest.mark.slow)])
def test_a_learned_beta_in_a_compiled_graph(backend):
    share = LearnedShare()
    recipe = Recipe(None, METHODS["rerope"], ise.LogN(6, keys="far"), None, share)

    def run(q, k, v):
        return attention(q, k, v, recipe, causal=True, backend=backend)

    results = []
    torch._dynamo.reset()
    for function in (run, torch.compile(run, backend="eager", fullgraph=True)):
        # in fp64: a graph and its operations one by one add in another order
        q, k, v = (x.requires_grad_() for x in qkv(5))
        out = function(q, k, v)
        results.append([out, *torch.autograd.grad(out.square().sum(), (q, k, v, share.beta))])
    torch._dynamo.reset()
    for ours, truth in zip(*results, strict=True):
        assert_close(ours, truth)


# --- heads and weights ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["sdpa", "chunked", "dense", "flex"])
def test_tables_are_split_with_the_heads(backend, monkeypatch):
    q, k, v = qkv(6)
    table = (0.5, -1.0, 0.25, 2.0)
    recipe = Recipe(None, METHODS["rerope"], ise.Power(6, table, keys="far"), None, ise.Share(table, 2))
    given = {"causal": True, "backend": backend, "return_lse": True, "return_entropy": True}
    with torch.no_grad():
        whole, aux = attention(q, k, v, recipe, **given)
        monkeypatch.setattr(dispatch, "MAX_BRANCHED_Q_ELEMENTS", q.numel() // 2)
        parts, part_aux = attention(q, k, v, recipe, **given)
    for ours, truth in ((parts, whole), (part_aux.lse, aux.lse), (part_aux.entropy, aux.entropy)):
        assert_close(ours, truth, rtol=0, atol=1e-13)
    for head in range(4):
        alone = replace(recipe, temperature=ise.Power(6, table[head], keys="far"), share=ise.Share(table[head], 2))
        with torch.no_grad():
            one = attention(q[:, [head]], k[:, [head // 2]], v[:, [head // 2]], alone, causal=True, backend=backend)
        assert_close(one, whole[:, [head]], rtol=0, atol=1e-13)


def test_dropped_weights_are_those_of_the_law():
    q, k, v = qkv(7)
    seen = {}
    for backend in ("dense", "reference"):

        def drop(weights, backend=backend):
            seen[backend] = weights
            return weights * 0.5

        recipe = Recipe(None, METHODS["selfextend"], PAIR, None, ise.Share(1.0))
        call = build_call(Inputs(q, k, v, causal=True, dropout=drop), recipe.resolve())
        result = dispatch.dispatch(call, backend, need_lse=False, need_entropy=False)
        whole = attention(q, k, v, recipe, causal=True, backend="chunked")
        assert_close(result.out, whole / 2, rtol=0, atol=1e-13)
    assert_close(seen["dense"], seen["reference"], rtol=0, atol=1e-13)
