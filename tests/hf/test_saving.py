"""Saving an extended model and loading it again: its recipe in config.json, what it learned among the weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    LlamaForSequenceClassification,
    LlamaForTokenClassification,
    LlamaModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import isentrope as ise
from tests.fixtures.models import TRAINED, VOCABULARY, llama, tokens

LONG = 80  # past the length of the tiny model
UNTRAINED = ("cosine", "alibi", "nope", "ssmax")
# (layers, heads, lengths)
TABLE = [[[1.0, 1.1 + 0.03 * head, 1.3 + 0.1 * layer] for head in range(4)] for layer in range(2)]
FITTED = ise.Recipe(position=ise.ReRoPE(32), temperature=ise.Fitted((32, 64, 128), TABLE))
WITHOUT_LEARNING = [
    "yarn:factor=4",
    "pi:factor=2+infoscale",
    "ntk:factor=4",
    "ntk:factor=4,dynamic=true",
    "rerope:window=32+infoscale:train_length=64",
    "leakyrerope:window=32,leak=8",
    "selfextend:window=32,group=4",
    "logn",
    "yarn:factor=4+yarntemperature:factor=4",
    "window:size=24",
    "sink:sinks=4,size=24",
    "rerope:window=24+lambda:sinks=5,window=24",
    "rope+(window:size=8|sink:sinks=2,size=4)&window:size=40",
    "cosine:alpha=16",
    "cosine:alpha=16+infoscale",
    "alibi",
    "nope",
    FITTED,
]
LEARNING = ["clex", "clex:hidden=6,max_factor=4", "ssmax", "ssmax:bias=true", "clex+ssmax", "rerope:window=16+ssmax"]


def extend(model, recipe, **options):
    """`ise.extend`, with the warning that belongs to parts a model must be trained with."""
    if not any(name in str(recipe) for name in UNTRAINED):
        return ise.extend(model, recipe, **options)
    with pytest.warns(UserWarning, match="not trained with"):
        return ise.extend(model, recipe, allow_untrained=True, **options)


def learned(model, plain=None):
    """Parameters that the plain model does not have."""
    known = dict((plain or llama()).named_parameters())
    return {name: x for name, x in model.named_parameters() if name not in known}


def trained(model, plain=None):
    """The model with other values in what the recipe learns."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for x in learned(model, plain).values():
            x.add_(0.1 * torch.randn(x.shape, generator=generator, dtype=x.dtype))
    return model


def saved_config(folder):
    return json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize("recipe", [*WITHOUT_LEARNING, *LEARNING], ids=str)
def test_round_trip(recipe, tmp_path):
    """Loading says nothing of training, either: a saved model has had it, or its owner knows."""
    ids = tokens(2, LONG)
    mask = torch.ones_like(ids)
    mask[0, :13] = 0
    model = trained(extend(llama(), recipe))
    model.save_pretrained(tmp_path)
    loaded = ise.load(tmp_path)
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
def test_the_recipe_is_in_config_json(recipe, tmp_path):
    extend(llama(), recipe).save_pretrained(tmp_path)
    written = saved_config(tmp_path)["isentrope"]["recipe"]
    given = recipe if isinstance(recipe, ise.Recipe) else ise.Recipe.parse(recipe, heads=4, dim=8, train_length=TRAINED)
    expected = json.loads(json.dumps(given.to_dict()))
    assert written.keys() == expected.keys()
    for kind, part in expected.items():  # and perhaps more: what was taken from the model
        assert written[kind] == written[kind] | part
    assert json.loads(json.dumps(ise.Recipe.from_dict(written).to_dict())) == written


def test_config_json_reads_plainly(tmp_path):
    ise.extend(llama(), "rerope:window=32+infoscale").save_pretrained(tmp_path)
    assert saved_config(tmp_path)["isentrope"]["recipe"] == {
        "position": {"name": "rerope", "window": 32},
        "temperature": {"name": "infoscale", "train_length": 64},
    }


