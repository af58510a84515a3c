"""Extended models under transformers' continuous batching: the tokens of `generate`, and the plain model where idle."""

from __future__ import annotations

import copy

import pytest
import torch

import isentrope as ise
from isentrope.hf import paged
from isentrope.hf.continuous_batching import shares_prefixes
from tests.fixtures import model_types
from tests.fixtures.generation import BY_LENGTH, STEADY, extended, gemma, mistral, rows_of
from tests.fixtures.models import llama
from tests.fixtures.serving import (
    PAGE,
    find_likeliest,
    generate_alone,
    list_allocators,
    make_configs,
    serve,
    serve_tokens,
)
from tests.fixtures.turns import in_turns

pytestmark = pytest.mark.filterwarnings("ignore:.*was not trained with:UserWarning")
MODELS = {"llama": llama, "mistral": mistral, "gemma": gemma}
RETRIEVE = "rerope:window=8+retrieve:blocks=2,size=4,sinks=4,queries={queries}"
RECIPE = "rerope:window=16+share"
RECIPES = [*STEADY, RETRIEVE.format(queries=1), "layers:0=rerope:window=16;1=infoscale"]
# past the training length, 64, and within it; the second is as long as the fourth after its first new token
PROMPTS = [x.tolist() for x in rows_of(80, 41, 76, 42, 20, 61)]


@pytest.mark.parametrize(
    ("recipe", "name"),
    in_turns([*STEADY, RETRIEVE.format(queries=1), "layers:0=rerope:window=16;1=infoscale"], list(MODELS)),
)
def test_tokens_are_those_of_generate(recipe, name):
    """Prompts of several lengths together, some of them in two parts."""
    try:
        model = extended(recipe, MODELS[name]())
    except ValueError as error:
        pytest.skip(str(error))
    served = serve_tokens(model, PROMPTS, max_batch_tokens=250)
    assert served == find_likeliest(model, PROMPTS, served)


@pytest.mark.parametrize("recipe", ["rerope:window=400+retrieve", "rerope:window=16+retrieve:blocks=2,size=4", RECIPE])
def test_a_model_that_rotates_backwards(recipe):
    """Under recipes that are idle, and that are not."""
    model = ise.extend(model_types.build("nanochat").double(), recipe)
    served = serve_tokens(model, PROMPTS, max_batch_tokens=250)
    assert served == find_likeliest(model, PROMPTS, served)


def test_queries_that_choose_together():
    model = extended(RETRIEVE.format(queries=4))
    assert not shares_prefixes(model)
    assert serve_tokens(model, PROMPTS, max_batch_tokens=400) == generate_alone(model, PROMPTS)


@pytest.mark.parametrize("recipe", ["infoscale", RECIPE, "dualchunk+share"])
def test_prefixes_are_shared(recipe, monkeypatch):
    """Requests with a common beginning read the pages of the first."""
    model = extended(recipe)
    start = PROMPTS[0][: 4 * PAGE]
    prompts = [start + PROMPTS[2][:n] for n in (5, 20, 33)] + [start + PROMPTS[1][:1]]
    found = []
    search = paged.PagedAttentionCache.search_prefix_match

    def record(*args):
        found.append(search(*args))
        return found[-1]

    monkeypatch.setattr(paged.PagedAttentionCache, "search_prefix_match", record)
    expected = generate_alone(model, prompts)
    # a step takes one prompt, so that those after it find its pages
    assert serve_tokens(model, prompts, max_batch_tokens=98) == expected
    assert max(found) >= 4 * PAGE


def test_several_sequences_of_one_prompt():
    model = extended(RECIPE)
    generation, config = make_configs(4)
    generation.num_return_sequences = 3
    generation.do_sample, generation.temperature = True, 1e-4  # as good as greedy
    results = model.generate_batch(PROMPTS[:2], generation, config).values()
    expected = [tokens for tokens in generate_alone(model, PROMPTS[:2], 4) for _ in range(3)]
    assert [result.generated_tokens for result in results] == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("name", "recipe"), [("llama", RECIPE), ("llama", "infoscale"), ("gemma", RECIPE)])
