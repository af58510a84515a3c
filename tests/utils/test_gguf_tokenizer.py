"""Tokenizers of GGUF files: the first token the file asks for is there, words are words."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from isentrope.gguf_tokenizer import match_gguf
from isentrope.pretrained import read_tokenizer

gguf = pytest.importorskip("gguf")
SPECIAL = ["<unk>", "<s>", "</s>"]
WORDS = ["long", "text", "read", "far"]


def write_gguf(path, **fields):
    """Write a file with a sentencepiece tokenizer of a few words, and no weights."""
    writer = gguf.GGUFWriter(str(path), "llama")
    tokens = [*SPECIAL, "▁", *"longtexrdfa", *(w[:n] for w in WORDS for n in range(2, len(w) + 1))]
    tokens = list(dict.fromkeys(tokens))
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([-float(i) for i in range(len(tokens))])
    writer.add_token_types([3 if token in SPECIAL else 1 for token in tokens])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    for name, value in fields.items():
        writer.add_bool(f"tokenizer.ggml.{name}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(
    ("fields", "ends"),
    [
        ({"add_bos_token": True}, (True, False)),
        ({}, (True, False)),  # what sentencepiece does by default
        ({"add_bos_token": False}, (False, False)),
        ({"add_bos_token": True, "add_eos_token": True}, (True, True)),
    ],
)
def test_first_and_last_tokens_are_what_the_file_says(tmp_path, fields, ends):
    file = write_gguf(tmp_path / "model.gguf", **fields)
    tokenizer = read_tokenizer(tmp_path, gguf_file=file.name)
    ids = tokenizer("long text")["input_ids"]
    assert (ids[0] == 1, ids[-1] == 2) == ends
    assert tokenizer("long text", add_special_tokens=False)["input_ids"] == ids[ends[0] : len(ids) - ends[1]]
    tokenizer.save_pretrained(tmp_path / "saved")
    assert read_tokenizer(tmp_path / "saved")("long text")["input_ids"] == ids


def test_a_tokenizer_that_splits_words_into_letters_is_refused(tmp_path):
    file = write_gguf(tmp_path / "model.gguf")
    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *"longtexrdfa", *WORDS])}
    letters = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    letters.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=letters, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    with pytest.raises(ValueError, match=r"model\.gguf: .* splits words into letters; load the model from a folder"):
        match_gguf(tokenizer, str(file))
