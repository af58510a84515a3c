"""A decoded token of a method that caches raw keys: the model's rotation by cos 1 and sin 0 is left out."""

import copy
import gc
import pickle
import weakref

import pytest
import torch
from transformers import DynamicCache, Gemma3nForCausalLM, Gemma3nTextConfig, LlamaConfig, LlamaForCausalLM
from transformers.models.llama import modeling_llama

import isentrope as ise
from isentrope.hf.unrotated import PlainAngles, Rotation, UnrotatedForward

RECIPE = "rerope:window=8+infoscale"


def make_model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=16,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def decode(model, tokens=4):
    ids, cache = torch.arange(24)[None] % 64, DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids[:, :20], past_key_values=cache)
        return torch.cat([model(ids[:, 20 + n : 21 + n], past_key_values=cache).logits for n in range(tokens)], 1)


def remove_forwards(model):
    for layer in model.model.layers:
        assert type(layer.self_attn.__dict__.pop("forward")) is UnrotatedForward


def test_tokens_come_out_the_same_without_the_rotation():
    model = ise.extend(make_model(), RECIPE)
    ours = decode(model)
    remove_forwards(model)
    assert torch.equal(ours, decode(model))


@pytest.mark.parametrize("recipe", [RECIPE, "selfextend:window=8,group=4", "infoscale"])
def test_decoded_tokens_are_rotated_only_where_a_cache_holds_rotated_keys(recipe, monkeypatch):
    calls, rotate = [], modeling_llama.rotate_half
    monkeypatch.setattr(modeling_llama, "rotate_half", lambda x: calls.append(x) or rotate(x))
    model = ise.extend(make_model(), recipe)
    calls.clear()
    decode(model, 1)
    prompt = 2 * len(model.model.layers)
    # the first token also finds out what the function does, once for all layers
    assert len(calls) == (2 * prompt if recipe == "infoscale" else prompt + 2)


def test_a_prompt_and_the_model_restored_run_the_forward_of_their_class():
    model = ise.extend(make_model(), RECIPE)
    decode(model)
    attention = model.model.layers[0].self_attn
    angles = attention.forward.angles
    assert angles.current
    with torch.no_grad():
        model(torch.arange(20)[None], use_cache=False)
    assert not angles.current
    ise.restore(model)
    assert "forward" not in vars(attention)


def test_a_forward_that_somebody_else_set_stays():
    model = make_model()
    attention = model.model.layers[0].self_attn
    attention.forward = type(attention).forward.__get__(attention)
    theirs = attention.forward
    expected = decode(ise.extend(model, RECIPE))
    assert vars(attention)["forward"] is theirs
    ise.restore(model)
    assert vars(attention)["forward"] is theirs
    assert torch.equal(decode(ise.extend(make_model(), RECIPE)), expected)


def test_a_forward_that_replaces_that_of_the_class_runs(monkeypatch):
    model, calls = ise.extend(make_model(), RECIPE), []
    forward = modeling_llama.LlamaAttention.forward

    def count(self, *args, **options):
        calls.append(self)
        return forward(self, *args, **options)

    monkeypatch.setattr(modeling_llama.LlamaAttention, "forward", count)
    decode(model, 1)
    assert len(calls) == 4


def test_functions_that_do_more_than_rotate_are_called():
    def interleave(q, k, cos, sin, unsqueeze_dim=1):
        return tuple(x.unflatten(-1, (-1, 2)).mT.flatten(-2) * cos + x * sin for x in (q, k))

    def widen(q, k, cos, sin, unsqueeze_dim=1):
        return q.double(), k.double()

    q = torch.arange(8.0).view(1, 2, 1, 4)
    for function in (interleave, widen):
        names = {"apply_rotary_pos_emb": function}
        angles = PlainAngles()
        rotation = Rotation(type(function)(function.__code__, names), angles)
        cos, sin = angles.make(None, (), {}, (torch.rand(1, 1, 4), torch.rand(1, 1, 4)), True)
        for _ in range(2):
            out, expected = rotation(q, q, cos, sin), function(q, q, cos, sin)
            assert out is not q and all(
                torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(out, expected, strict=True)
            )
        assert list(rotation.neutral.values()) == [False]


