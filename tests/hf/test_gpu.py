"""Extended models on a GPU."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import CompileConfig

import isentrope as ise
from tests.fixtures.generation import rows_of
from tests.fixtures.models import llama, tokens
from tests.fixtures.serving import generate_alone, serve, use_paged_sdpa

pytestmark = pytest.mark.gpu
BY_LENGTH = "longrope:factors=(1,1,1,1,2,2,2,2,3,3,3,3,4,4,4,4,4,4,4,4,4,4,4,4,4,4,4,4,4,4,4,4),original_length=64"
RECIPES = (
    "infoscale",
    "yarn:factor=4+logn",
    "rerope:window=48+infoscale",
    "leakyrerope:window=48+infoscale:keys=near+power:keys=far+share",
    "selfextend:window=48,group=4+infoscale",
    "dpe:window=48,scales=(1,2,2,4,8,8,4,16)+logn:keys=far+share",
    BY_LENGTH,
    "sink:sinks=4,size=48",
    "rerope:window=48+lambda:sinks=5,window=48",
    "window:size=48+logn",
)


def model(**overrides):
    """Heads of 64, which every fused kernel takes."""
    return llama(hidden_size=256, num_attention_heads=4, num_key_value_heads=2, initializer_range=0.05, **overrides)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_short_inputs_are_bit_identical(dtype):
    plain = model().to("cuda", dtype)
    ids = tokens(2, 48).cuda()
    with torch.no_grad():
        before = plain(ids).logits
        with ise.extended(plain, "rerope:window=48+infoscale"):
            assert torch.equal(plain(ids).logits, before)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
def test_agrees_with_the_reference(recipe, padded):
    ids = tokens(2, 200)
    mask = torch.ones_like(ids)
    if padded:
        mask[0, :37] = 0
    exact = model().double()
    with torch.no_grad(), ise.extended(exact, recipe, backend="reference"):
        truth = exact(ids, attention_mask=mask).logits
    for dtype, bound in ((torch.float32, 2e-3), (torch.bfloat16, 6e-2)):
        fast = model().to("cuda", dtype)
        with torch.no_grad(), ise.extended(fast, recipe):
            logits = fast(ids.cuda(), attention_mask=mask.cuda()).logits
        error = (logits.double().cpu() - truth)[mask.bool()].abs().max() / truth.abs().max()
        assert error < bound, (dtype, error)


@pytest.mark.parametrize("recipe", RECIPES)
def test_generates_the_same_with_every_cache(recipe):
    # with angles by the length of a row, a second layer caches what the first made of a shorter one
    fast = model(num_hidden_layers=1 if recipe == BY_LENGTH else 2).cuda()
    ids, mask = tokens(2, 60).cuda(), torch.ones(2, 60, dtype=torch.int64, device="cuda")
    mask[0, :11] = 0
    options = {"attention_mask": mask, "max_new_tokens": 30, "do_sample": False}
    with ise.extended(fast, recipe):
        dynamic = fast.generate(ids, **options)
        assert torch.equal(fast.generate(ids, use_cache=False, **options), dynamic)
        assert torch.equal(fast.generate(ids, cache_implementation="static", disable_compile=True, **options), dynamic)


@pytest.mark.parametrize("recipe", ["infoscale", "rerope:window=48+infoscale", "sink:sinks=4,size=48"])
def test_static_cache_compiles(recipe):
    fast = model().cuda()
    ids = tokens(1, 60).cuda()
    options = {"max_new_tokens": 30, "do_sample": False}
    with ise.extended(fast, recipe):
        dynamic = fast.generate(ids, **options)
        compiled = CompileConfig(fullgraph=True, mode="default")
        static = fast.generate(ids, cache_implementation="static", compile_config=compiled, **options)
    assert torch.equal(static, dynamic)


@pytest.mark.parametrize("recipe", ["infoscale", "rerope:window=48+infoscale", "selfextend:window=48,group=4"])
def test_gradients_agree_with_the_reference(recipe):
    ids = tokens(2, 200)
    gradients = []
    for device, dtype, backend in (("cpu", torch.float64, "reference"), ("cuda", torch.float32, "auto")):
        trained = copy.deepcopy(model()).to(device, dtype).train()
        with ise.extended(trained, recipe, backend=backend):
            trained(ids.to(device), labels=ids.to(device)).loss.backward()
        gradients.append(trained.model.layers[0].self_attn.k_proj.weight.grad.double().cpu())
    assert (gradients[1] - gradients[0]).abs().max() < 5e-3 * gradients[0].abs().max()


@pytest.mark.parametrize("recipe", ["rerope:window=48+share", "infoscale"])
def test_served_short_requests_are_bit_identical(recipe):
    """Beside long ones, in batches of the same composition."""
    plain, extended = (model().to("cuda", torch.bfloat16) for _ in range(2))
    use_paged_sdpa(plain)
    ise.extend(extended, recipe)
    prompts = [x.tolist() for x in rows_of(9, 80, 5, 170, 8, 30)]
    before, after = (serve(each, prompts, return_logprobs=True) for each in (plain, extended))
    for prompt, one, other in zip(prompts, before, after, strict=True):
        same = one.generated_tokens == other.generated_tokens and one.logprobs == other.logprobs
        assert same == (len(prompt) < 40), len(prompt)


@pytest.mark.parametrize("recipe", RECIPES[:6])
def test_served_tokens_are_those_of_generate(recipe):
    """Decoded in one call, whatever their lengths."""
    exact, fast = model().double(), model().to("cuda")
    prompts = [x.tolist() for x in rows_of(80, 41, 176, 42, 20)]
    for each in (exact, fast):
        ise.extend(each, recipe)
    served = [result.generated_tokens for result in serve(fast, prompts)]
    assert served == generate_alone(exact, prompts)