@pytest.mark.parametrize("recipe", WITHOUT_LEARNING, ids=str)
def test_weights_keep_their_names(recipe, tmp_path):
    model, plain = extend(llama(), recipe), llama()
    assert model.state_dict().keys() == plain.state_dict().keys()
    assert all(torch.equal(x, plain.state_dict()[name]) for name, x in model.state_dict().items())
    model.save_pretrained(tmp_path)
    plain.save_pretrained(tmp_path / "plain")
    saved, expected = (load_file(folder / "model.safetensors") for folder in (tmp_path, tmp_path / "plain"))
    assert saved.keys() == expected.keys()


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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("recipe", ["yarn:factor=4+infoscale", "rerope:window=32+infoscale", "clex", "ssmax"])
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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("recipe", ["yarn:factor=4", "rerope:window=32+infoscale", "clex+ssmax"])
def test_round_trip_in_the_dtype_it_was_saved_in(recipe, dtype, tmp_path):
    """Nothing that was learned is rounded on the way."""
    ids = tokens(2, LONG)
    llama().save_pretrained(tmp_path / "plain")
    model = extend(AutoModelForCausalLM.from_pretrained(tmp_path / "plain", dtype=dtype), recipe)
    for x in learned(model).values():
        x.data = x.data.to(dtype)
    trained(model).save_pretrained(tmp_path / "extended")
    assert torch.equal(ise.load(tmp_path / "extended", dtype=dtype)(ids).logits, model(ids).logits)


@pytest.mark.parametrize("recipe", ["clex+ssmax", "ssmax:bias=true"])
def test_a_missing_parameter_is_named(recipe, tmp_path):
    model = extend(llama(), recipe)
    model.save_pretrained(tmp_path)
    whole = load_file(tmp_path / "model.safetensors")
    for lost in learned(model):
        left = {name: x for name, x in whole.items() if name != lost}
        save_file(left, tmp_path / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ValueError, match=lost.replace(".", r"\.")):
            ise.load(tmp_path)


def test_a_parameter_of_another_shape_is_refused(tmp_path):
    model = extend(llama(), "ssmax")
    model.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    name = next(iter(learned(model)))
    for shape in ((1,), (7,)):  # one number would serve all heads, silently
        save_file(weights | {name: torch.ones(shape)}, tmp_path / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ValueError, match=name.replace(".", r"\.")):
            ise.load(tmp_path)


@pytest.mark.parametrize(
    ("broken", "complaint"),
    [
        ({"position": {"name": "reerope", "window": 32}}, "rerope"),
        ({"position": {"name": "rerope", "windows": 32}}, "window"),
        ({"position": {"name": "rerope"}}, "window"),
        ({"position": {"name": "rerope", "window": -1}}, "window"),
        ({"positions": {"name": "rerope", "window": 32}}, "position"),
        ({"temperature": {"name": "rerope", "window": 32}}, "temperature"),
        ({"position": "rerope"}, "rerope"),
        ("rerope:window=32", "rerope"),
        (None, "Recipe"),
    ],
)
def test_a_corrupted_recipe_is_refused(broken, complaint, tmp_path):
    ise.extend(llama(), "rerope:window=32").save_pretrained(tmp_path)
    config = saved_config(tmp_path)
    config["isentrope"]["recipe"] = broken
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=complaint):
        ise.load(tmp_path)


@pytest.mark.parametrize("note", [None, [], "rerope:window=32", {}])
def test_a_folder_without_a_recipe_is_refused(note, tmp_path):
    llama().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="recipe"):
        ise.load(tmp_path)
    config = saved_config(tmp_path) | {"isentrope": note}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="recipe"):
        ise.load(tmp_path)


@pytest.mark.parametrize("kind", [LlamaModel, LlamaForSequenceClassification, LlamaForTokenClassification])
@pytest.mark.parametrize("recipe", ["rerope:window=32+infoscale", "yarn:factor=4", "clex", "ssmax"])
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


