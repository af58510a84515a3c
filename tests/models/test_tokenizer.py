"""Tokenizers: characters there and back, and BERT's way with a published vocabulary."""

from __future__ import annotations

import pytest
from transformers import AutoTokenizer, BertTokenizerFast

from isentrope.models.tokenizer import SPECIAL_TOKENS, build_bert_tokenizer, build_character_tokenizer

TEXTS = ["第一条  为了规范\n合同。", "def f(x):\n\treturn x ** 2  # ½", "ααβ"]


def test_characters_there_and_back(tmp_path):
    tokenizer = build_character_tokenizer(TEXTS)
    for text in TEXTS:
        ids = tokenizer(text)["input_ids"]
        assert len(ids) == len(text) + 2  # with [CLS] and [SEP]
        assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert tokenizer.pad_token_id == 0 and tokenizer.mask_token_id == 4
    tokenizer.save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    assert again(TEXTS)["input_ids"] == tokenizer(TEXTS)["input_ids"]
    assert again.mask_token == "[MASK]" and again.is_fast


def test_the_most_frequent_characters_and_the_same_every_time():
    small = build_character_tokenizer(TEXTS, vocab_size=8)
    letters = sorted(small.get_vocab(), key=small.get_vocab().get)
    assert letters[:5] == list(SPECIAL_TOKENS) and len(letters) == 8
    assert letters == sorted(build_character_tokenizer(TEXTS, 8).get_vocab(), key=small.get_vocab().get)
    assert small.unk_token_id in small("第")["input_ids"]
    assert small(text := "a[MASK]b")["input_ids"][2] == small.mask_token_id, text


def test_a_published_vocabulary_as_bert_reads_it(tmp_path):
    words = [*SPECIAL_TOKENS, "第", "一", "条", "合", "同", "。", "law", "##s", "the", "2"]
    path = tmp_path / "vocab.txt"
    path.write_text("\n".join(words))
    ours, theirs = build_bert_tokenizer(path), BertTokenizerFast.from_pretrained(tmp_path)
    for text in ("第一条 合同。", "The laws 2", "第一 law合", "未"):
        assert ours(text)["input_ids"] == theirs(text)["input_ids"]
    assert ours("第一条", "合同")["token_type_ids"] == [0, 0, 0, 0, 0, 1, 1, 1]


def test_bad_input(tmp_path):
    with pytest.raises(ValueError, match="expected some text"):
        build_character_tokenizer([])
    with pytest.raises(ValueError, match="vocab_size"):
        build_character_tokenizer(TEXTS, 5)
    (tmp_path / "v.txt").write_text("a\nb")
    with pytest.raises(ValueError, match="BERT vocabulary"):
        build_bert_tokenizer(tmp_path / "v.txt")
