"""Prompts of long texts: put together from words, the tokens are those of the whole text, or it is not done."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast, tokenization_utils_tokenizers

from isentrope.data.tasks import TASKS, load_filler
from isentrope.data.tasks.registry import IDENTITY_TASKS
from isentrope.data.tasks.vocabulary import ADJECTIVES, FILLER, NOUNS
from isentrope.evaluation import prompts as prompts_module
from isentrope.evaluation.loading import load_tokenizer
from isentrope.evaluation.prompts import PromptFormat, WordTokens
from isentrope.models.tokenizer import build_character_tokenizer, make_causal_tokenizer
from tests.fixtures.needles import made

CORPUS = [
    FILLER,
    " ".join(NOUNS + ADJECTIVES),
    load_filler("python").text[:20_000],
    "0123456789 ABCDEFGHIJKLMNOPQRSTUVWXYZ",
]
TEXT = f"{FILLER}\n\n  def f(x):\n    return x\n\nOne  two. Été “quoted” 12,345 – end.\n" * 3


def train(kind):
    """A small tokenizer of each family: GPT-2's, Llama's (no words before merging), T5's."""
    if kind == "characters":
        return make_causal_tokenizer(build_character_tokenizer([TEXT, "".join(map(chr, range(32, 127)))]))
    if kind == "unigram":
        backend = Tokenizer(models.Unigram())
        backend.pre_tokenizer, backend.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
        trainer = trainers.UnigramTrainer(vocab_size=700, unk_token="<unk>", special_tokens=["<unk>"])
    else:
        backend = Tokenizer(models.BPE(byte_fallback=False, unk_token="<unk>"))
        if kind == "bytes":
            backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
            backend.decoder = decoders.ByteLevel()
        else:
            backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
            backend.decoder = decoders.Sequence(
                [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
            )
        alphabet = [*pre_tokenizers.ByteLevel.alphabet(), "▁", "\n"]
        trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=["<unk>"], initial_alphabet=alphabet)
    texts = [line for text in CORPUS for line in text.splitlines()]
    if kind == "merged":  # merges within words alone, as vocabularies of this kind have them
        texts = [word for line in texts for word in line.split()]
    backend.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")


@pytest.fixture(scope="module", params=["bytes", "merged", "unigram", "characters"])
def tokenizer(request):
    return train(request.param)


def test_words_have_the_tokens_of_the_whole(tokenizer):
    words = WordTokens(tokenizer)
    assert words.split is not None
    texts = [TEXT, TEXT[7:], load_filler("python").text[:9000], load_filler("needles").text[:9000]]
    for text in texts:
        assert words.tokenize(text) == words.tokenize_whole(text)
        assert words.split is not None and words.checked and words.words


@pytest.mark.parametrize("task", [task for task in TASKS if task not in IDENTITY_TASKS])
def test_prompts_have_the_tokens_of_the_whole_and_the_length_wanted(task, tokenizer):
    prompts = PromptFormat.from_tokenizer(tokenizer)
    for length in (4000, 5001):
        prompt = prompts.build_prompt(made(task, length, measure=prompts.count_tokens))
        assert length - 40 <= prompt.total <= length
        whole = prompts._words.tokenize_whole(prompt.text)
        assert prompt.tokens[len(prompt.tokens) - len(whole) :] == whole
        assert len(prompt.part_ends) == len(prompt.example.answers) and prompt.part_ends[-1] == len(prompt.answer)


def test_a_vocabulary_with_tokens_of_several_words_is_not_split_there():
    vocabulary = {"<unk>": 0, "a": 1, "b": 2, ".": 3, " ": 4, ". ": 5, "a b": 6}
    assert prompts_module._compile_split(vocabulary) is None  # nothing can follow the anchor
    split = prompts_module._compile_split({"a": 1, ".Ġ": 2, "Ġa": 3, "ĠĠ": 4})
    assert split.split("a a. a, a  a\n a") == ["a", "a. a,", "a  a\n a"]


def test_a_tokenizer_whose_words_depend_on_each_other_is_not_split(tokenizer):
    words = WordTokens(tokenizer)
    real = words.tokenize_whole
    words.tokenize_whole = lambda text: real(text)[::-1]  # any difference to the whole
    assert words.tokenize(TEXT) == real(TEXT)[::-1] and words.split is None
    assert words.tokenize(TEXT) == real(TEXT)[::-1]


def test_the_cache_is_bounded(tokenizer, monkeypatch):
    words = WordTokens(tokenizer)
    words.tokenize(TEXT)
    monkeypatch.setattr(prompts_module, "MAX_CACHED_WORDS", 10)
    other = "one two three. " * 400
    assert words.tokenize(other) == words.tokenize_whole(other) and len(words.words) < 10


def test_tokenizers_clean_nothing_up_and_transformers_does_not_warn(tmp_path, monkeypatch):
    """Of byte pairs alone, whose text transformers leaves as it is."""
    warned = []
    monkeypatch.setattr(tokenization_utils_tokenizers.logger, "warning_once", lambda *words: warned.append(words))
    for kind in ("bytes", "unigram"):
        made = train(kind)
        made.clean_up_tokenization_spaces = made.init_kwargs["clean_up_tokenization_spaces"] = True
        made.save_pretrained(tmp_path / kind)
        plain, ours = AutoTokenizer.from_pretrained(tmp_path / kind), load_tokenizer(str(tmp_path / kind))
        tokens = plain("One two . And 3 , 4 !")["input_ids"]
        warned.clear()
        text = ours.decode(tokens)
        assert not warned and text == plain.decode(tokens)
        assert bool(warned) == (kind == "bytes") and plain.clean_up_tokenization_spaces
