"""Extended models served with CUDA graphs; on a CPU operations are recorded and repeated in their place."""

from __future__ import annotations

import warnings

import pytest
import torch
from transformers import ContinuousBatchingConfig

import isentrope as ise
from isentrope.backends.reference import ReferenceBackend
from isentrope.core.compile import HAS_TRITON, TRITON_INTERPRETED
from isentrope.hf import captured_pages, continuous_batching, model_runner
from isentrope.hf.captured_pages import LONGEST, CapturedPages, find_idle_length
from isentrope.hf.model_runner import ExtendedModelRunner, list_layers, prefers_graphs
from tests.fixtures.generation import STEADY, extended, gemma, mistral, rows_of
from tests.fixtures.graphs import graphs_on_a_cpu
from tests.fixtures.models import llama
from tests.fixtures.serving import find_likeliest, generate_alone, serve, serve_tokens, use_paged_sdpa
from tests.fixtures.turns import in_halves

pytestmark = pytest.mark.filterwarnings("ignore:.*was not trained with:UserWarning")
RECIPE = "rerope:window=16+share"
RECIPES = [recipe for recipe in STEADY if recipe != "ssmax"] + ["layers:0=rerope:window=16;1=infoscale"]
# two pass the window while they decode, and one the training length, 64
PROMPTS = [x.tolist() for x in rows_of(80, 41, 76, 42, 20, 61, 14, 9)]
# sizes that steps are padded to: graphs serve several steps each, and all are used
SIZES = {"q_padding_interval_size": 8, "kv_padding_interval_size": 64}
NEW = 12


class Exact(ReferenceBackend):
    """The reference in place of the decode kernel, which needs a GPU."""

    reads_padding = False


@pytest.fixture
def exact(monkeypatch):
    backend = Exact()
    monkeypatch.setattr(captured_pages, "choose_backend", lambda *call: backend)
    monkeypatch.setattr(captured_pages, "CAPTURABLE", (backend,))


@pytest.mark.parametrize("recipe", in_halves(RECIPES, 0))
def test_tokens_of_replayed_graphs_are_those_of_generate(recipe, exact):
    """A graph is recorded at some lengths, and repeated at others; some requests pass the window in between."""
    model = extended(recipe)
    with graphs_on_a_cpu() as runners:
        served = serve_tokens(model, PROMPTS, NEW, max_batch_tokens=250, **SIZES)
        (runner,) = runners
        assert runner.replays > NEW // 2 and runner.eager == 2  # prompts, in two steps
    assert served == find_likeliest(model, PROMPTS, served)


def test_requests_that_end_and_begin(exact):
    """Graphs of several numbers of requests, in pages that others have left."""
    model = extended(RECIPE)
    generated = {}
    with graphs_on_a_cpu() as runners:
        for prompts in (PROMPTS[:3], PROMPTS[3:4], PROMPTS[4:], PROMPTS[:3]):
            generated[len(generated)] = serve_tokens(model, prompts, 5, **SIZES) == generate_alone(model, prompts, 5)
        assert all(runner.replays for runner in runners)
    assert all(generated.values())


@pytest.mark.parametrize("paths", [(True, False), (False, True)])
def test_graphs_that_are_asked_for_on_one_path(paths, exact):
    """Those of tables of pages are an extended model's too, which reads lists of keys instead."""
    with graphs_on_a_cpu(paths) as runners:
        serve_tokens(extended(RECIPE), PROMPTS[:3], NEW, **SIZES)
        assert runners[0].replays > NEW // 2


def freeze(tensor):
    """A copy whose values have been read on the host, as a plan of the host is."""
    return torch.tensor(tensor.tolist())


@pytest.mark.parametrize("name", ["last_positions", "key_ends", "position_ids"])
def test_lengths_that_a_graph_has_frozen_are_noticed(name, exact, monkeypatch):
    """The tests here would fail if a graph kept lengths of the step that it was recorded in."""
    make = CapturedPages.__init__

    def make_stale(pages, row, *others):
        make(pages, row._replace(**{name: freeze(getattr(row, name))}), *others)

    model = extended(RECIPE)
    monkeypatch.setattr(CapturedPages, "__init__", make_stale)
    with graphs_on_a_cpu():
        served = serve_tokens(model, PROMPTS, NEW, **SIZES)
    assert served != find_likeliest(model, PROMPTS, served)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("recipe", [RECIPE, "infoscale"])
