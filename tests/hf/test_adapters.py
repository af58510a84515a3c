"""Adapters of PEFT keep the recipe of their base model, whichever way they are saved and loaded."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from peft import (
    AutoPeftModelForCausalLM,
    LoraConfig,
    PeftMixedModel,
    PeftModel,
    PromptTuningConfig,
    get_peft_model,
)
from transformers import AutoModelForCausalLM

import isentrope as ise
from isentrope.peft_methods import unwrap_methods, wrap_methods, wrap_methods_after_import
from tests.fixtures.models import llama, tokens

LONG = 80  # past the length of the tiny model
RECIPE = "rerope:window=32+infoscale"
OTHER = "pi:factor=2"
# PEFT does not know the key; that the recipe is applied all the same is what these tests are about
pytestmark = pytest.mark.filterwarnings("ignore:Unexpected keyword arguments .'isentrope'.:UserWarning")


def load_into(adapter, base):
    base.load_adapter(str(adapter))
    return base


# from the adapter alone
BY_NAME = {
    "ise.load": ise.load,
    "AutoPeftModel": AutoPeftModelForCausalLM.from_pretrained,
    "Auto": AutoModelForCausalLM.from_pretrained,
}
# onto a model
ONTO = {
    "PeftModel": lambda adapter, base: PeftModel.from_pretrained(base, adapter),
    "PeftMixedModel": lambda adapter, base: PeftMixedModel.from_pretrained(base, adapter),
    "load_adapter": load_into,
}


@pytest.fixture
def base(tmp_path):
    llama().save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def load_base(folder, recipe=None):
    model = AutoModelForCausalLM.from_pretrained(folder)
    return model if recipe is None else ise.extend(model, recipe)


def adapt(model, **options):
    lora = LoraConfig(r=2, task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    return get_peft_model(model, lora, **options).eval()


def save_adapter(model, folder):
    """Save an adapter, and return what its model computes."""
    model.save_pretrained(folder)
    return compute(model)


def compute(model):
    return model.eval()(input_ids=tokens(1, LONG)).logits


@pytest.mark.parametrize("way", [*BY_NAME, *ONTO])
def test_every_loader_gives_the_extended_model(way, base, tmp_path):
    expected = save_adapter(adapt(load_base(base, RECIPE)), tmp_path / "adapter")
    arguments = () if way in BY_NAME else (load_base(base),)
    loaded = (BY_NAME | ONTO)[way](tmp_path / "adapter", *arguments)
    assert torch.equal(compute(loaded), expected)
    assert str(ise.describe(loaded).recipe) == str(ise.describe(load_base(base, RECIPE)).recipe)
    assert not torch.equal(compute(ise.restore(loaded)), expected)


@pytest.mark.parametrize("way", ONTO)
def test_a_model_under_the_same_recipe_stays_as_it_is(way, base, tmp_path):
    expected = save_adapter(adapt(load_base(base, RECIPE)), tmp_path / "adapter")
    assert torch.equal(compute(ONTO[way](tmp_path / "adapter", load_base(base, RECIPE))), expected)


@pytest.mark.parametrize("way", ONTO)
def test_a_model_under_another_recipe_is_refused(way, base, tmp_path):
    expected = save_adapter(adapt(load_base(base, RECIPE)), tmp_path / "adapter")
    model = load_base(base, OTHER)
    before = compute(model)
    with pytest.raises(ValueError, match=r"under 'rerope.* got one under 'pi:factor=2'; call isentrope\.restore"):
        ONTO[way](tmp_path / "adapter", model)
    assert torch.equal(compute(model), before) and not hasattr(model, "peft_config")
    assert torch.equal(compute(ONTO[way](tmp_path / "adapter", ise.restore(model))), expected)


def test_several_adapters(base, tmp_path):
    expected = save_adapter(adapt(load_base(base, RECIPE)), tmp_path / "adapter")
    model = adapt(load_base(base, RECIPE))
    model.load_adapter(tmp_path / "adapter", "second")
    model.set_adapter("second")
    assert torch.equal(compute(model), expected)
    plain = adapt(load_base(base))
    before = compute(plain)
    with pytest.raises(ValueError, match=r"a plain one with the adapters \['default'\]; call isentrope\.extend first"):
        plain.load_adapter(tmp_path / "adapter", "second")
    assert torch.equal(compute(plain), before)


def test_an_adapter_of_a_plain_model_goes_onto_any(base, tmp_path):
    expected = save_adapter(adapt(load_base(base)), tmp_path / "adapter")
    assert torch.equal(compute(PeftModel.from_pretrained(load_base(base), tmp_path / "adapter")), expected)
    loaded = PeftModel.from_pretrained(load_base(base, OTHER), tmp_path / "adapter")
    assert str(ise.describe(loaded).recipe) == OTHER


def test_an_adapter_with_a_name_lies_in_a_folder_of_that_name(base, tmp_path):
    expected = save_adapter(adapt(load_base(base, RECIPE), adapter_name="mine"), tmp_path)
    loaded = PeftModel.from_pretrained(load_base(base), tmp_path, subfolder="mine")
    assert torch.equal(compute(loaded), expected)


def test_a_missing_adapter_is_reported_by_peft(base, tmp_path):
    with pytest.raises(ValueError, match=r"Can't find 'adapter_config\.json'"):
        PeftModel.from_pretrained(load_base(base), tmp_path / "missing")


@pytest.mark.parametrize("way", ONTO)
def test_a_plain_model_stays_plain_where_loading_fails(way, base, tmp_path):
    adapt(load_base(base, RECIPE)).save_pretrained(tmp_path / "adapter")
    (tmp_path / "adapter" / "adapter_model.safetensors").unlink()
    model = load_base(base)
    with pytest.raises((OSError, ValueError), match="adapter"):
        ONTO[way](tmp_path / "adapter", model)
    assert not ise.describe(model).is_extended and model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("way", BY_NAME)
def test_an_adapter_over_a_saved_model(way, base, tmp_path):
    load_base(base, RECIPE).save_pretrained(tmp_path / "longer")
    expected = save_adapter(adapt(load_base(tmp_path / "longer")), tmp_path / "adapter")
    assert torch.equal(compute(BY_NAME[way](tmp_path / "adapter")), expected)
    load_base(base, OTHER).save_pretrained(tmp_path / "longer")
    with pytest.raises(ValueError, match="got one under 'pi:factor=2'"):
        BY_NAME[way](tmp_path / "adapter")


def save_learned(base, folder):
    model = load_base(base)
    with pytest.warns(UserWarning, match="not trained with"):
        ise.extend(model, "ssmax", allow_untrained=True)
    for name, x in model.named_parameters():
        if "temperature" in name:
            x.data += 0.25
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("way", BY_NAME)
def test_an_adapter_does_not_hold_what_a_recipe_learns(way, base, tmp_path):
    """A base model that was saved with it does."""
    model = save_learned(base, tmp_path / "learned")
    save_adapter(adapt(model), tmp_path / "adapter")
    with pytest.raises(ValueError, match="save the whole model"):
        BY_NAME[way](tmp_path / "adapter")
    expected = save_adapter(adapt(load_base(tmp_path / "learned")), tmp_path / "over")
    assert torch.equal(compute(BY_NAME[way](tmp_path / "over")), expected)


def test_what_a_recipe_learns_in_modules_to_save(base, tmp_path):
    model = save_learned(base, tmp_path / "learned")
    lora = LoraConfig(r=2, task_type="CAUSAL_LM", target_modules=["q_proj"], modules_to_save=["temperature"])
    expected = save_adapter(get_peft_model(model, lora), tmp_path / "adapter")
    model = load_base(base)
    with pytest.warns(UserWarning, match="not trained with"):
        ise.extend(model, "ssmax", allow_untrained=True)
    assert torch.equal(compute(PeftModel.from_pretrained(model, tmp_path / "adapter")), expected)


def test_prompt_tuning_keeps_the_recipe(base, tmp_path):
    prompt = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    model = get_peft_model(load_base(base, RECIPE), prompt)
    expected = save_adapter(model, tmp_path / "adapter")
    assert torch.equal(compute(ise.load(tmp_path / "adapter")), expected)
    assert torch.equal(compute(AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter")), expected)


def test_adapters_that_transformers_saves(base, tmp_path):
    model = load_base(base, RECIPE)
    model.add_adapter(LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    expected = save_adapter(model, tmp_path / "adapter")
    assert torch.equal(compute(AutoModelForCausalLM.from_pretrained(tmp_path / "adapter")), expected)


@pytest.mark.parametrize("prompt", [False, True])
def test_restored_models_save_plain_adapters(prompt, base, tmp_path):
    model = load_base(base, RECIPE)
    config = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    model = get_peft_model(model, config) if prompt else adapt(model)
    model.save_pretrained(tmp_path / "first")
    assert "isentrope" in (tmp_path / "first" / "adapter_config.json").read_text()
    ise.restore(model).save_pretrained(tmp_path / "plain")
    assert "isentrope" not in (tmp_path / "plain" / "adapter_config.json").read_text()


@pytest.mark.parametrize("saved", [False, True])
def test_half_precision_is_loaded_in_single_on_a_cpu(saved, base, tmp_path):
    load_base(base).bfloat16().save_pretrained(base)
    if saved:
        load_base(base, RECIPE).save_pretrained(tmp_path / "longer")
    adapt(load_base(tmp_path / "longer") if saved else load_base(base, RECIPE)).save_pretrained(tmp_path / "adapter")
    assert ise.load(tmp_path / "adapter", device_map="cpu").dtype == torch.float32
    assert ise.load(tmp_path / "adapter", dtype="auto").dtype == torch.bfloat16
    assert ise.load(tmp_path / "adapter", dtype=torch.float16).dtype == torch.float16


def test_methods_are_wrapped_once_and_can_be_unwrapped(base, tmp_path):
    expected = save_adapter(adapt(load_base(base, RECIPE)), tmp_path / "adapter")
    wrapped = PeftModel.load_adapter
    wrap_methods("peft.peft_model")
    assert PeftModel.load_adapter is wrapped and not hasattr(wrapped.__wrapped__, "__wrapped__")
    unwrap_methods()
    try:
        assert PeftModel.load_adapter is wrapped.__wrapped__
        with pytest.warns(UserWarning, match="isentrope"):  # the only sign where isentrope is not imported
            loaded = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter")
        assert not torch.equal(compute(loaded), expected)
    finally:
        wrap_methods_after_import()
    assert torch.equal(compute(AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter")), expected)


def test_isentrope_imported_before_transformers_and_peft():
    """Importing it loads neither, and whoever loads them later finds the model type, and PEFT's methods wrapped."""
    code = (
        "import sys, isentrope\n"
        "assert 'transformers' not in sys.modules\n"
        "from transformers import CONFIG_MAPPING\n"
        "import transformers.models.auto.configuration_auto as module\n"
        "assert type(module.__loader__).__name__ == 'SourceFileLoader'\n"
        "assert CONFIG_MAPPING['isentrope'].__module__ == 'isentrope.saved_config'\n"
        "assert 'isentrope.hf' not in sys.modules\n"
        "import transformers.integrations.peft as module\n"
        "assert type(module.__loader__).__name__ == 'SourceFileLoader'\n"
        "assert 'peft' not in sys.modules and 'isentrope.hf' not in sys.modules\n"
        "from peft import PeftModel\n"
        "assert 'isentrope.hf' not in sys.modules\n"
        "for method in (PeftModel.from_pretrained, PeftModel.load_adapter, module.PeftAdapterMixin.load_adapter):\n"
        "    assert method.__wrapped__\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
