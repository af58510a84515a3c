"""Calls that a step of continuous batching makes: which requests are in each, and how exact these are."""

from __future__ import annotations

import pytest
import torch

import isentrope as ise
from isentrope.core.compile import HAS_TRITON, TRITON_INTERPRETED
from isentrope.core.packed_layout import PackedLayout
from isentrope.hf import paged
from tests.fixtures.generation import extended, gemma, rows_of
from tests.fixtures.models import llama
from tests.fixtures.serving import find_likeliest, serve, serve_tokens

RECIPES = ("rerope:window=16+share", "selfextend:window=16,group=4+logn", "sink:sinks=4,size=24")
# within the training length, 64, and past it; the last are read in parts while the first decode
PROMPTS = [x.tolist() for x in rows_of(9, 80, 5, 70, 90, 75)]
PARTS = {"max_batch_tokens": 130}


@pytest.fixture
def calls(monkeypatch):
    """The batch of every call under a recipe, and its error against the dense reference in fp64."""
    made, run = [], paged.PagedStep._run_batch

    def record(step, layer, call, batch, key, value):
        out, backend = run(step, layer, call, batch, key, value), layer.backend
        layer.backend = "reference"
        wide = call._replace(query=call.query.double(), key=call.key.double(), value=call.value.double())
        truth = run(step, layer, wide, batch._replace(prepared=None), key.double(), value.double())
        layer.backend = backend
        made.append((batch, ((out.double() - truth).abs().max() / truth.abs().max()).item()))
        return out

    monkeypatch.setattr(paged.PagedStep, "_run_batch", record)
    return made


def check_packed(calls, bound):
    """Prompts, and requests that decode, are packed; nothing is further from the reference than the bound."""
    packed = {(batch.shared, batch.layout.queries > 1) for batch, _ in calls if isinstance(batch.layout, PackedLayout)}
    assert packed == {(False, True), (True, False)} and any(batch.prepared is not None for batch, _ in calls)
    assert max(error for _, error in calls) < bound


@pytest.mark.skipif(not (HAS_TRITON and TRITON_INTERPRETED), reason="kernels run on a CPU with TRITON_INTERPRET=1")
@pytest.mark.parametrize("recipe", RECIPES)
def test_kernels_of_packed_calls_interpreted(recipe, calls):
    model = ise.extend(llama(head_dim=32, num_hidden_layers=1), recipe)
    serve(model, PROMPTS, 2, **PARTS)
    check_packed(calls, 2e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", RECIPES)
def test_kernels_of_packed_calls(recipe, calls):
    model = ise.extend(llama(head_dim=64, initializer_range=0.05).to("cuda", torch.bfloat16), recipe)
    serve(model, PROMPTS, **PARTS)
    check_packed(calls, 2e-2)


@pytest.mark.parametrize("make", [llama, gemma])
@pytest.mark.parametrize("recipe", RECIPES)
def test_prompts_are_one_call(recipe, make, calls):
    """On a CPU, where requests that decode are padded rows; tokens are those of `generate`."""
    model = extended(recipe, make())
    served = serve_tokens(model, PROMPTS, **PARTS)
    assert max(error for _, error in calls) < 1e-12
    packed = [batch for batch, _ in calls if isinstance(batch.layout, PackedLayout)]
    assert packed and not any(batch.shared for batch in packed)
    assert served == find_likeliest(model, PROMPTS, served)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_short_requests_beside_prompts_in_parts_are_bit_identical(dtype):
    """They decode in steps that read long prompts."""
    plain, model = (llama().to(dtype) for _ in range(2))
    ise.extend(model, RECIPES[0])
    before, after = (serve(each, PROMPTS, return_logprobs=True, **PARTS) for each in (plain, model))
    for prompt, one, other in zip(PROMPTS, before, after, strict=True):
        same = one.generated_tokens == other.generated_tokens and one.logprobs == other.logprobs
        assert same == (len(prompt) < 10), len(prompt)