def test_short_requests_are_the_plain_models_bit_for_bit(recipe, dtype, exact):
    """Beside long ones, in steps that are padded alike."""
    plain, model = (llama().to(dtype) for _ in range(2))
    use_paged_sdpa(plain)
    ise.extend(model, recipe)
    prompts = [x.tolist() for x in rows_of(9, 80, 5, 70, 8, 3)]
    with graphs_on_a_cpu() as runners:
        before, after = (serve(each, prompts, return_logprobs=True, **SIZES) for each in (plain, model))
        assert runners[0].replays
    for prompt, one, other in zip(prompts, before, after, strict=True):
        same = one.generated_tokens == other.generated_tokens and one.logprobs == other.logprobs
        assert same == (len(prompt) < 10), len(prompt)


def test_steps_of_short_requests_are_the_plain_models_operations(exact):
    """No more and no fewer, but for masks, which the plain engine makes before its graph."""
    plans = []
    model = extended(RECIPE)
    with graphs_on_a_cpu() as runners, pytest.MonkeyPatch.context() as patch:
        plan = CapturedPages._plan
        patch.setattr(CapturedPages, "_plan", lambda *a: plans.append(plan(*a)) or plans[-1])
        serve(model, [x.tolist() for x in rows_of(3, 4)], 6, **SIZES)
        assert runners[0].replays
    assert plans and all(each.mask is not None and not each.batches for each in plans)


@pytest.mark.parametrize("recipe", ["infoscale", RECIPE, "dualchunk+share", "yarn:factor=4", "pi:factor=2"])
def test_idle_lengths(recipe):
    for layer in list_layers(extended(recipe)):
        length = find_idle_length(layer)
        assert length == 0 or layer.idle(length, False)
        assert length == LONGEST or not layer.idle(length + 1, False)  # new frequencies are the model's own attention


@pytest.mark.skipif(not (HAS_TRITON and TRITON_INTERPRETED), reason="kernels run on a CPU with TRITON_INTERPRET=1")
@pytest.mark.parametrize("recipe", [RECIPE, "selfextend:window=16,group=4+logn", "sink:sinks=4,size=24"])
def test_replayed_kernels_interpreted(recipe):
    model = ise.extend(llama(head_dim=32, num_hidden_layers=1), recipe)
    prompts = [x.tolist() for x in rows_of(9, 80, 12, 70, 90)]
    expected = serve(model, prompts, return_logprobs=True)
    with graphs_on_a_cpu() as runners:
        served = serve(model, prompts, return_logprobs=True, **SIZES)
        assert runners[0].replays
    for one, other in zip(served, expected, strict=True):
        assert one.generated_tokens == other.generated_tokens
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)


@pytest.mark.parametrize(
    ("make", "recipe", "reason"),
    [
        (llama, "rerope:window=8+retrieve:blocks=2,size=4,sinks=4,queries=1", "chooses keys or learns laws"),
        (llama, "ssmax", "chooses keys or learns laws"),
        (mistral, RECIPE, "layers with windows"),
        (gemma, RECIPE, "layers with windows"),
    ],
)
def test_models_whose_steps_cannot_be_captured(make, recipe, reason):
    """They are served without graphs, unpadded, and a warning says why."""
    model = extended(recipe, make())
    with graphs_on_a_cpu() as runners:
        with pytest.warns(UserWarning, match=f"without CUDA graphs, since .*{reason}"):
            served = serve_tokens(model, PROMPTS, 4, **SIZES)
        assert not runners[0].graphs and not runners[0].pad_inputs
    assert served == find_likeliest(model, PROMPTS, served)


def test_kernels_that_cannot_be_captured():
    """Where a call turns out to have no kernel for it, as on a CPU, the same step is run without a graph; said once."""
    model = extended(RECIPE)  # in fp64, which the decode kernel does not take
    with graphs_on_a_cpu() as runners, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        served = serve_tokens(model, PROMPTS[:3], 5, **SIZES)
        assert not runners[0].graphs and not runners[0].captures
    assert sum("without CUDA graphs, since rerope" in str(each.message) for each in caught) == 1
    assert served == generate_alone(model, PROMPTS[:3], 5)


@pytest.mark.parametrize("installed", [True, False])
def test_graphs_are_the_default_where_they_are_the_plain_models(installed, monkeypatch):
    """transformers serves a plain model with graphs by itself where it finds FlashAttention."""
    monkeypatch.setattr(model_runner, "is_flash_attn_2_available", lambda: installed)
    monkeypatch.setattr(model_runner, "is_flash_attn_3_available", lambda: False)
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    assert prefers_graphs(extended(RECIPE), gpu) == (installed and HAS_TRITON)
    assert not prefers_graphs(extended("ssmax"), gpu) and not prefers_graphs(extended(RECIPE), cpu)


