"""Saving an extended model and loading it again: its recipe in config.json, what it learned among the weights."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    LlamaForSequenceClassification,
    LlamaForTokenClassification,
    LlamaModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import isentrope as ise
from tests.fixtures.models import TRAINED, UNTRAINED, VOCABULARY, extend, llama, tokens
from tests.fixtures.saving import FITTED, LEARNING, LONG, WITHOUT_LEARNING, learned, saved_config, trained
from tests.fixtures.turns import in_turns

DTYPES = [torch.bfloat16, torch.float64]


@pytest.fixture(scope="module")
def save(tmp_path_factory):
    """Return a model under a recipe and the folder that it is saved in, once for all tests, which change neither."""
    saved = {}

    def save_once(recipe):
        if str(recipe) not in saved:
            model, folder = trained(extend(llama(), recipe)), tmp_path_factory.mktemp("saved")
            model.save_pretrained(folder)
            saved[str(recipe)] = model, folder
        return saved[str(recipe)]

    return save_once


@pytest.mark.parametrize("recipe", [*WITHOUT_LEARNING, *LEARNING], ids=str)
def test_round_trip(recipe, save):
    """Loading says nothing of training, either: a saved model has had it, or its owner knows."""
    ids = tokens(2, LONG)
    mask = torch.ones_like(ids)
    mask[0, :13] = 0
    model, folder = save(recipe)
    loaded = ise.load(folder)
    assert type(loaded) is type(model) and not loaded.training
    for options in ({}, {"attention_mask": mask}):
        expected = model(ids, **options).logits
        assert torch.equal(loaded(ids, **options).logits, expected)
        assert not torch.equal(expected, llama()(ids, **options).logits)
    if not learned(model):
        assert str(ise.describe(loaded)) == str(ise.describe(model))
    else:
        assert learned(loaded).keys() == learned(model).keys()
        assert all(torch.equal(x, learned(model)[name]) for name, x in learned(loaded).items())
        assert not torch.equal(expected, extend(llama(), recipe)(ids, **options).logits)  # the values matter


@pytest.mark.parametrize("recipe", ["yarn:factor=4", "rerope:window=32+infoscale", "clex", "ssmax"])
def test_generation_after_loading(recipe, tmp_path):
    ids = tokens(2, 60)
    model = trained(extend(llama(), recipe))
    model.save_pretrained(tmp_path)
    expected = model.generate(ids, max_new_tokens=12, do_sample=False)
    assert torch.equal(ise.load(tmp_path).generate(ids, max_new_tokens=12, do_sample=False), expected)


@pytest.mark.parametrize("recipe", [*WITHOUT_LEARNING, *LEARNING], ids=str)
def test_the_recipe_is_in_config_json(recipe, save):
    written = saved_config(save(recipe)[1])["isentrope"]["recipe"]
    given = recipe if isinstance(recipe, ise.Recipe) else ise.Recipe.parse(recipe, heads=4, dim=8, train_length=TRAINED)
    expected = json.loads(json.dumps(given.to_dict()))
    assert written.keys() == expected.keys()
    for kind, part in expected.items():  # and perhaps more: what was taken from the model
        both = zip(written[kind], part, strict=True) if isinstance(part, list) else [(written[kind], part)]
        assert all(ours == ours | given for ours, given in both)
    assert json.loads(json.dumps(ise.Recipe.from_dict(written).to_dict())) == written


def test_config_json_reads_plainly(tmp_path):
    ise.extend(llama(), "rerope:window=32+infoscale").save_pretrained(tmp_path)
    assert saved_config(tmp_path)["isentrope"]["recipe"] == {
        "position": {"name": "rerope", "window": 32},
        "temperature": {"name": "infoscale", "train_length": 64},
    }


@pytest.mark.parametrize("recipe", WITHOUT_LEARNING, ids=str)
def test_weights_keep_their_names(recipe, save):
    (model, folder), plain = save(recipe), llama()
    assert model.state_dict().keys() == plain.state_dict().keys()
    assert all(torch.equal(x, plain.state_dict()[name]) for name, x in model.state_dict().items())
    with safe_open(folder / "model.safetensors", "pt") as file:
        assert set(file.keys()) == set(plain.state_dict())


@pytest.mark.parametrize("recipe", ["rerope:window=32", "clex+ssmax"])
def test_no_pickles(recipe, tmp_path):
    extend(llama(), recipe).save_pretrained(tmp_path)
    assert {path.suffix for path in tmp_path.rglob("*")} == {".json", ".safetensors", ".md"}


@pytest.mark.parametrize("recipe", ["rerope:window=32", *LEARNING])
def test_sharded(recipe, tmp_path):
    ids = tokens(1, LONG)
    model = trained(extend(llama(), recipe))
    model.save_pretrained(tmp_path, max_shard_size="4KB")
    shards = list(tmp_path.glob("*.safetensors"))
    assert len(shards) > 3
    assert torch.equal(ise.load(tmp_path)(ids).logits, model(ids).logits)


def test_saving_again_in_other_shards(tmp_path):
    """What an earlier save left behind is not read."""
    ids = tokens(1, LONG)
    model = trained(extend(llama(), "clex+ssmax"))
    model.save_pretrained(tmp_path, max_shard_size="4KB")
    trained(model).save_pretrained(tmp_path)
    assert torch.equal(ise.load(tmp_path)(ids).logits, model(ids).logits)


@pytest.mark.parametrize(
    ("recipe", "dtype"),
    in_turns(["yarn:factor=4+infoscale", "rerope:window=32+infoscale", "clex", "ssmax"], DTYPES),
)
def test_loading_in_another_dtype(recipe, dtype, tmp_path):
    ids = tokens(2, LONG)
    model = trained(extend(llama(), recipe))
    model.save_pretrained(tmp_path / "extended")
    llama().save_pretrained(tmp_path / "plain")
    loaded = ise.load(tmp_path / "extended", dtype=dtype)
    other = extend(AutoModelForCausalLM.from_pretrained(tmp_path / "plain", dtype=dtype), recipe)
    with torch.no_grad():
        for name, x in learned(other).items():
            x.copy_(learned(model)[name].to(learned(loaded)[name].dtype))
    assert loaded.dtype == dtype
    torch.testing.assert_close(loaded(ids).logits, other(ids).logits, atol=1e-6, rtol=1e-6)


def test_loading_as_transformers_would(tmp_path):
    extend(llama(), "rerope:window=32").save_pretrained(tmp_path)
    assert ise.load(tmp_path, torch_dtype=torch.bfloat16).dtype == torch.bfloat16  # the older name of dtype
    for places in ("auto", "balanced", {"": "cpu"}):
        assert ise.load(tmp_path, device_map=places).dtype == torch.float32


@pytest.mark.parametrize(
    ("recipe", "dtype"), in_turns(["clex+ssmax", "rerope:window=32+infoscale", "yarn:factor=4"], DTYPES)
)
def test_round_trip_in_the_dtype_it_was_saved_in(recipe, dtype, tmp_path):
    """Nothing that was learned is rounded on the way."""
    ids = tokens(2, LONG)
    llama().save_pretrained(tmp_path / "plain")
    model = extend(AutoModelForCausalLM.from_pretrained(tmp_path / "plain", dtype=dtype), recipe)
    for x in learned(model).values():
        x.data = x.data.to(dtype)
    trained(model).save_pretrained(tmp_path / "extended")
    assert torch.equal(ise.load(tmp_path / "extended", dtype=dtype)(ids).logits, model(ids).logits)


@pytest.mark.parametrize(
    ("recipe", "kind"),
    in_turns(
        ["rerope:window=32+infoscale", "clex", "ssmax", "yarn:factor=4"],
        [LlamaModel, LlamaForSequenceClassification, LlamaForTokenClassification],
    ),
)
def test_other_heads_on_the_model(kind, recipe, tmp_path):
    ids = tokens(2, LONG)

    def make():
        torch.manual_seed(0)
        return kind(llama().config).eval()

    model = trained(extend(make(), recipe), make())
    assert bool(learned(model, make())) == (recipe in ("clex", "ssmax"))
    model.save_pretrained(tmp_path)
    loaded = ise.load(tmp_path)
    assert type(loaded) is kind
    assert torch.equal(loaded(ids)[0], model(ids)[0])
    assert not torch.equal(make()(ids)[0], model(ids)[0])


def test_another_family(tmp_path):
    """Layers with types, and a head size of their own."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=TRAINED,
        initializer_range=0.3,
        use_sliding_window=True,
        sliding_window=24,
        max_window_layers=1,
        bos_token_id=None,
        eos_token_id=None,
    )
    ids = tokens(2, LONG)
    model = extend(Qwen3ForCausalLM(config).eval(), "rerope:window=32+ssmax")
    model.save_pretrained(tmp_path)
    loaded = ise.load(tmp_path)
    assert torch.equal(loaded(ids).logits, model(ids).logits)
    assert str(ise.describe(loaded)) == str(ise.describe(model))


