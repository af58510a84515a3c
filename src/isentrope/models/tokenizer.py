"""Tokenizers for GAU-α and small causal models: of a published BERT vocabulary, or of the characters of texts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import WordLevel, WordPiece
from transformers import PreTrainedTokenizerFast

SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def build_character_tokenizer(texts: Iterable[str], vocab_size: int = 12000) -> PreTrainedTokenizerFast:
    """Build a tokenizer of the most frequent characters; the same texts give the same tokenizer."""
    if vocab_size <= len(SPECIAL_TOKENS):
        raise ValueError(f"vocab_size: expected more than the {len(SPECIAL_TOKENS)} special tokens, got {vocab_size}")
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(text)
    if not counts:
        raise ValueError("texts: expected some text, got none")
    # by frequency, then by code point
    characters = sorted(counts, key=lambda letter: (-counts[letter], letter))[: vocab_size - len(SPECIAL_TOKENS)]
    vocabulary = {token: index for index, token in enumerate((*SPECIAL_TOKENS, *characters))}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"(?m)."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return _wrap(tokenizer)


def build_bert_tokenizer(vocabulary: str | Path) -> PreTrainedTokenizerFast:
    """Build BERT's tokenizer over a vocabulary file, a token a line: Chinese by character, others by word pieces."""
    lines = Path(vocabulary).read_text(encoding="utf-8").splitlines()
    index = {token: i for i, token in enumerate(lines)}
    missing = [token for token in SPECIAL_TOKENS if token not in index]
    if missing:
        raise ValueError(f"{vocabulary}: expected a BERT vocabulary with {', '.join(missing)}, got {len(index)} tokens")
    tokenizer = Tokenizer(WordPiece(index, unk_token="[UNK]", max_input_chars_per_word=100))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix="##")
    return _wrap(tokenizer)


def make_causal_tokenizer(tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    """Return the same tokens for a causal model: no [CLS] and [SEP] around a text, no types, padding on the left."""
    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    backend.post_processor = processors.TemplateProcessing(single="$A", pair="$A $B")
    inputs, special = ["input_ids", "attention_mask"], tokenizer.special_tokens_map
    return PreTrainedTokenizerFast(tokenizer_object=backend, model_input_names=inputs, padding_side="left", **special)


def _wrap(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    """Add [CLS] and [SEP] around a text, and name the special tokens."""
    around = [(token, tokenizer.token_to_id(token)) for token in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=around
    )
    names = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
    inputs = ["input_ids", "token_type_ids", "attention_mask"]
    special = dict(zip(names, SPECIAL_TOKENS, strict=True))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_input_names=inputs, **special)
