"""What attention promises besides its numbers: memory order, modes, caches, compilers."""

from __future__ import annotations

from functools import partial
from itertools import product

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing import assert_close

import isentrope as ise
from isentrope.backends import chunked, one_query, tile_kernels
from isentrope.core import caching, layout
from isentrope.dispatch import BACKENDS
from tests.contract.matrix import CPU_BACKENDS
from tests.fixtures.memory import Largest
from tests.fixtures.recipes import TRAINABLE
from tests.fixtures.turns import in_turns

RECIPES = [
    "plain",
    "rope+infoscale:train_length=8",
    "rerope:window=4+logn:train_length=8",
    "rope+window:size=5",
    "alibi",
]


def tensors(queries=12, keys=12, heads=4, kv_heads=2, d=16, dtype=torch.float32, grad=False):
    torch.manual_seed(1)
    shapes = ((2, heads, queries, d), (2, kv_heads, keys, d), (2, kv_heads, keys, d))
    return [torch.randn(shape, dtype=dtype, requires_grad=grad) for shape in shapes]


@pytest.mark.parametrize("backend", [*TRAINABLE, "flex"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_memory_order_does_not_matter(recipe, backend):
    q, k, v = tensors()
    run = partial(ise.attention, recipe=recipe, causal=True, backend=backend, return_lse=True)
    out, aux = run(q, k, v)
    strided = [x.mT.contiguous().mT for x in (q, k, v)]
    assert strided[1].stride(-1) != 1
    ours, ours_aux = run(*strided)
    assert_close(ours, out)
    assert_close(ours_aux.lse, aux.lse)
    expanded = v[..., :1].expand_as(v)
    assert_close(run(q, k, expanded)[0], run(q, k, expanded.contiguous())[0])


@pytest.mark.parametrize("backend", TRAINABLE)
@pytest.mark.parametrize("recipe", [*RECIPES, "clex:dim=16,train_length=4"])
def test_autocast_changes_nothing(recipe, backend):
    q, k, v = tensors()
    recipe = ise.Recipe.parse(recipe)
    for part in recipe.learned:
        part.eval()
        torch.nn.init.normal_(part.down.weight, std=0.05)
    run = partial(ise.attention, q, k, v, recipe, causal=True, backend=backend, return_entropy=True)
    out, aux = run()
    with torch.autocast("cpu", torch.bfloat16):
        ours, ours_aux = run()
    assert torch.equal(ours, out) and torch.equal(ours_aux.entropy, aux.entropy)


def test_autocast_with_a_value_size_that_fused_kernels_refuse():
    q, k, _ = tensors(kv_heads=4, dtype=torch.bfloat16)
    v = torch.randn(2, 4, 12, 1536, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        out, aux = ise.attention(q, k, v, "rope", return_lse=True)
    assert aux.backend == "dense" and out.isfinite().all()


@pytest.mark.parametrize("backend", [name for name in CPU_BACKENDS if BACKENDS[name].gradient == "merged"])
def test_second_derivatives_are_refused_rather_than_wrong(backend):
    q, k, v = tensors(dtype=torch.float64, grad=True)
    out = ise.attention(q, k, v, "rerope:window=4", backend=backend)
    (dq,) = torch.autograd.grad((out**2).sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dq.sum().backward()


def test_second_derivatives_on_the_reference():
    tensors_64 = tensors(4, 4, 2, 1, 4, dtype=torch.float64, grad=True)
    run = partial(ise.attention, recipe="rerope:window=2", causal=True, backend="reference")
    assert torch.autograd.gradgradcheck(lambda q, k, v: run(q, k, v), tensors_64)


@pytest.mark.parametrize("recipe", RECIPES)
def test_gradients_after_inference_mode(recipe):
    """What is remembered from a call without gradients serves one with them."""
    ise.clear_caches()
    q, k, v = tensors(13, 13, grad=True)
    with torch.inference_mode():
        before = ise.attention(q, k, v, recipe, causal=True)
    out = ise.attention(q, k, v, recipe, causal=True)
    out.sum().backward()
    assert_close(out.detach(), before.clone())
    assert all(x.grad.isfinite().all() for x in (q, k, v))


def test_a_fake_call_leaves_nothing_behind():
    ise.clear_caches()
    with FakeTensorMode():
        ise.attention(*(torch.randn(1, 2, 21, 8) for _ in range(3)), "rerope:window=4", causal=True)
    assert ise.attention(*(torch.randn(1, 2, 21, 8) for _ in range(3)), "rerope:window=4", causal=True).isfinite().all()


def test_parts_that_change_are_asked_again():
    q, k, v = tensors()
    learned = ise.Recipe(temperature=ise.SSMax(4))

    class Own:
        factor = 1.0

        def scale(self, n, head_dim):
            return self.factor * torch.ones_like(n)

    own = ise.Recipe(temperature=Own())
    first = [ise.attention(q, k, v, recipe) for recipe in (learned, own)]
    with torch.no_grad():
        learned.temperature.slope.mul_(2)
    own.temperature.factor = 2.0
    for recipe, before in zip((learned, own), first, strict=True):
        assert not torch.allclose(ise.attention(q, k, v, recipe), before)


def test_what_is_remembered_is_bounded():
    ise.clear_caches()
    for keys in range(10, 20):  # decoding
        ise.attention(*tensors(1, keys), "leakyrerope:window=4", causal=True)
    assert len(layout._recent) <= caching.MAX_LAYOUTS
    for value in range(30):  # calibration
        fitted = ise.Fitted((4, 64), (1.0, 1.0 + value / 100))
        ise.attention(*tensors(), ise.Recipe(position=ise.RoPE(), temperature=fitted), causal=True)
    kept = [len(kept._values) for kept in layout._recent._values.values()]
    assert 0 < max(kept) <= caching.MAX_LAYOUT_VALUES
    ise.clear_caches()
    assert len(layout._recent) == 0


def test_one_step_of_decoding_is_plain_attention():
    """A single query at the end sees everything: the fused kernel without a mask, keys not copied to all heads."""
    q, k, v = tensors(1, 40)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    assert torch.equal(ise.attention(q, k, v, causal=True), expected)


@pytest.mark.filterwarnings("ignore:.*autograd.*should not be instantiated:DeprecationWarning")  # torch's own tracing
@pytest.mark.parametrize(
    ("recipe", "grad", "padded", "backend"),
    [
        # AOTAutograd, which takes as long as tracing, has its turn with two branches, merged by a function of their own
        (RECIPES[2], True, False, "aot_eager"),
        (RECIPES[2], False, True, "eager"),
        *in_turns(RECIPES[:2] + RECIPES[3:], [(False, True, "eager"), (True, False, "eager")]),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in product(RECIPES, (False, True), (False, True), ("aot_eager",))
        ),
    ],
)
def test_compiles_without_a_graph_break(recipe, grad, padded, backend):
    torch._dynamo.reset()
    entropy = grad
    lengths = torch.tensor([12, 7]) if padded else None

    def model(q, k, v):
        out = ise.attention(q, k, v, recipe, causal=True, lengths=lengths, return_entropy=entropy)
        return out[0] * out[1].entropy[..., None] if entropy else out

    q, k, v = tensors(grad=grad)
    expected = model(q, k, v)
    ours = torch.compile(model, fullgraph=True, backend=backend)(q, k, v)
    assert_close(ours, expected)
    if grad:
        weight = torch.randn_like(expected)
        for a, b in zip(*(torch.autograd.grad((x * weight).sum(), (q, k, v)) for x in (ours, expected)), strict=True):
            assert_close(a, b)


@pytest.mark.filterwarnings("ignore:.*autograd.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize(
    ("recipe", "queries"),
    [("rope+power:train_length=8,gamma=(0.1,0.2)", 1), ("rerope:window=4+share:beta=(0.1,0.3),reference=8", 30)],
)
def test_sizes_may_be_symbols_of_one_graph(recipe, queries):
    """With dynamic=True heads are symbols too, and so is whether there are fewer queries than keys."""
    torch._dynamo.reset()
    q, k, v = (torch.randn(1, 2, n, 8) for n in (queries, 30, 30))

    def model(q, k, v):
        return ise.attention(q, k, v, recipe, causal=True)

    expected = model(q, k, v)
    assert_close(torch.compile(model, fullgraph=True, dynamic=True, backend="eager")(q, k, v), expected)


def test_alibi_entropy_at_far_positions():
    q, k, v = tensors(64, 64)
    run = partial(ise.attention, q, k, v, "alibi", causal=True, return_entropy=True)
    near = run()[1].entropy
    far = run(position_ids=torch.arange(64) + 2**20)[1].entropy
    assert_close(far, near, rtol=0, atol=1e-5)


@pytest.mark.parametrize("backend", [*CPU_BACKENDS, "flex"])
def test_alibi_slopes_keep_their_digits(backend):
    """Of 12 heads, 4 have slopes that are no powers of two."""
    q = torch.randn(1, 12, 20, 4, dtype=torch.float64)
    ours = ise.attention(q, q, q, "alibi", backend=backend)
    assert_close(ours, ise.attention(q, q, q, "alibi", backend="reference"), rtol=0, atol=1e-13)


def test_positions_of_more_queries_than_keys_are_not_guessed():
    q, k, v = tensors(4, 3)
    with pytest.raises(ValueError, match="position_ids: expected 3 positions"):
        ise.attention(q, k, v, "rope", position_ids=torch.tensor([5, 6, 7]))


@pytest.mark.parametrize("told", [False, True])
@pytest.mark.parametrize("change", ["none", "sizes", "order"])
def test_no_table_of_all_pairs(change, told):
    q, k, v = tensors(2048, 2048)
    v = v[..., :8] if change == "sizes" else v
    k = k.mT.contiguous().mT if change == "order" else k
    with Largest() as largest, torch.no_grad():
        ise.attention(q, k, v, "plain", causal=True, backend="sdpa", return_lse=told)
    assert largest.numel <= 2 * q.numel()


@pytest.mark.parametrize("recipe", ["rope", "rerope:window=64", "rope+window:size=100", "alibi"])
@pytest.mark.parametrize("causal", [True, False])
def test_chunks_keep_to_their_budget(recipe, causal, monkeypatch):
    """Also where the first rows see most: keys ahead."""
    monkeypatch.setattr(chunked, "MAX_CHUNK_SCORES", {"cpu": 1 << 18})
    q, k, v = tensors(1024, 1024)
    with Largest() as largest, torch.no_grad():
        ise.attention(q, k, v, recipe, causal=causal, backend="chunked")
    assert largest.numel <= 1 << 19


def test_cudnn_is_given_what_pytorch_gives_it(monkeypatch):
    monkeypatch.setattr(tile_kernels, "CUDNN", 91002)
    taken = {
        (size, chip)
        for size in (20, 64, 128, 192, 256)
        for chip in (7, 8, 9, 10)
        if tile_kernels._cudnn_takes(size, chip)
    }
    assert taken == {(64, 9), (128, 9), (192, 9), (256, 9), (64, 10), (128, 10)}
    monkeypatch.setattr(tile_kernels, "CUDNN", 90800)
    assert not tile_kernels._cudnn_takes(256, 9)


def test_one_query_is_planned_once_whatever_its_laws_have_learned(monkeypatch):
    plans, make = [], one_query._make_plan
    monkeypatch.setattr(one_query, "_make_plan", lambda call: plans.append(call) or make(call))
    q, k, v = (torch.randn(2, 4, n, 8) for n in (1, 31, 31))
    recipe = ise.Recipe.parse("rerope:window=5+share:beta=0.5,reference=3+ssmax", heads=4)
    for _ in range(3):
        with torch.no_grad():
            recipe.temperature.slope.mul_(1.5)
            out = ise.attention(q, k, v, recipe, causal=True)
            exact = ise.attention(*(x.double() for x in (q, k, v)), recipe, causal=True, backend="reference")
        torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-5)
    assert len(plans) == 1
    recipe = ise.Recipe.parse("rerope:window=6+share:beta=0.5,reference=3+ssmax", heads=4)
    with torch.no_grad():
        ise.attention(q, k, v, recipe, causal=True)
    assert len(plans) == 2


@pytest.mark.parametrize("queries", [1, 12])
def test_lengths_that_change_in_place(queries):
    q, k, v = (torch.randn(2, 2, n, 8) for n in (queries, 12, 12))
    lengths, recipe = torch.tensor([12, 9]), "rerope:window=3+infoscale:train_length=4"
    for change in (0, -2, 2, -4, 4):
        lengths += change
        out = ise.attention(q, k, v, recipe, causal=True, lengths=lengths)
        assert torch.equal(out, ise.attention(q, k, v, recipe, causal=True, lengths=lengths.tolist()))
        exact = ise.attention(
            *(x.double() for x in (q, k, v)), recipe, causal=True, backend="reference", mask=ise.Padding(lengths)
        )
        kept = slice(None) if queries == 1 else slice(0, int(lengths.min()))
        torch.testing.assert_close(out[:, :, kept].double(), exact[:, :, kept], rtol=1e-5, atol=1e-5)