def test_angles_that_somebody_wrote_into_are_made_anew():
    angles = PlainAngles()
    given = torch.rand(1, 1, 4), torch.rand(1, 1, 4)
    first = angles.make(None, (), {}, given, True)
    assert angles.make(None, (), {}, given, True) is first
    first[0].mul_(2)
    cos, sin = angles.make(None, (), {}, given, True)
    assert torch.equal(cos, torch.ones(1, 1, 4)) and torch.equal(sin, torch.zeros(1, 1, 4))


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_have_forwards_of_their_own(duplicate):
    model = ise.extend(make_model(), RECIPE)
    expected = decode(model)
    other = duplicate(model)
    first, second = model.model.layers[0].self_attn, other.model.layers[0].self_attn
    assert second.forward.module() is second and second.forward.angles is not first.forward.angles
    assert torch.equal(decode(other), expected)
    assert second.forward.angles.current


def test_an_attention_module_is_freed_without_the_garbage_collector():
    model = ise.extend(make_model(), RECIPE)
    decode(model)
    ise.restore(model)
    attention = model.model.layers[0].self_attn
    PlainAngles().omit_rotation(attention)
    reference = weakref.ref(attention)
    gc.disable()
    try:
        del model.model.layers[0], attention
        model.model.layers = None
    finally:
        gc.enable()
    assert reference() is None


def test_a_replica_runs_its_own_weights():
    """As `nn.DataParallel` makes them, whose replicas share the instance's attributes."""
    model = ise.extend(make_model(), RECIPE)
    attention = model.model.layers[0].self_attn
    replica = attention._replicate_for_data_parallel()
    assert "forward" not in vars(replica) and "forward" in vars(attention)
    assert replica.forward.__self__ is replica
    ise.restore(model)
    assert "_replicate_for_data_parallel" not in vars(attention)


def test_names_that_a_library_replaces_later_reach_decoded_tokens(monkeypatch):
    model = ise.extend(make_model(), RECIPE)
    decode(model, 1)
    calls, attend = [], modeling_llama.eager_attention_forward
    monkeypatch.setattr(modeling_llama, "eager_attention_forward", lambda *a, **k: calls.append(a) or attend(*a, **k))
    decode(model, 1)
    forward = model.model.layers[0].self_attn.forward.forward
    assert forward.__globals__["eager_attention_forward"] is modeling_llama.eager_attention_forward


def test_angles_that_a_later_hook_changes_in_place_rotate():
    model = ise.extend(make_model(), RECIPE)
    decode(model, 1)
    hook = model.model.rotary_emb.register_forward_hook(lambda module, given, out: (out[0].mul_(2), out[1]))
    ours = decode(model, 1)
    remove_forwards(model)
    expected = decode(model, 1)
    hook.remove()
    assert torch.equal(ours, expected)


def test_queries_and_keys_that_are_rotated_apart_keep_their_models_function():
    """As Gemma 3n and Gemma 4 do: (x, cos, sin) in place of (q, k, cos, sin)."""
    config = Gemma3nTextConfig(
        vocab_size=64, vocab_size_per_layer_input=64, hidden_size=32, hidden_size_per_layer_input=8,
        intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        sliding_window=16, max_position_embeddings=16, num_kv_shared_layers=0, laurel_rank=4, altup_num_inputs=2,
        layer_types=["full_attention"] * 2, activation_sparsity_pattern=[0.0] * 2, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = ise.extend(Gemma3nForCausalLM(config).eval(), RECIPE)
    ids, cache = torch.arange(1, 25)[None], DynamicCache(config=config)
    with torch.no_grad():
        whole = model(ids, use_cache=False).logits
        model(ids[:, :20], past_key_values=cache)
        ours = torch.cat([model(ids[:, n : n + 1], past_key_values=cache).logits for n in range(20, 24)], 1)
    torch.testing.assert_close(ours, whole[:, 20:], rtol=0, atol=1e-4)