@pytest.mark.parametrize("recipe", ["rerope:window=32", "clex+ssmax"])
def test_tied_weights_stay_tied(recipe, tmp_path):
    ids = tokens(1, LONG)
    plain = llama(tie_word_embeddings=True)
    model = trained(extend(llama(tie_word_embeddings=True), recipe), plain)
    model.save_pretrained(tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    loaded = ise.load(tmp_path)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert torch.equal(loaded(ids).logits, model(ids).logits)


def test_generation_config_is_kept(tmp_path):
    model = ise.extend(llama(), "rerope:window=32")
    model.generation_config.max_new_tokens = 7
    model.generation_config.do_sample = True
    model.generation_config.top_k = 3
    model.save_pretrained(tmp_path)
    loaded = ise.load(tmp_path)
    assert loaded.generation_config.to_dict() == model.generation_config.to_dict()
    assert (loaded.generation_config.max_new_tokens, loaded.generation_config.top_k) == (7, 3)
    torch.manual_seed(0)
    ids = loaded.generate(tokens(1, 40))
    torch.manual_seed(0)
    assert ids.shape == (1, 47) and torch.equal(ids, model.generate(tokens(1, 40)))


@pytest.mark.parametrize("recipe", ["rerope:window=32", "yarn:factor=4", "clex+ssmax"])
def test_two_loaded_models_share_nothing(recipe, tmp_path):
    ids = tokens(1, LONG)
    model = trained(extend(llama(), recipe))
    model.save_pretrained(tmp_path)
    one, other = ise.load(tmp_path), ise.load(tmp_path)
    shared = {id(x) for x in (*one.parameters(), *one.buffers())} & {
        id(x) for x in (*other.parameters(), *other.buffers())
    }
    assert not shared and one.config is not other.config
    with torch.no_grad():
        for x in one.parameters():
            x.zero_()
    ise.restore(one)
    assert torch.equal(other(ids).logits, model(ids).logits)


@pytest.mark.parametrize("recipe", [*LEARNING, "yarn:factor=4", "rerope:window=32+infoscale", FITTED], ids=str)
def test_saving_a_loaded_model(recipe, tmp_path):
    ids = tokens(1, LONG)
    model = trained(extend(llama(), recipe))
    model.save_pretrained(tmp_path / "first")
    ise.load(tmp_path / "first").save_pretrained(tmp_path / "second")
    assert saved_config(tmp_path / "second") == saved_config(tmp_path / "first")
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("first", "second"))
    assert first.keys() == second.keys() and all(torch.equal(x, second[name]) for name, x in first.items())
    assert torch.equal(ise.load(tmp_path / "second")(ids).logits, model(ids).logits)