def test_the_callers_options_stay_as_they_are(monkeypatch):
    """Other models may be served with them, which have no graphs by default."""
    monkeypatch.setattr(continuous_batching, "prefers_graphs", lambda *model: True)
    model, options = extended(RECIPE), ContinuousBatchingConfig()
    manager = model.init_continuous_batching(continuous_batching_config=options)
    assert manager.continuous_batching_config is not options and options == ContinuousBatchingConfig()


# on a GPU


def gpu_model(**options):
    """Heads of 64, which every fused kernel takes."""
    return llama(
        hidden_size=256, num_attention_heads=4, num_key_value_heads=2, initializer_range=0.05, **options
    ).cuda()


@pytest.fixture
def replays(monkeypatch):
    """Replays of CUDA graphs, by the runner; graphs that were captured are not among them."""
    counts, compute = [], ExtendedModelRunner.compute_batch

    def count(runner, *arguments):
        captured = sum(len(buffer._storage) for buffer in runner._graphs.values())
        compute(runner, *arguments)
        now = sum(len(buffer._storage) for buffer in runner._graphs.values())
        counts.append(runner._captures_step and now == captured)

    monkeypatch.setattr(ExtendedModelRunner, "compute_batch", count)
    return counts


GPU_RECIPES = (
    "infoscale",
    "yarn:factor=4+logn",
    "rerope:window=16+infoscale",
    "leakyrerope:window=48+infoscale:keys=near+power:keys=far+share:beta=(0.5,-1,0,1.5)",
    "selfextend:window=48,group=4+infoscale",
    "dpe:window=48,scales=(1,2,2,4,8,8,4,16)+logn:keys=far+share",
    "sink:sinks=4,size=48",
)


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", GPU_RECIPES)
def test_captured_tokens_are_those_of_generate(recipe, replays):
    """Captured at some lengths and replayed at others; of the default sizes, and of smaller ones."""
    exact, fast = gpu_model().double().cpu(), gpu_model()
    for each in (exact, fast):
        ise.extend(each, recipe)
    expected = generate_alone(exact, PROMPTS, NEW)
    for sizes in (SIZES, {}):
        replays.clear()
        assert serve_tokens(fast, PROMPTS, NEW, max_batch_tokens=250, use_cuda_graph=True, **sizes) == expected
        assert sum(replays) > 1


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [SIZES, {}], ids=["small", "default"])
@pytest.mark.parametrize("recipe", ["rerope:window=48+share", "infoscale"])
def test_captured_short_requests_are_bit_identical(recipe, sizes, replays):
    """To those of the plain model with graphs, beside long ones."""
    plain, model = (gpu_model().to(torch.bfloat16) for _ in range(2))
    use_paged_sdpa(plain)
    ise.extend(model, recipe)
    prompts = [x.tolist() for x in rows_of(9, 80, 5, 170, 8, 30)]
    options = {"use_cuda_graph": True, "return_logprobs": True, **sizes}
    before, after = (serve(each, prompts, **options) for each in (plain, model))
    assert sum(replays)
    for prompt, one, other in zip(prompts, before, after, strict=True):
        same = one.generated_tokens == other.generated_tokens and one.logprobs == other.logprobs
        assert same == (len(prompt) < 40), len(prompt)


@pytest.mark.gpu
def test_caches_may_be_emptied_between_replays(replays):
    """A graph keeps the constants that it has the addresses of, here those of each head."""
    recipe = "rerope:window=16+share:beta=(0.5,-1,0,1.5)"
    model = ise.extend(gpu_model(), recipe)
    expected = serve_tokens(model, PROMPTS, NEW)
    kept = torch.empty(0)
    compute = ExtendedModelRunner.compute_batch

    def compute_and_clear(*arguments):
        nonlocal kept
        compute(*arguments)
        ise.clear_caches(keep_compiled=True)
        kept = torch.full((1 << 20,), float("nan"), device="cuda")  # in memory that was freed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ExtendedModelRunner, "compute_batch", compute_and_clear)
        assert serve_tokens(model, PROMPTS, NEW, use_cuda_graph=True, **SIZES) == expected
    assert sum(replays) and kept.isnan().all()
