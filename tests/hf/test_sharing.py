"""A saved recipe cannot be lost: other tools apply it, or refuse the folder by name."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from importlib import import_module

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedTokenizerFast,
    pipeline,
)

import isentrope as ise
from isentrope.hf.card import CARD
from isentrope.hf.saved_models import MODEL_TYPE, add_marks, remove_marks
from tests.fixtures.models import TRAINED, VOCABULARY, llama, tokens

LONG = 80  # past the length of the tiny model
RECIPE = "rerope:window=32+infoscale"


@pytest.fixture
def model():
    return ise.extend(llama(), RECIPE)


@pytest.fixture
def folder(model, tmp_path):
    model.save_pretrained(tmp_path / "longer")
    return tmp_path / "longer"


def save_tokenizer(folder):
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {f"w{i}": i for i in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w1"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="w2").save_pretrained(folder)


def as_saved_before(folder):
    """A folder as it was written before there was a model type for it."""
    config = remove_marks(json.loads((folder / "config.json").read_text()))
    config["attn_implementation"] = "isentrope"
    del config["isentrope"]["base_model_type"]
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("options", [{}, {"attn_implementation": None}, {"attn_implementation": "isentrope"}], ids=str)
def test_auto_classes_give_the_extended_model(options, model, folder):
    ids = tokens(1, LONG)
    loaded = AutoModelForCausalLM.from_pretrained(folder, **options)
    assert torch.equal(loaded(ids).logits, model(ids).logits)
    assert not torch.equal(llama()(ids).logits, model(ids).logits)
    assert (
        type(loaded) is LlamaForCausalLM and loaded.config.model_type == "llama"
    )  # adapters and pipelines go by these
    assert str(ise.describe(loaded)) == str(ise.describe(model))
    hidden = AutoModel.from_pretrained(folder, **options)(ids).last_hidden_state
    assert torch.equal(loaded.lm_head(hidden), model(ids).logits)


def test_other_heads_and_loading_info(folder):
    ids = tokens(1, LONG)
    classifier, info = AutoModelForSequenceClassification.from_pretrained(
        folder, num_labels=3, output_loading_info=True
    )
    assert str(ise.describe(classifier).recipe).startswith("rerope:window=32+infoscale") and info["missing_keys"]
    assert classifier(ids).logits.shape == (1, 3)


def test_the_class_that_architectures_names(model, folder):
    """As servers look it up."""
    config = AutoConfig.from_pretrained(folder)
    kind = getattr(import_module("transformers"), config.architectures[0])
    loaded = kind.from_pretrained(folder, attn_implementation=None)
    assert torch.equal(loaded(tokens(1, LONG)).logits, model(tokens(1, LONG)).logits)


def test_a_model_from_its_config(model, folder):
    for config in (AutoConfig.from_pretrained(folder), model.config, pickle.loads(pickle.dumps(model.config))):
        fresh = AutoModelForCausalLM.from_config(config)
        assert str(ise.describe(fresh)) == str(ise.describe(model))


def test_learned_parameters_come_along(tmp_path):
    ids = tokens(1, LONG)
    with pytest.warns(UserWarning, match="not trained with"):
        model = ise.extend(llama(), "rerope:window=16+ssmax", allow_untrained=True)
    with torch.no_grad():
        for name, x in model.named_parameters():
            x.add_(0.1 if "isentrope" in name else 0)
    model.save_pretrained(tmp_path)
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path)(ids).logits, model(ids).logits)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_another_implementation_is_refused(implementation, folder):
    with pytest.raises(ValueError, match="recipe that"):
        AutoModelForCausalLM.from_pretrained(folder, attn_implementation=implementation)
    with pytest.raises(ValueError, match="isentrope recipe"):
        LlamaForCausalLM.from_pretrained(folder, attn_implementation=implementation)


def test_programs_without_isentrope_refuse_the_folder_by_name(model, folder, tmp_path):
    """Auto classes by the model type; a class of transformers, told how to attend, by the rope type.

    With a module for remote code, and leave to run it, isentrope need only be installed.
    """
    ise.export(model, tmp_path / "remote", remote_code=True)
    code = (
        "import sys\n"
        "from transformers import AutoModelForCausalLM, LlamaForCausalLM\n"
        "for kind, options in ((AutoModelForCausalLM, {}), (LlamaForCausalLM, {'attn_implementation': 'sdpa'}),\n"
        "                      (LlamaForCausalLM, {})):\n"
        "    try:\n"
        "        kind.from_pretrained(sys.argv[1], **options)\n"
        "    except Exception as error:\n"
        "        assert 'isentrope' in str(error), error\n"
        "    else:\n"
        "        raise AssertionError(f'{kind} loads the plain model')\n"
        "assert not any(name.startswith('isentrope') for name in sys.modules)\n"
        "model = AutoModelForCausalLM.from_pretrained(sys.argv[2], trust_remote_code=True)\n"
        "import isentrope\n"
        "assert 'rerope' in str(isentrope.describe(model))\n"
        "assert 'rerope' in str(isentrope.describe(AutoModelForCausalLM.from_pretrained(sys.argv[1])))\n"
    )
    environment = os.environ | {"HF_MODULES_CACHE": str(tmp_path / "modules")}
    command = [sys.executable, "-c", code, folder, tmp_path / "remote"]
    ran = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert ran.returncode == 0, ran.stderr


def test_the_launcher(folder, tmp_path, capsys, monkeypatch):
    from isentrope import run

    script = tmp_path / "script.py"
    script.write_text(
        "import sys\n"
        "from transformers import AutoModelForCausalLM\n"
        "model = AutoModelForCausalLM.from_pretrained(sys.argv[1], attn_implementation=None)\n"
        "print(__name__, sys.argv[1:], model.config._attn_implementation)\n"
    )
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(sys, "path", list(sys.path))
    run.main([str(script), str(folder)])
    assert capsys.readouterr().out.strip() == f"__main__ ['{folder}'] isentrope"


def test_what_the_launcher_runs(capsys, monkeypatch):
    from isentrope import run

    monkeypatch.setattr(sys, "argv", [])
    assert run.main([]) == 2 and run.main(["-m"]) == 2
    assert run.main(["--help"]) == 0 and "SCRIPT.py" in capsys.readouterr().out
    assert run.main(["no-such-program"]) == 2 and "no-such-program" in capsys.readouterr().err
    run.main(["-m", "this"])
    assert "Zen" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        run.main(["transformers", "version", "--help"])
    assert sys.argv == ["transformers", "version", "--help"]


def test_pipeline(model, folder):
    save_tokenizer(folder)
    generate = pipeline("text-generation", model=str(folder))
    text = " ".join(f"w{3 + i % 90}" for i in range(LONG))
    (said,) = generate(text, max_new_tokens=4, do_sample=False, return_full_text=False)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(text, return_tensors="pt").input_ids
    expected = model.generate(ids, max_new_tokens=4, do_sample=False, eos_token_id=2, pad_token_id=2)
    assert said["generated_text"].split() == tokenizer.decode(expected[0, ids.shape[1] :]).split()
    assert "rerope" in str(ise.describe(generate.model))


def test_folders_of_before_still_load(model, folder):
    ids = tokens(1, LONG)
    as_saved_before(folder)
    assert AutoConfig.from_pretrained(folder).model_type == "llama"
    assert torch.equal(ise.load(folder)(ids).logits, model(ids).logits)
    with pytest.raises(RuntimeError, match="isentrope"):
        AutoModelForCausalLM.from_pretrained(folder)(ids)


def test_marks_come_off_as_they_went_on():
    config = {
        "model_type": "gemma3",
        "architectures": ["Gemma3ForCausalLM"],
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0},
            "sliding": {"rope_type": "default"},
        },
        "text_config": {"model_type": "gemma3_text", "rope_parameters": {"rope_type": "yarn"}, "layers": [1, 2]},
        "isentrope": {"recipe": {}, "backend": "auto"},
    }
    marked = add_marks(config)
    assert marked["model_type"] == MODEL_TYPE and marked["architectures"] == ["IsentropeGemma3ForCausalLM"]
    assert json.dumps(marked).count('"rope_type": "isentrope"') == 3
    plain = remove_marks(marked)
    assert plain["isentrope"].pop("base_model_type") == "gemma3"
    assert plain == config


@pytest.mark.parametrize("note", [None, {}, {"recipe": {}}, {"base_model_type": "no-such"}, {"base_model_type": 3}])
def test_a_broken_note_is_refused(note, folder):
    config = json.loads((folder / "config.json").read_text()) | {"isentrope": note}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"recipe|no-such"):
        AutoModelForCausalLM.from_pretrained(folder)


def test_part_of_a_model_is_not_extended():
    """What holds it would be saved without the recipe."""
    whole = llama()
    with pytest.raises(ValueError, match="LlamaForCausalLM"):
        ise.extend(whole.model, RECIPE)
    assert torch.equal(whole(tokens(1, LONG)).logits, llama()(tokens(1, LONG)).logits)
    part = whole.model
    del whole
    ise.extend(part, RECIPE)


def test_card(folder, model):
    card = (folder / CARD).read_text()
    assert "rerope:window=32" in card and "infoscale:train_length=64" in card and "Nothing was measured" in card
    measured = {"perplexity, extended": 3.2, "perplexity, plain": 50.1, "texts": 4, "tokens": "64–128"}  # as saved
    model.config.isentrope["measured"] = [measured]
    model.save_pretrained(folder)
    card = (folder / CARD).read_text()
    assert "| 64–128 | 50.1 | 3.2 | 4 |" in card and "trained on since is not in these numbers" in card
    (folder / CARD).write_text("my own")
    model.save_pretrained(folder)
    assert (folder / CARD).read_text() == "my own"
    ise.restore(model)
    (folder / CARD).unlink()
    model.save_pretrained(folder)
    assert not (folder / CARD).exists()


@pytest.mark.parametrize(
    ("recipe", "rope"),
    [
        ("pi:factor=4", {"rope_type": "linear", "factor": 4.0}),
        ("yarn:factor=4+yarntemperature:factor=4", {"rope_type": "yarn", "factor": 4.0}),  # no attention_factor
        ("ntk:factor=2", {"rope_type": "default", "rope_theta": pytest.approx(10000 * 2 ** (8 / 6))}),
        ("ntk:factor=2,dynamic=true", {"rope_type": "dynamic", "factor": 2.0}),
        ("rope:base=50000", {"rope_theta": 50000.0}),
        ("longrope:factors=(1,2,3,4)", {"rope_type": "longrope", "short_factor": [1, 2, 3, 4], "attention_factor": 1}),
        ("longrope:factors=(1,2,3,4),original_length=30", {"long_factor": [1, 2, 3, 4], "short_factor": [1, 1, 1, 1]}),
        ("plain", {"rope_theta": 10000.0}),
    ],
)
def test_native_export(recipe, rope, tmp_path):
    """Any engine reads it: nothing of isentrope is left, and logits are the same."""
    ids = tokens(1, LONG)
    model = ise.extend(llama(), recipe)
    assert ise.export(model, tmp_path / "native") == tmp_path / "native"
    config = json.loads((tmp_path / "native" / "config.json").read_text())
    assert "isentrope" not in json.dumps(config) and config["model_type"] == "llama"
    assert config["rope_parameters"] == config["rope_parameters"] | rope
    assert ("attention_factor" in config["rope_parameters"]) == ("longrope" in recipe)
    native = AutoModelForCausalLM.from_pretrained(tmp_path / "native")
    torch.testing.assert_close(native(ids).logits, model(ids).logits, atol=2e-5, rtol=1e-5)
    if "temperature" not in recipe and "dynamic" not in recipe and "original" not in recipe:
        assert torch.equal(native(ids).logits, model(ids).logits)
    assert str(ise.describe(model)).splitlines()[0].startswith("llama under")  # itself as before


@pytest.mark.parametrize(
    ("recipe", "theta"),
    [("rope", 500), ("ntk:factor=2", 500 * 2 ** (8 / 6)), ("yarn:factor=4,base=10000", 10000), ("pi:factor=4", 500)],
)
@pytest.mark.filterwarnings("ignore:export. yarn is written with attention_factor:UserWarning")
def test_native_export_of_a_model_with_another_base(recipe, theta, tmp_path):
    model, ids = llama(rope_parameters={"rope_type": "default", "rope_theta": 500.0}), tokens(1, LONG)
    ise.export(ise.extend(model, recipe), tmp_path / "native")
    native = AutoModelForCausalLM.from_pretrained(tmp_path / "native")
    assert native.config.rope_parameters["rope_theta"] == pytest.approx(theta)
    torch.testing.assert_close(native(ids).logits, model(ids).logits, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize(("law", "factor"), [("", 1.0), ("+yarntemperature:factor=2", 1.069315)])
def test_native_export_of_yarn_with_another_attention_factor(law, factor, tmp_path):
    """Engines apply 0.1 ln s + 1 by themselves; some ignore attention_factor, some multiply by it."""
    model, ids = ise.extend(llama(), f"yarn:factor=4{law}"), tokens(1, LONG)
    with pytest.warns(UserWarning, match=r"extend with yarn:factor=4\+yarntemperature:factor=4"):
        ise.export(model, tmp_path / "native")
    native = AutoModelForCausalLM.from_pretrained(tmp_path / "native")
    assert native.config.rope_parameters["attention_factor"] == pytest.approx(factor)
    torch.testing.assert_close(native(ids).logits, model(ids).logits, atol=2e-5, rtol=1e-5)


def test_native_export_of_a_window(tmp_path):
    config = MistralConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=TRAINED, sliding_window=None, initializer_range=0.3,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    ids = tokens(1, LONG)
    model = ise.extend(MistralForCausalLM(config).eval(), "pi:factor=2+window:size=24")
    ise.export(model, tmp_path / "native")
    native = AutoModelForCausalLM.from_pretrained(tmp_path / "native")
    assert native.config.sliding_window == 24
    torch.testing.assert_close(native(ids).logits, model(ids).logits, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "recipe",
    [
        "rerope:window=8+share",
        "dpe:window=8,scales=(1,2)",
        "cope",
        "resonance:factor=4",
        "rerope:window=8+logn:keys=near+logn:keys=far",
        RECIPE,
        "infoscale",
        "yarn:factor=4+infoscale",
        "window:size=24",
        "sink:sinks=4,size=24",
        "logn",
    ],
)
def test_what_transformers_has_not_is_not_exported(recipe, tmp_path):
    with pytest.raises(ValueError, match="no form of its own") as caught:
        ise.export(ise.extend(llama(), recipe), tmp_path / "native")
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_export_refuses_plain_models_and_folders_that_exist(model, tmp_path):
    with pytest.raises(ValueError, match="not extended"):
        ise.export(llama(), tmp_path / "native")
    with pytest.raises(ValueError, match="does not exist yet"):
        ise.export(model, tmp_path)


def test_remote_code_for_those_who_allow_it(model, tmp_path):
    """Off by default; with it, programs need isentrope installed, not imported."""
    ise.export(model, tmp_path / "longer", remote_code=True)
    again = ise.load(tmp_path / "longer")
    ids = tokens(1, LONG)
    assert torch.equal(again(ids).logits, model(ids).logits)
    ise.restore(again).save_pretrained(tmp_path / "plain")
    assert "isentrope" not in (tmp_path / "plain" / "config.json").read_text()