@pytest.mark.parametrize(
    ("recipe", "through"),
    in_turns(
        ["yarn:factor=4", "rerope:window=32", "clex+ssmax", "sink:sinks=4,size=24"],
        ["restore", "extended", "load", "restore"],
        every=2,
    ),
)
def test_a_restored_model_is_saved_as_a_plain_one(recipe, through, tmp_path):
    ids = tokens(2, LONG)
    plain = llama()
    plain.save_pretrained(tmp_path / "plain")
    model = llama()
    if through == "extended":
        with extended_for_a_while(model, recipe):
            model(ids)
    else:
        extend(model, recipe)
        if through == "load":
            model.save_pretrained(tmp_path / "extended")
            model = ise.load(tmp_path / "extended")
        ise.restore(model)
    model.save_pretrained(tmp_path / "restored")
    assert saved_config(tmp_path / "restored") == saved_config(tmp_path / "plain")
    assert "isentrope" not in (tmp_path / "restored" / "config.json").read_text()
    with safe_open(tmp_path / "restored" / "model.safetensors", "pt") as file:
        assert set(file.keys()) == set(plain.state_dict())
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "restored")
    for again in (model, loaded):
        assert torch.equal(again(ids).logits, plain(ids).logits)


def extended_for_a_while(model, recipe):
    if not any(name in recipe for name in UNTRAINED):
        return ise.extended(model, recipe)

    class Warned:
        def __enter__(self):
            self.inner = ise.extended(model, recipe, allow_untrained=True)
            with pytest.warns(UserWarning, match="not trained with"):
                return self.inner.__enter__()

        def __exit__(self, *error):
            return self.inner.__exit__(*error)

    return Warned()


def test_saving_does_not_change_the_model(tmp_path):
    ids = tokens(1, LONG)
    model = trained(extend(llama(), "clex+ssmax"))
    before = model(ids).logits
    model.save_pretrained(tmp_path)
    assert torch.equal(model(ids).logits, before)
