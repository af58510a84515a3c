"""torch.compile over an extended model: one graph, the same numbers, and no compilation for every token."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from torch.fx import GraphModule
from torch.testing import assert_close
from transformers import CompileConfig, DynamicCache, StaticCache

import isentrope as ise
from isentrope.hf.layer import get_layer
from tests.fixtures.models import llama, tokens

TWO_BRANCHES = (
    "rerope:window=32+infoscale:train_length=64,keys=near+power:train_length=40,keys=far+share:beta=(0.5,1,0,-1)"
)
NEAR_AND_FAR = f"{TWO_BRANCHES},sinks=2"  # a third branch of first keys
RECIPES = [
    "infoscale",
    NEAR_AND_FAR,
    "selfextend:window=32,group=4",
    "sink:sinks=4,size=24",
    "window:size=24",
    "yarn:factor=4",
]
SLOW_RECIPES = ["lampe:window=8,tail=0", "dpe:window=32,scales=(1,2,8)"]


def choose(eager, aot_eager, slow=None):
    """Recipes to trace, and those to run AOTAutograd on too, which takes as long.

    With `-m slow` AOTAutograd runs on all of them, or on those named, and the slow recipes are traced.
    """
    cases = [(recipe, "eager") for recipe in eager] + [(recipe, "aot_eager") for recipe in aot_eager]
    rest = [(recipe, "aot_eager") for recipe in slow or RECIPES]
    rest += [] if slow else [(recipe, "eager") for recipe in SLOW_RECIPES]
    return cases + [pytest.param(*case, marks=pytest.mark.slow) for case in rest if case not in cases]


CLOSE = {"atol": 1e-4, "rtol": 1e-5}  # fp32 in another order; logits reach 7


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def extended(recipe, layers=1):
    """One layer: a second one is compiled the same way and takes as long again."""
    return ise.extend(llama(num_hidden_layers=layers), recipe)


def compiled(model, backend):
    """Return the model in one graph without code generation, and what counts its graphs."""
    counter = CompileCounterWithBackend(backend)
    return torch.compile(model, fullgraph=True, backend=counter), counter


@pytest.mark.parametrize(("recipe", "backend"), choose([], []))  # each in other ways below
def test_a_forward_pass_is_one_graph(recipe, backend):
    model, ids = extended(recipe, layers=2 if recipe == RECIPES[-1] else 1), tokens(2, 100)
    fast, counter = compiled(model, backend)
    with torch.no_grad():
        for batch in (ids, tokens(2, 100, seed=1)):
            assert_close(fast(batch, use_cache=False).logits, model(batch, use_cache=False).logits, **CLOSE)
    assert counter.frame_count == 1


@pytest.mark.parametrize(("recipe", "backend"), choose([], [TWO_BRANCHES], slow=["infoscale", *RECIPES[1:4:2]]))
def test_padding_and_gradients(recipe, backend):
    model, ids, mask = extended(recipe), tokens(3, 90), torch.ones(3, 90, dtype=torch.int64)
    mask[1, :30], mask[2, 70:] = 0, 0
    labels = ids.masked_fill(mask == 0, -100)
    fast, counter = compiled(model, backend)
    results = []
    for run in (fast, model):
        model.zero_grad()
        out = run(ids, attention_mask=mask, labels=labels, use_cache=False)
        out.loss.backward()
        results.append([out.logits.detach()[mask.bool()], *(x.grad.clone() for x in model.parameters())])
    assert counter.frame_count == 1
    for ours, expected in zip(*results, strict=True):
        assert_close(ours, expected, **CLOSE)


@pytest.mark.parametrize(("recipe", "backend"), choose([], ["window:size=24+infoscale"]))
def test_decoding_compiles_once(recipe, backend):
    """Through the window and the training length, with a cache of fixed size."""
    model, ids = extended(recipe), tokens(2, 75)
    fast, counter = compiled(model, backend)
    static, dynamic = StaticCache(config=model.config, max_cache_len=96), DynamicCache(config=model.config)
    with torch.no_grad():
        for start, end in ((20, 40), (58, 75)):
            for cache in (static, dynamic):
                model(ids[:, cache.get_seq_length() : start], past_key_values=cache)
            for at in range(start, end):
                token = ids[:, at : at + 1]
                with torch.compiler.set_stance("fail_on_recompile" if at > 20 else "default"):
                    ours = fast(token, past_key_values=static).logits
                assert_close(ours, model(token, past_key_values=dynamic).logits, **CLOSE)
    assert counter.frame_count == 1


@pytest.mark.parametrize(("recipe", "backend"), choose([NEAR_AND_FAR], [], slow=["infoscale", NEAR_AND_FAR]))
def test_generate_compiles_with_a_static_cache(recipe, backend):
    """As it does by itself on a GPU, through the window and the training length; the rows have different lengths."""
    model, ids = extended(recipe), tokens(2, 50)
    mask = torch.ones_like(ids)
    mask[1, :25] = 0
    options = {"attention_mask": mask, "do_sample": False, "max_new_tokens": 18}
    how = CompileConfig(fullgraph=True, backend=backend, mode=None)
    how._compile_all_devices = True  # a CPU is left out otherwise
    out = model.generate(ids, cache_implementation="static", compile_config=how, **options)
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]
    assert torch.equal(out, model.generate(ids, **options))


@pytest.mark.parametrize(
    "recipe",
    [
        "selfextend:window=32,group=4",
        *(pytest.param(recipe, marks=pytest.mark.slow) for recipe in ("yarn:factor=4", NEAR_AND_FAR)),
    ],
)
def test_packed_rows(recipe):
    model, ids = extended(recipe), tokens(1, 100)
    positions = torch.cat((torch.arange(40), torch.arange(60)))[None]
    fast, _ = compiled(model, "eager")
    with torch.no_grad():
        ours = fast(ids, position_ids=positions, use_cache=False).logits
        assert_close(ours, model(ids, position_ids=positions, use_cache=False).logits, **CLOSE)


def test_positions_that_jump_are_not_taken_for_others():
    """The geometry of raw keys is read from the mask when values may not be looked at: no quiet difference."""
    model, ids = extended("rerope:window=32"), tokens(1, 60)
    positions = torch.cat((torch.arange(30), torch.arange(100, 130)))[None]
    options = {"attention_mask": torch.ones_like(ids), "use_cache": False}
    fast, _ = compiled(model, "eager")
    with torch.no_grad():
        fast(ids, position_ids=torch.arange(60)[None], **options)
        with pytest.raises(RuntimeError, match="position_ids"):
            fast(ids, position_ids=positions, **options)


@pytest.mark.parametrize(
    ("recipe", "marked"),
    [
        ("infoscale", True),
        *(pytest.param("rerope:window=32", marked, marks=pytest.mark.slow) for marked in (False, True)),
        pytest.param(NEAR_AND_FAR, False, marks=pytest.mark.slow),
    ],
)
def test_lengths_that_change_do_not_compile_for_ever(recipe, marked):
    """torch takes a length for a variable when it has seen a second one, as it does in a plain model, or at once.

    Nothing of a graph outlives it.
    """
    model = extended(recipe)
    layouts = get_layer(model.model.layers[0].self_attn).layouts
    fast, counter = compiled(model, "eager")
    with torch.no_grad():
        for length in (100, 90, 80):
            ids = tokens(2, length)
            if marked:
                torch._dynamo.maybe_mark_dynamic(ids, 1)
            ours = fast(ids, use_cache=False).logits
            assert layouts.traced is None and not layouts.entries
            assert_close(ours, model(ids, use_cache=False).logits, **CLOSE)
            layouts.entries.clear()
    assert counter.frame_count == (1 if marked else 2)


def trace(model):
    """Count the operations of a pass through two layers by name: those of the second, and all others.

    Operations of graphs inside the graph are included.
    """
    rest, second = Counter(), Counter()

    def collect(graph, inputs):
        graphs = [module.graph for module in graph.modules() if isinstance(module, GraphModule)]
        for node in (node for graph in graphs for node in graph.nodes if node.op.startswith("call")):
            paths = [path for path, _ in node.meta.get("nn_module_stack", {}).values()]
            side = second if any(path.endswith("layers.1") for path in paths) else rest
            side[getattr(node.target, "__name__", node.target)] += 1
        return graph.forward

    torch._dynamo.reset()
    torch.compile(model, fullgraph=True, backend=collect)(tokens(2, 600), use_cache=False)
    return rest, second


SHARED = {"cos", "sin", "log", "cumsum", "minimum", "maximum", "arange", "any"}  # in masks, angles and laws


@pytest.fixture(scope="module")
def plain():
    """Operations that a further layer of the plain model adds."""
    with torch.no_grad():
        _, added = trace(llama(num_hidden_layers=2))
    return added


# in inference where far keys have a branch of their own, in training where they do not; the others with `-m slow`
PASSES = [
    (TWO_BRANCHES, False),
    ("infoscale", True),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in ((TWO_BRANCHES, True), ("infoscale", False))),
]


@pytest.mark.parametrize(("recipe", "training"), PASSES)
def test_layers_share_masks_angles_and_laws(recipe, training, plain):
    """What depends on positions alone is traced once: a further layer adds rotation, τ, the kernel and the merge."""
    with torch.set_grad_enabled(training):
        once, added = trace(extended(recipe, layers=2).train(training))
    assert once.keys() & SHARED and added and not added.keys() & SHARED
    # a pass with gradients has parts of kernels in its graph
    assert training or added.total() <= plain.total() + (26 if recipe == TWO_BRANCHES else 4)


def test_layers_of_several_kinds():
    """Each takes what layers like it share: recipes differ, and so do frequencies and the positions of keys."""
    recipe = "layers:0,2=rerope:window=32+share:beta=0.5;1=sink:sinks=4,size=24"
    model, ids = extended(recipe, layers=3), tokens(2, 90)
    fast, counter = compiled(model, "eager")
    with torch.no_grad():
        for batch in (ids, tokens(2, 90, seed=1)):
            assert_close(fast(batch, use_cache=False).logits, model(batch, use_cache=False).logits, **CLOSE)
    assert counter.frame_count == 1
    kinds = [get_layer(layer.self_attn) for layer in model.model.layers]
    assert kinds[0].recipe is kinds[2].recipe and kinds[0].recipe is not kinds[1].recipe


@pytest.mark.parametrize("backend", ["eager", pytest.param("aot_eager", marks=pytest.mark.slow)])
def test_checkpointed_layers(backend):
    """Each is a graph of its own, from which nothing may reach another."""
    model, ids = extended("infoscale", layers=2).train(), tokens(2, 90)
    model.gradient_checkpointing_enable()
    fast, counter = compiled(model, backend)
    results = []
    for run in (fast, model):
        model.zero_grad()
        out = run(ids, labels=ids, use_cache=False)
        out.loss.backward()
        results.append([out.logits.detach(), *(x.grad.clone() for x in model.parameters())])
    assert counter.frame_count == 1
    for ours, expected in zip(*results, strict=True):
        assert_close(ours, expected, **CLOSE)
