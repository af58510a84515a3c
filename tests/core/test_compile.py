"""Few compilations whatever the shapes, and never the quiet step back to uncompiled code."""

from __future__ import annotations

from functools import partial
from itertools import product

import pytest
import torch
from torch._dynamo.utils import counters
from torch.testing import assert_close

import isentrope as ise
from isentrope import entropy
from isentrope.backends import dense, flex, merge
from isentrope.core import rotation
from isentrope.core.caching import clear_caches
from isentrope.core.compile import compile_variant


@pytest.fixture(autouse=True)
def _traced_only(monkeypatch):
    """Everything but code generation, which is the slow part and does not count."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    clear_caches()
    torch._dynamo.reset()
    counters.clear()
    yield
    clear_caches()
    torch._dynamo.reset()


def operand(batch, heads, n, transposed, grad):
    x = torch.randn(batch, n, heads, 8).transpose(1, 2) if transposed else torch.randn(batch, heads, n, 8)
    return x.requires_grad_(grad)


@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_any_mixture_of_shapes_folds(whole):
    """Batches, heads, lengths, one-token steps, memory orders and gradients in one process, in a bad order.

    Memory orders and gradients take turns, so that each of the four meets each length, batch and number of heads;
    with `-m slow` each shape is compiled with all of them.
    """
    booleans = (False, True)
    shapes = product((7, 1, 33), (1, 3), (4, 1, 6))
    for (turn, (n, batch, heads)), transposed, grad in product(enumerate(shapes), booleans, booleans):
        if not whole and 2 * transposed + grad != turn % 4:
            continue
        x = operand(batch, heads, n, transposed, grad)
        turn = torch.rand(1, 1, n, 4), torch.rand(1, 1, n, 4)
        tau = torch.rand(1, 1, n)
        run = compile_variant(rotation._rotate_and_scale, (x, turn[0], tau), 8, 4, False, False)
        assert torch.equal(run(x, *turn, tau, False, False), rotation._rotate_and_scale(x, *turn, tau, False, False))


def test_any_mixture_of_masks_biases_and_offsets_is_one_softmax():
    for n, rows, biased, batch in product((7, 12, 33, 50), (0, 1, 2), (False, True), (2, 3)):
        scores = [torch.randn(batch, 4, n, n)]
        masks = [torch.rand(1 if rows == 1 else batch, 1, n, n) > 0.2 if rows else None]
        biases = [torch.randn(1, 4, n, n) if biased else None]
        offsets = [torch.randn(1, 4 if biased else 1, n) if rows else None]
        terms = [(None, bias) for bias in biases]
        inputs = (scores, masks, terms, offsets, 0.5, torch.float32)
        run = compile_variant(dense._softmax, (*scores, *masks, *biases, *offsets), 1)
        for ours, expected in zip(run(*inputs), dense._softmax(*inputs), strict=True):
            assert torch.equal(ours, expected)


def test_a_sweep_of_lengths_takes_two_compilations():
    for n in range(10, 60):
        outs, lses = [torch.randn(1, 2, n, 8) for _ in range(2)], [torch.randn(1, 2, n) for _ in range(2)]
        run, rest = compile_variant(merge._merge, outs, 8), ([0, 0], n)
        for ours, expected in zip(run(outs, lses, *rest), merge._merge(outs, lses, *rest), strict=True):
            assert torch.equal(ours, expected)
    assert counters["stats"]["unique_graphs"] <= 2, dict(counters["stats"])


def test_numbers_of_laws_by_distance_are_no_arguments_of_graphs(monkeypatch):
    """FlexAttention cannot be compiled with a number that its function of scores captures."""
    inputs = []

    def record(graph, given):
        inputs.extend(given)
        return graph

    def run(*args):
        return compile_variant(flex._get_run(law), (*args[:3], args[4].kv_indices), law)(*args)

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=record))
    for distance, n in product((10.0, 4.0), (130, 300)):
        law = ise.ScaleInvariant(distance)
        x, recipe = torch.randn(1, 2, n, 16), ise.Recipe(temperature=law)
        expected = ise.attention(x, x, x, recipe, causal=True, backend="flex")
        with monkeypatch.context() as patch:
            patch.setattr(flex, "_run_eagerly", run)
            assert_close(ise.attention(x, x, x, recipe, causal=True, backend="flex"), expected)
    assert inputs and all(x.dim() for x in inputs if isinstance(x, torch.Tensor))
    assert counters["stats"]["unique_graphs"] == 4  # for each law the first length, and any other


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # torch's tracing
@pytest.mark.parametrize(
    ("recipe", "backend"),
    [
        pytest.param("rope+infoscale:train_length=8", "sdpa", marks=pytest.mark.slow),
        pytest.param("rope+infoscale:train_length=8", "flex", marks=pytest.mark.slow),
        ("rope:layout=interleaved+ssmax:heads=4+cosine:alpha=16", "chunked"),
        ("rerope:window=4+power:train_length=8,keys=far+share:beta=(0.5,1,2,0)", "sdpa"),
        pytest.param(
            "rerope:window=4+power:train_length=8,keys=far+share:beta=(0.5,1,2,0)", "flex", marks=pytest.mark.slow
        ),
        pytest.param("selfextend:window=4,group=2+sink:sinks=2,size=9", "sdpa", marks=pytest.mark.slow),
        pytest.param("dualchunk:chunk=6,local=2", "sdpa", marks=pytest.mark.slow),
        pytest.param("alibi+window:size=9", "chunked", marks=pytest.mark.slow),
        ("alibi+window:size=9", "flex"),
    ],
)
@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_compiled_path_of_a_gpu_gives_the_same_on_a_cpu(recipe, backend, whole, monkeypatch):
    """Everything a GPU would compile is traced here, in one graph each, over lengths, modes and gradients.

    Lengths take turns with gradients; a step of one token has none. With `-m slow` each runs with and without.
    """
    recipe = ise.Recipe.parse(recipe)
    run = partial(ise.attention, recipe=recipe, causal=True, backend=backend, return_entropy=True)
    settings = [(1, 30, False), (12, 12, True), (150, 300, False)]
    if whole:
        sizes = ((12, 12), (1, 30), (200, 200), (150, 300))
        settings = [(n, keys, grad) for n, keys in sizes for grad in (False, True)]
    shapes = [((2, 4, n, 16), (2, 2, keys, 16), (2, 2, keys, 16)) for n, keys, _ in settings]
    inputs = [[torch.randn(shape) for shape in three] for three in shapes]

    def results():
        for (_, _, grad), tensors in zip(settings, inputs, strict=True):
            if backend == "flex" and grad:
                continue  # no backward on a CPU
            q, k, v = (x.clone().requires_grad_(grad) for x in tensors)
            with torch.set_grad_enabled(grad):
                out, aux = run(q, k, v)
            yield from (out, aux.entropy)
            if grad:
                yield from torch.autograd.grad(out.square().sum(), (q, k, v))

    expected = list(results())
    for module in (rotation, merge, entropy):
        monkeypatch.setattr(module, "maybe_compile", compile_variant)
    monkeypatch.setattr(
        flex, "_run_eagerly", lambda *args: compile_variant(flex._run, (*args[:3], args[4].kv_indices))(*args)
    )
    for ours, truth in zip(results(), expected, strict=True):
        assert_close(ours, truth)
    assert counters["stats"]["unique_graphs"] > 0
