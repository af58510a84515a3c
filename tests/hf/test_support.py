"""Features of transformers that docs/support.md lists and no other test of this folder shows."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaForCausalLM

import isentrope as ise
from tests.fixtures.models import llama, tokens

RECIPE = "rerope:window=16+share"
LENGTH = 80  # past the 64 tokens that the model is trained at


@pytest.fixture(scope="module")
def model():
    return ise.extend(llama(), RECIPE)


@pytest.fixture(scope="module")
def ids():
    return tokens(1, LENGTH)


@pytest.fixture(scope="module")
def expected(model, ids):
    with torch.no_grad():
        return model(ids).logits


def test_embeddings_in_place_of_ids(model, ids, expected):
    logits = model(inputs_embeds=model.get_input_embeddings()(ids)).logits
    torch.testing.assert_close(logits, expected)


def test_hidden_states(model, ids, expected):
    states = model(ids, output_hidden_states=True).hidden_states
    assert len(states) == model.config.num_hidden_layers + 1
    torch.testing.assert_close(model.lm_head(states[-1]), expected)


def test_attention_weights_are_not_returned(model, ids):
    assert not model(ids, output_attentions=True).attentions


def test_several_sequences_of_one_prompt(model, ids):
    torch.manual_seed(0)
    rows = model.generate(ids, max_new_tokens=3, do_sample=True, num_return_sequences=2)
    assert rows.shape == (2, LENGTH + 3) and torch.equal(rows[:, :LENGTH], ids.expand(2, -1))


def test_a_prompt_in_chunks(model, ids):
    whole = model.generate(ids, max_new_tokens=3, do_sample=False)
    assert torch.equal(model.generate(ids, max_new_tokens=3, do_sample=False, prefill_chunk_size=32), whole)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:torch.quantize_per_tensor:UserWarning")
def test_linear_layers_quantized_before_or_after(ids):
    def quantize(model):
        return torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, dtype=torch.qint8)

    before, after = ise.extend(quantize(llama()), RECIPE), quantize(ise.extend(llama(), RECIPE))
    with torch.no_grad():
        assert torch.equal(before(ids).logits, after(ids).logits)
    generated = [model.generate(ids, max_new_tokens=3, do_sample=False) for model in (before, after)]
    assert torch.equal(*generated)


def test_layers_on_disk(ids, expected, tmp_path):
    llama().save_pretrained(tmp_path / "model")
    names = ["model.embed_tokens", "model.layers.0", "model.norm", "model.rotary_emb", "lm_head"]
    places = dict.fromkeys(names, "cpu") | {"model.layers.1": "disk"}
    options = {"device_map": places, "offload_folder": tmp_path / "offloaded"}
    model = LlamaForCausalLM.from_pretrained(tmp_path / "model", **options)
    torch.testing.assert_close(ise.extend(model, RECIPE)(ids).logits, expected)


def test_offloading_comes_after_extending(ids, expected):
    from accelerate import cpu_offload

    offloaded = cpu_offload(llama(), execution_device="cpu")
    with pytest.raises(ValueError, match=r"has no data .* load the weights before extending"):
        ise.extend(offloaded, RECIPE)
    model = cpu_offload(ise.extend(llama(), RECIPE), execution_device="cpu")
    torch.testing.assert_close(model(ids).logits, expected)


def test_data_parallel(ids, tmp_path):
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    alone, shared = ise.extend(llama(), RECIPE), ise.extend(llama(), RECIPE)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        DistributedDataParallel(shared)(ids, labels=ids).loss.backward()
    finally:
        dist.destroy_process_group()
    alone(ids, labels=ids).loss.backward()
    for one, other in zip(alone.parameters(), shared.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)