@pytest.mark.parametrize("recipe", ["yarn:factor=4", "rerope:window=32", "clex+ssmax", "sink:sinks=4,size=24"])
@pytest.mark.parametrize("through", ["restore", "extended", "load"])
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


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("recipe", ["rerope:window=32", "yarn:factor=4"])
def test_attention_implementation(recipe, implementation, tmp_path):
    """What the model attends with once the recipe is taken off."""
    ids = tokens(1, LONG)
    model = ise.extend(llama(), recipe)
    model.save_pretrained(tmp_path / "extended")
    llama().save_pretrained(tmp_path / "plain")
    loaded = ise.load(tmp_path / "extended", attn_implementation=implementation)
    # where a recipe is idle the model's own implementation runs, and the two round differently
    torch.testing.assert_close(loaded(ids).logits, model(ids).logits, atol=2e-5, rtol=1e-5)
    ise.restore(loaded)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", attn_implementation=implementation)
    assert loaded.config._attn_implementation == implementation
    assert torch.equal(loaded(ids).logits, plain(ids).logits)


@pytest.mark.parametrize("kind", [str, Path])
@pytest.mark.parametrize("recipe", ["rerope:window=32", "clex+ssmax"])
def test_folder_as_text_or_path(kind, recipe, tmp_path):
    ids = tokens(1, LONG)
    model = trained(extend(llama(), recipe))
    model.save_pretrained(tmp_path)
    assert torch.equal(ise.load(kind(tmp_path))(ids).logits, model(ids).logits)


@pytest.mark.parametrize("recipe", ["rerope:window=32", "clex+ssmax"])
def test_a_name_on_the_hub(recipe, tmp_path):
    """Files as the hub's cache lays them out, so that nothing is fetched."""
    ids = tokens(1, LONG)
    model = trained(extend(llama(), recipe))
    cached = tmp_path / "models--someone--tiny"
    commit = "0123456789abcdef0123456789abcdef01234567"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text(commit)
    model.save_pretrained(cached / "snapshots" / commit)
    loaded = ise.load("someone/tiny", cache_dir=tmp_path, local_files_only=True)
    assert torch.equal(loaded(ids).logits, model(ids).logits)


def test_backend_and_options_travel(tmp_path):
    ids = tokens(1, LONG)
    model = ise.extend(llama(), "rerope:window=32", backend="reference")
    model.save_pretrained(tmp_path)
    assert torch.equal(ise.load(tmp_path)(ids).logits, model(ids).logits)
    loaded, information = ise.load(tmp_path), saved_config(tmp_path)
    assert information["isentrope"]["backend"] == "reference"
    assert loaded.config.max_position_embeddings == TRAINED


@pytest.mark.parametrize("recipe", ["yarn:factor=4", "ntk:factor=4,dynamic=true", "pi:factor=2+infoscale", "clex"])
def test_a_longer_length_in_the_config_does_not_change_the_recipe(recipe, tmp_path):
    """People raise max_position_embeddings once a model reaches further; what it was trained at stays what it was."""
    ids = tokens(1, 100)
    model = extend(llama(), recipe)
    expected = model(ids).logits
    model.config.max_position_embeddings = 4 * TRAINED
    model.save_pretrained(tmp_path)
    loaded = ise.load(tmp_path)
    assert loaded.config.max_position_embeddings == 4 * TRAINED
    assert torch.equal(loaded(ids).logits, expected)


def test_a_config_of_ones_own(tmp_path):
    """`config=` as in from_pretrained; the caller's object is left as it was."""
    ids = tokens(1, LONG)
    model = ise.extend(llama(), "rerope:window=32")
    model.save_pretrained(tmp_path)
    config = type(model.config).from_pretrained(tmp_path)
    before = config.to_json_string()
    for _ in range(2):
        assert torch.equal(ise.load(tmp_path, config=config)(ids).logits, model(ids).logits)
    assert config.to_json_string() == before


def test_a_missing_folder(tmp_path):
    with pytest.raises(OSError, match="nothing-here"):
        ise.load(tmp_path / "nothing-here")


def test_a_state_dict_moves_between_extended_models():
    """Without files: the learned parts are ordinary parameters."""
    ids = tokens(1, LONG)
    one, other = trained(extend(llama(), "clex+ssmax")), extend(llama(seed=1), "clex+ssmax")
    assert not other.load_state_dict(one.state_dict()).missing_keys
    assert torch.equal(other(ids).logits, one(ids).logits)
