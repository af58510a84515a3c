"""Training an extended model: Trainer, LoRA, dropout."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import Trainer

import isentrope as ise
from tests.fixtures.finetuning import (
    LONG,
    arguments,
    assert_same_gradients,
    examples,
    gradients,
    memorise,
    part,
    stacked,
)
from tests.fixtures.models import TRAINED, extend, llama, tokens
from tests.fixtures.turns import in_turns


@pytest.mark.parametrize("recipe", ["rerope:window=16+infoscale:train_length=32", "yarn:factor=4", "clex", "ssmax"])
def test_trainer_trains_saves_and_resumes(recipe, tmp_path):
    def trainer(model, folder, **options):
        options = {"max_steps": 12, **options}
        return Trainer(model, arguments(folder, **options), data_collator=stacked, train_dataset=examples())

    whole = extend(llama(initializer_range=0.05), recipe)
    first = trainer(whole, tmp_path / "whole", save_strategy="steps", save_steps=6)
    first.train()
    losses = [entry["loss"] for entry in first.state.log_history if "loss" in entry]
    assert losses[-1] < 0.8 * losses[0]

    resumed = extend(llama(seed=1, initializer_range=0.05), recipe)
    trainer(resumed, tmp_path / "resumed").train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-6"))
    expected = whole.state_dict()
    for name, x in resumed.state_dict().items():
        torch.testing.assert_close(x, expected[name], atol=1e-5, rtol=1e-5, msg=name)

    loaded = ise.load(tmp_path / "whole" / "checkpoint-12")
    ids = tokens(1, LONG)
    assert torch.equal(loaded(ids).logits, whole.eval()(ids).logits)


def test_trainer_with_gradient_checkpointing(tmp_path):
    final = []
    for checkpointing in (False, True):
        model = ise.extend(llama(initializer_range=0.05), "rerope:window=16+infoscale:train_length=32")
        options = arguments(tmp_path, max_steps=3, gradient_checkpointing=checkpointing)
        Trainer(model, options, data_collator=stacked, train_dataset=examples()).train()
        final.append(model.state_dict())
    for name, x in final[0].items():
        torch.testing.assert_close(final[1][name], x, atol=1e-5, rtol=1e-5, msg=name)


# LoRA


def adapted(recipe, extended_first, **overrides):
    """A model with LoRA and a recipe, put on in either order."""
    # the seed decides the adapter's weights: the same in either order
    lora = LoraConfig(r=4, target_modules=["q_proj", "k_proj", "v_proj", "up_proj"], task_type="CAUSAL_LM")
    model = llama(initializer_range=0.1, **overrides)
    if extended_first:
        ise.extend(model, recipe)
    torch.manual_seed(5)
    model = get_peft_model(model, lora)
    return model if extended_first or recipe == "plain" else ise.extend(model, recipe)


ORDERS = pytest.mark.parametrize("extended_first", [True, False])


@pytest.mark.parametrize(
    ("recipe", "extended_first"), in_turns(["rerope:window=16+infoscale:train_length=32", "pi:factor=2"], [True, False])
)
def test_lora_trains_adapters_alone_and_merges(recipe, extended_first, tmp_path):
    model = adapted(recipe, extended_first).train()
    before = {name: x.detach().clone() for name, x in model.named_parameters()}
    losses = memorise(model, tokens(2, 40), 12)
    assert losses[-1] < losses[0] - 0.1
    for name, x in model.named_parameters():
        assert torch.equal(x, before[name]) != ("lora_" in name), name

    ids = tokens(2, LONG, seed=1)
    expected = model.eval()(input_ids=ids).logits
    model.save_pretrained(tmp_path / "adapter")
    assert {path.suffix for path in (tmp_path / "adapter").iterdir()} <= {".json", ".safetensors", ".md"}
    base = ise.extend(llama(initializer_range=0.1), recipe)
    with pytest.warns(UserWarning, match="isentrope"):  # PEFT says which key it does not know
        again = PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    torch.testing.assert_close(again(input_ids=ids).logits, expected, atol=1e-6, rtol=1e-6)

    merged = model.merge_and_unload()
    assert not any("lora" in name for name, _ in merged.named_parameters())
    torch.testing.assert_close(merged(input_ids=ids).logits, expected, atol=1e-4, rtol=1e-4)
    assert str(ise.describe(merged).recipe) == str(ise.describe(base).recipe)

    merged.save_pretrained(tmp_path / "merged")
    assert torch.equal(ise.load(tmp_path / "merged")(ids).logits, merged(ids).logits)

    weights = merged.state_dict()
    plain = llama(initializer_range=0.1)
    plain.load_state_dict(weights)
    assert torch.equal(ise.restore(merged)(ids).logits, plain(ids).logits)


@ORDERS
def test_a_wrapped_model_is_described_and_restored(extended_first):
    model, plain = adapted("rerope:window=16", extended_first).eval(), adapted("plain", False).eval()
    ids = tokens(2, LONG)
    with pytest.raises(ValueError, match="already extended"):
        ise.extend(model, "rerope:window=16")
    assert ise.describe(model).recipe == "rerope:window=16"
    assert ise.restore(model) is model
    assert torch.equal(model(input_ids=ids).logits, plain(input_ids=ids).logits)
    with pytest.raises(ValueError, match="not extended"):
        ise.restore(model)


def test_learned_parameters_survive_merging(tmp_path):
    """They belong to the model inside the wrapper, which is what is left when adapters are merged."""
    model = adapted("clex", extended_first=False)
    with torch.no_grad():
        part(model, ise.CLEX).down.weight.normal_(std=0.1, generator=torch.Generator().manual_seed(1))
    merged = model.merge_and_unload()
    assert any(isinstance(module, ise.CLEX) for module in merged.modules())
    merged.save_pretrained(tmp_path)
    ids = tokens(1, LONG)
    assert torch.equal(ise.load(tmp_path)(ids).logits, merged.eval()(ids).logits)


def test_trainer_trains_lora_with_pose(tmp_path):
    model = adapted("rerope:window=16", extended_first=True)
    collator = ise.PoSECollator(stacked, target_length=4 * TRAINED)
    run = Trainer(model, arguments(tmp_path, max_steps=10), data_collator=collator, train_dataset=examples())
    run.train()
    losses = [entry["loss"] for entry in run.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0]


# Dropout


def test_attention_dropout_where_nothing_changes():
    ids = tokens(2, 32)
    losses, actual = [], []
    for recipe in (None, "rerope:window=32+infoscale"):
        model = llama(attention_dropout=0.4).train()
        if recipe:
            ise.extend(model, recipe)
        torch.manual_seed(7)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        losses.append(loss)
        actual.append(gradients(model))
    assert torch.equal(*losses)
    assert_same_gradients(actual[1], actual[0], 1e-6)
    undisturbed = model.eval()(input_ids=ids, labels=ids).loss
    assert not torch.equal(undisturbed, losses[0])  # there was dropout


def test_attention_dropout_with_rotated_keys():
    """Other frequencies leave attention itself to transformers, and dropout with it."""
    ids = tokens(2, LONG)
    linear = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
    losses = []
    for model in (
        ise.extend(llama(attention_dropout=0.4), "pi:factor=2"),
        llama(attention_dropout=0.4, rope_parameters=linear),
    ):
        torch.manual_seed(7)
        losses.append(model.train()(input_ids=ids, labels=ids).loss)
    torch.testing.assert_close(*losses)


@pytest.mark.parametrize(
    "recipe", ["rerope:window=32", "infoscale:train_length=32", "window:size=24", "cosine:alpha=16"]
)
def test_attention_dropout_where_a_recipe_changes_attention(recipe):
    ids = tokens(2, 33)
    model = extend(llama(attention_dropout=0.4), recipe).train()
    with pytest.raises(ValueError, match="dropout"):
        model(input_ids=ids, labels=ids)
    assert model.eval()(input_ids=ids, labels=ids).loss.isfinite()
