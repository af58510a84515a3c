"""Broken, renamed, pickled and half-precision weights, as every command that loads a model meets them."""

from __future__ import annotations

import json
import logging
import pickle
import shutil
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    AutoModelForMaskedLM,
    BertConfig,
    BertForMaskedLM,
    BloomConfig,
    BloomForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    LlamaForCausalLM,
)
from typer.testing import CliRunner

import isentrope.models as models
from isentrope.analysis.inspect import load_model as load_to_inspect
from isentrope.cli import app
from isentrope.core import dtypes
from isentrope.data.features import mean_hidden_states
from isentrope.evaluation.loading import load_causal_model
from isentrope.experiments.checkpoints import SHIPPED_MODELS
from isentrope.models.tokenizer import build_character_tokenizer, make_causal_tokenizer
from isentrope.pretrained import check_finite, check_weights, load_pretrained, saved_dtype
from tests.fixtures.commands import assert_one_line
from tests.fixtures.models import llama

ALPHABET = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 .,;:?!'\"()-\n"
WEIGHT = "model.layers.0.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def tokenizer():
    return make_causal_tokenizer(build_character_tokenizer([ALPHABET * 3], 97))


@pytest.fixture(scope="module")
def good(tmp_path_factory, tokenizer):
    folder = tmp_path_factory.mktemp("models") / "good"
    return saved(llama(), folder, tokenizer)


def saved(model, folder, tokenizer):
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def copy(good, tmp_path):
    return Path(shutil.copytree(good, tmp_path / "model"))


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    for name, step in (("one", 7), ("two", 11)):
        (folder / f"{name}.txt").write_text("".join(ALPHABET[i * step % 61] for i in range(300)))
    return folder


def tell(*words):
    return CliRunner().invoke(app, [str(word) for word in words])


def commands(model, text, out):
    """Every command that loads a causal model."""
    common, data = ("--out", out, "--device", "cpu"), ("--data", text / "one.txt")
    return {
        "perplexity": ("perplexity", model, *data, "--recipe", "plain", "--edges", "0,32,100", *common),
        "inspect": ("inspect", model, *data, "--lengths", "16,32", *common),
        "evaluate": ("evaluate", model, *data, "--length", "2x", *common),
        "retrieval": ("retrieval", model, "--recipe", "plain", "--tasks", "passkey", "--lengths", "600", *common),
        "calibrate": ("calibrate", model, "--data", text, "--length", "100", *common),
    }


COMMANDS = tuple(commands("", Path(), ""))


