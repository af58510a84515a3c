"""Loading a saved model: broken folders, options, names and configs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import isentrope as ise
from tests.fixtures.models import TRAINED, extend, llama, tokens
from tests.fixtures.saving import LONG, learned, saved_config, trained


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
    with pytest.raises(ValueError, match="nothing-here: expected a folder with a model"):
        ise.load(tmp_path / "nothing-here")


def test_a_state_dict_moves_between_extended_models():
    """Without files: the learned parts are ordinary parameters."""
    ids = tokens(1, LONG)
    one, other = trained(extend(llama(), "clex+ssmax")), extend(llama(seed=1), "clex+ssmax")
    assert not other.load_state_dict(one.state_dict()).missing_keys
    assert torch.equal(other(ids).logits, one(ids).logits)
