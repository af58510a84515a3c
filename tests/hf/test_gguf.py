"""Small models of GGUF files: what transformers unpacks into floats is extended and saved as any other model."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import isentrope as ise
from isentrope.evaluation.loading import load_causal_model

gguf = pytest.importorskip("gguf")
WIDTH, VOCABULARY = 64, 96
RECIPE = "rerope:window=8+share"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with model.gguf: a Llama of one layer in blocks of 8 bits, trained at 16."""
    folder = tmp_path_factory.mktemp("gguf")
    writer = gguf.GGUFWriter(folder / "model.gguf", "llama")
    writer.add_context_length(16)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(WIDTH)
    writer.add_block_count(1)
    writer.add_head_count(4)
    writer.add_head_count_kv(4)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(VOCABULARY)
    random = np.random.default_rng(0)
    for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
        _add_blocks(writer, f"blk.0.{name}.weight", random.normal(0, 0.2, (WIDTH, WIDTH)))
    for name in ("blk.0.attn_norm", "blk.0.ffn_norm", "output_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(WIDTH, np.float32))
    for name in ("token_embd", "output"):
        _add_blocks(writer, f"{name}.weight", random.normal(0, 1, (VOCABULARY, WIDTH)))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return folder


def _add_blocks(writer, name, values):
    kind = gguf.GGMLQuantizationType.Q8_0
    writer.add_tensor(name, gguf.quantize(values.astype(np.float32), kind), raw_dtype=kind)


def _load_with_transformers(folder):
    return AutoModelForCausalLM.from_pretrained(folder, gguf_file="model.gguf", dtype=torch.float32)


def _load_for_evaluation(folder):
    return load_causal_model(str(folder), torch.float32, "model.gguf")


@pytest.mark.parametrize("load", [_load_with_transformers, _load_for_evaluation])
def test_an_extended_model_is_saved(folder, tmp_path, load):
    model = load(folder).eval()
    attributes, ids = dict(vars(model)), torch.arange(48)[None]
    with torch.no_grad():
        plain = model(ids).logits
        ise.extend(model, RECIPE)
        logits = model(ids).logits
        model.save_pretrained(tmp_path)
        assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())
        assert torch.equal(ise.load(tmp_path).eval()(ids).logits, logits) and not torch.equal(logits, plain)
        ise.restore(model)
        assert torch.equal(model(ids).logits, plain)
    assert vars(model) == attributes  # the quantizer is back


def test_packed_weights_keep_their_quantizer(folder):
    model = _load_with_transformers(folder)
    quantizer = getattr(model, "hf_quantizer", None)  # older versions of transformers have none for GGUF
    model.lm_head.register_parameter("blocks", torch.nn.Parameter(torch.zeros(2, dtype=torch.uint8), False))
    with ise.extended(model, RECIPE):
        assert getattr(model, "hf_quantizer", None) is quantizer


def test_a_native_export(folder, tmp_path):
    model = ise.extend(_load_with_transformers(folder), "pi:factor=4")
    exported = AutoModelForCausalLM.from_pretrained(ise.export(model, tmp_path / "native"), dtype=torch.float32)
    ids = torch.arange(48)[None]
    with torch.no_grad():
        assert torch.allclose(exported(ids).logits, model(ids).logits, atol=1e-5)