def test_short_requests_are_the_plain_models_bit_for_bit(name, recipe, dtype):
    """Beside long ones, in batches of the same composition."""
    plain, model = (MODELS[name]().to(dtype) for _ in range(2))
    ise.extend(model, recipe)
    prompts = [x.tolist() for x in rows_of(9, 80, 5, 70, 8, 3)]
    short = [i for i, prompt in enumerate(prompts) if len(prompt) < 10]
    before, after = (serve(each, prompts, return_logprobs=True) for each in (plain, model))
    for i, (one, other) in enumerate(zip(before, after, strict=True)):
        same = one.generated_tokens == other.generated_tokens and one.logprobs == other.logprobs
        assert same == (i in short), i


def test_restored_and_copied_models():
    model = extended(RECIPE)
    expected = serve_tokens(copy.deepcopy(model), PROMPTS[:2])
    assert expected == serve_tokens(model, PROMPTS[:2]) == generate_alone(model, PROMPTS[:2])
    ise.restore(model)
    assert serve_tokens(model, PROMPTS[:2]) == generate_alone(llama().double(), PROMPTS[:2]) != expected


def test_a_manager_is_kept():
    model = extended(RECIPE)
    generation, config = make_configs(3)
    served = []
    for _ in range(2):
        results = model.generate_batch(PROMPTS, generation, config, persistent_manager=True)
        served.append([result.generated_tokens for result in results.values()])
    model.destroy_cached_continuous_batching_manager()
    assert served[0] == served[1] == generate_alone(model, PROMPTS, 3)


def test_a_kept_manager_ends_with_its_recipe():
    model = extended(RECIPE)
    generation, config = make_configs(3)
    model.generate_batch(PROMPTS, generation, config, persistent_manager=True)
    ise.restore(model)
    assert getattr(model, "_cached_continuous_batching_manager", None) is None
    ise.extend(model, "infoscale:train_length=16")
    results = model.generate_batch(PROMPTS, generation, config, persistent_manager=True)
    assert [result.generated_tokens for result in results.values()] == generate_alone(model, PROMPTS, 3)
    ise.restore(model)
    ise.extend(model, "ntk:factor=4,dynamic=true")
    with pytest.raises(ValueError, match="reads a text by its whole length"):
        model.generate_batch(PROMPTS, generation, config, persistent_manager=True)


def test_a_cancelled_request_leaves_nothing_behind():
    model = extended(RECIPE)
    generation, config = make_configs(200, allow_block_sharing=False)
    with model.continuous_batching_context_manager(generation, continuous_batching_config=config) as manager:
        manager.add_request(PROMPTS[2], request_id="cancelled", streaming=True)
        assert manager.get_result(timeout=30).request_id == "cancelled"
        manager.cancel_request("cancelled")
        manager.add_request(PROMPTS[0], request_id="other", max_new_tokens=6)
        results = iter(lambda: manager.get_result(timeout=30), None)
        other = next(result for result in results if result.request_id == "other" and result.is_finished())
        scheduler, cache = manager.batch_processor.scheduler, manager.batch_processor.cache
        assert other.generated_tokens == generate_alone(model, PROMPTS[:1])[0]
        assert not scheduler.active_requests and not scheduler.waiting_requests
        assert not any(allocator.block_table for allocator in list_allocators(cache))


@pytest.mark.parametrize("recipe", BY_LENGTH)
def test_recipes_by_the_length_of_a_text_are_refused(recipe):
    with pytest.raises(ValueError, match=r"continuous batching: .* reads a text by its whole length"):
        serve(extended(recipe), PROMPTS[:1])


def test_compiled_passes_are_refused():
    from transformers import CompileConfig

    model = extended(RECIPE)
    with pytest.raises(ValueError, match="expected no compiled passes"):
        serve(model, PROMPTS[:1], varlen_compile_config=CompileConfig())


def test_steps_do_not_overlap():
    model, prompts = ise.extend(llama(), "rerope:window=8+infoscale"), [list(range(1, 30)), list(range(5, 12))]
    expected = generate_alone(model, prompts)
    with pytest.warns(UserWarning, match="use_async_batching is off"):
        assert serve_tokens(model, prompts, use_async_batching=True) == expected