def truncate(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    return path, "broken safetensors file", "fetch or save it again"


def flip_header(folder):
    path = folder / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[9] ^= 0x40
    path.write_bytes(bytes(content))
    return path, "broken safetensors file", "fetch or save it again"


def empty(folder):
    path = folder / "model.safetensors"
    path.write_bytes(b"")
    return path, "broken safetensors file", "fetch or save it again"


def rename(folder):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.0.mlp.up.weight"] = tensors.pop(WEIGHT)
    save_file(tensors, path, {"format": "pt"})
    return path, f"lacks {WEIGHT} of the llama model", "but has model.layers.0.mlp.up.weight", "fetch or save it again"


def reshape(folder):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors[WEIGHT] = tensors[WEIGHT].T.contiguous()
    save_file(tensors, path, {"format": "pt"})
    return path, f"{WEIGHT} has shape (32, 48), expected (48, 32)", "fetch or save it again"


def no_number(folder):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors[WEIGHT][3, 4] = torch.nan
    save_file(tensors, path, {"format": "pt"})
    return path, f"1 of the 1536 numbers in {WEIGHT} are NaN or infinite"


def remove(folder):
    (folder / "model.safetensors").unlink()
    return folder, "expected weights in model.safetensors, got none"


@pytest.mark.parametrize("harm", [truncate, flip_header, empty, rename, reshape, no_number, remove])
def test_bad_weights_are_refused_by_name(copy, text, tmp_path, harm):
    words = harm(copy)
    assert_one_line(tell(*commands(copy, text, tmp_path / "out")["perplexity"]), *words)


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("harm", [truncate, rename])
def test_every_command_refuses_them(copy, text, tmp_path, harm, command):
    words = harm(copy)
    assert_one_line(tell(*commands(copy, text, tmp_path / "out")[command]), *words)


def test_one_of_several_files(copy, text, tmp_path):
    model = LlamaForCausalLM.from_pretrained(copy)
    (copy / "model.safetensors").unlink()
    model.save_pretrained(copy, max_shard_size="20KB")
    shards = sorted(copy.glob("model-*.safetensors"))
    assert len(shards) > 1
    assert load_pretrained(LlamaForCausalLM, copy).config.vocab_size == 97
    content = shards[1].read_bytes()
    shards[1].write_bytes(content[:-1])
    assert_one_line(tell(*commands(copy, text, tmp_path / "out")["perplexity"]), shards[1], "broken safetensors file")
    shards[1].unlink()
    assert_one_line(tell(*commands(copy, text, tmp_path / "out")["perplexity"]), f"expected {shards[1].name} beside it")
    index = copy / "model.safetensors.index.json"
    index.write_text("{")
    assert_one_line(tell(*commands(copy, text, tmp_path / "out")["perplexity"]), index, "expected JSON")


class Bomb:
    """Unpickled, it writes a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.write_text, (self.path, "run")


@pytest.mark.parametrize("command", COMMANDS)
def test_pickles_are_not_opened(copy, text, tmp_path, command):
    (copy / "model.safetensors").unlink()
    (copy / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb(tmp_path / "run")))
    assert_one_line(
        tell(*commands(copy, text, tmp_path / "out")[command]), copy, "pytorch_model.bin, a pickle", "safetensors"
    )
    assert not (tmp_path / "run").exists()


def test_a_pickle_by_way_of_an_index(copy):
    model = LlamaForCausalLM.from_pretrained(copy)
    (copy / "model.safetensors").rename(copy / "weights.bin")
    index = {"weight_map": dict.fromkeys(model.state_dict(), "weights.bin")}
    (copy / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"weights\.bin, a pickle"):
        check_weights(copy)


def test_a_pickled_adapter_is_not_opened(copy, text, tmp_path):
    config = {"peft_type": "LORA", "base_model_name_or_path": str(copy), "target_modules": ["q_proj"], "r": 2}
    (copy / "adapter_config.json").write_text(json.dumps(config))
    (copy / "adapter_model.bin").write_bytes(pickle.dumps(Bomb(tmp_path / "run")))
    assert_one_line(tell(*commands(copy, text, tmp_path / "out")["perplexity"]), copy, "adapter_model.bin, a pickle")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_numbers_that_are_none(dtype, value):
    layer = nn.Linear(3, 5).to(dtype)
    with torch.no_grad():
        layer.weight[1:3] = torch.finfo(dtype).max  # whose sum is infinite, and yet all are numbers
        layer.weight[3:] = torch.finfo(dtype).min
        check_finite(layer, "here")
        layer.bias[2] = value
    with pytest.raises(ValueError, match="here: 1 of the 5 numbers in bias are NaN or infinite"):
        check_finite(layer, "here")


def test_a_gguf_file_that_is_cut_short(tmp_path):
    pytest.importorskip("gguf")
    path = tmp_path / "model.gguf"
    path.write_bytes(struct.pack("<4sIQQ", b"GGUF", 3, 10, 5))  # five fields that do not follow
    result = tell("evaluate", tmp_path, "--data", tmp_path, "--gguf-file", path.name)
    assert_one_line(result, f"{path}: broken GGUF file", "fetch or save it again")
    with pytest.raises(ValueError, match="broken GGUF file"):
        load_causal_model(str(tmp_path), torch.float32, path.name)


def test_tied_weights_need_not_be_saved_twice(tmp_path):
    llama(tie_word_embeddings=True).save_pretrained(tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    load_pretrained(LlamaForCausalLM, tmp_path)


def test_a_pooler_that_is_not_used_may_be_missing(tmp_path, tokenizer):
    sizes = {"vocab_size": 97, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    BertForMaskedLM(BertConfig(num_attention_heads=2, **sizes)).bfloat16().save_pretrained(tmp_path)
    states = next(mean_hidden_states(str(tmp_path), [torch.arange(20).numpy()], tokenizer, "cpu"))
    assert states.shape == (16,)


def test_a_folder_without_a_tokenizer(copy, text, tmp_path):
    for path in copy.glob("*token*"):
        path.unlink()
    assert_one_line(tell(*commands(copy, text, tmp_path / "out")["perplexity"]), "a folder without one", "input_ids")


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", [b"", b'{"a', b"[]", b"\xff\xfe", b"[" * 100_000])
def test_other_files_of_a_model_are_named(copy, text, tmp_path, file, content):
    (copy / file).write_bytes(content)
    assert_one_line(tell(*commands(copy, text, tmp_path / "out")["perplexity"]), copy / file, "fetch or save it again")


def test_a_model_that_is_not_on_the_hub_is_named(text, tmp_path, monkeypatch):
    def refuse(*args, **options):
        raise OSError("We couldn't connect.\nCheck your connection.")

    monkeypatch.setattr("transformers.PreTrainedConfig.get_config_dict", refuse)
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", refuse)
    for command in ("perplexity", "evaluate"):
        words = "no/such: no folder here has this name, and from the hub: We couldn't connect. Check the name, or fetch"
        assert_one_line(tell(*commands("no/such", text, tmp_path)[command]), words)


# --- half precision ---------------------------------------------------------------------------------------------------


@pytest.fixture
def heard(caplog):
    dtypes._warn_widened.cache_clear()
    caplog.set_level(logging.WARNING, "isentrope")
    return caplog


def measured_in(out):
    return json.loads((out / "perplexity.json").read_text())["model"]["dtype"]


def test_half_precision_becomes_float32_on_a_cpu_and_that_is_said(text, tmp_path, tokenizer, heard):
    folder = saved(llama().bfloat16(), tmp_path / "half", tokenizer)
    assert tell(*commands(folder, text, tmp_path / "out")["perplexity"]).exit_code == 0
    assert heard.messages == ["weights are bfloat16; using float32 on this CPU (dtype bfloat16 keeps them)"]
    assert measured_in(tmp_path / "out") == "float32"


def test_a_dtype_that_is_asked_for_holds(text, tmp_path, tokenizer, heard):
    folder = saved(llama().bfloat16(), tmp_path / "half", tokenizer)
    assert load_to_inspect(str(folder), device="cpu", dtype="bfloat16").dtype == torch.bfloat16
    assert heard.messages == []


def test_shipped_models_load_in_float32_on_a_cpu(monkeypatch, heard):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    assert saved_dtype(SHIPPED_MODELS / "dot") == torch.bfloat16
    assert models.GAUAlphaForMaskedLM.from_pretrained(SHIPPED_MODELS / "dot").dtype == torch.float32
    assert AutoModelForMaskedLM.from_pretrained(SHIPPED_MODELS / "dot").dtype == torch.float32
    assert len(heard.messages) == 1
    assert AutoModelForMaskedLM.from_pretrained(SHIPPED_MODELS / "dot", dtype=torch.bfloat16).dtype == torch.bfloat16
    assert AutoModelForMaskedLM.from_pretrained(SHIPPED_MODELS / "dot", dtype="auto").dtype == torch.bfloat16


# --- models that no recipe can change ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llama4(tmp_path_factory, tokenizer):
    sizes = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "intermediate_size_mlp": 48}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    config = Llama4TextConfig(
        **sizes, num_local_experts=2, max_position_embeddings=64, attention_chunk_size=32,
        pad_token_id=0, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return saved(Llama4ForCausalLM(config), tmp_path_factory.mktemp("llama4") / "llama4", tokenizer)


@pytest.fixture(scope="module")
def bloom(tmp_path_factory, tokenizer):
    config = BloomConfig(vocab_size=97, hidden_size=32, n_layer=2, n_head=4, seq_length=64, pad_token_id=0)
    return saved(BloomForCausalLM(config), tmp_path_factory.mktemp("bloom") / "bloom", tokenizer)


@pytest.mark.parametrize("command", ["inspect", "evaluate"])
def test_llama_4_is_refused_for_its_mask(llama4, text, tmp_path, command):
    words = "llama4_text: model.layers.0.self_attn has a mask that is not a window over distances"
    assert_one_line(tell(*commands(llama4, text, tmp_path)[command]), words)


@pytest.mark.parametrize("command", ["inspect", "evaluate"])
def test_bloom_is_refused_for_its_attention(bloom, text, tmp_path, command):
    words = "bloom: its attention does not go through transformers' AttentionInterface"
    assert_one_line(tell(*commands(bloom, text, tmp_path)[command]), words)


def test_both_have_a_perplexity_as_they_are(llama4, bloom, text, tmp_path):
    for model in (llama4, bloom):
        result = tell(*commands(model, text, tmp_path / model.name)["perplexity"])
        assert result.exit_code == 0, (result.output, result.exception)
