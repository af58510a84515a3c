"""Tokens on disk: what is kept, what a second run finds, and what a killed run leaves."""

from __future__ import annotations

import signal
import subprocess
import sys
import weakref

import numpy as np
import pytest

from isentrope.data import store as module
from isentrope.data.corpus import CorpusError, Document
from isentrope.data.store import TokenStore, store_paths, tokenize
from isentrope.models.tokenizer import build_character_tokenizer

KEY = "0" * 64


class Counting:
    """A token a character, its code point; counts how often it is called."""

    def __init__(self):
        self.calls = 0

    def __len__(self):
        return 128

    def __call__(self, texts, **options):
        self.calls += 1
        assert options["add_special_tokens"] is False
        return {"input_ids": [[ord(letter) for letter in text] for text in texts]}


def test_what_is_kept(tmp_path):
    given = [
        Document("short", text="abcd"),
        Document("first", text="abcde", group="g"),
        Document("again", text="abcde"),
        Document("tokens", tokens=(1, 2, 3, 4, 5, 127)),
        Document("last", text="vwxyz!"),
    ]
    store = tokenize(given, Counting(), tmp_path, KEY, longer_than=4)
    assert store.names == ["first", "tokens", "last"] and len(store) == 3
    assert store.groups == ["g", None, None] and store.characters == [5, None, 6]
    assert store.sha256 == [given[i].sha256 for i in (1, 3, 4)]
    assert store.counts == {"read": 5, "too_short": 1, "duplicates": 1}
    assert store.lengths.tolist() == [5, 6, 6] and store.starts.tolist() == [0, 5, 11]
    expected = [[97, 98, 99, 100, 101], [1, 2, 3, 4, 5, 127], [ord(letter) for letter in "vwxyz!"]]
    assert [tokens.tolist() for tokens in store] == expected and store[-1].tolist() == expected[2]
    assert isinstance(store.ids, np.memmap) and store[1].base is not None and store.ids.dtype == np.int32
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(path.name for path in store_paths(tmp_path, KEY))


def test_a_real_tokenizer_adds_nothing_and_warns_of_nothing(tmp_path, caplog):
    text = "[MASK] is no mask, and a long text is no mistake. " * 400
    tokenizer = build_character_tokenizer([text])
    tokenizer.model_max_length = 64
    store = tokenize([Document("a", text=text)], tokenizer, tmp_path, KEY)
    assert store.lengths.tolist() == [len(text)] and not caplog.records
    assert not set(tokenizer.all_special_ids) & set(store[0].tolist())
    assert tokenizer.decode(store[0][:50].tolist()) == text[:50]


def test_order_holds_however_texts_are_batched(tmp_path, monkeypatch):
    given = [Document(str(i), text=chr(33 + i) * (i % 7 + 1)) for i in range(60)]
    given[20] = Document("20", tokens=(5, 6))
    whole = tokenize(given, Counting(), tmp_path, "a" * 64, longer_than=0)
    for texts, characters in ((1, 1), (7, 100), (100, 10)):
        monkeypatch.setattr(module, "MAX_BATCH_TEXTS", texts)
        monkeypatch.setattr(module, "MAX_BATCH_CHARACTERS", characters)
        store = tokenize(given, Counting(), tmp_path, f"{texts}" * 64, longer_than=0)
        assert store.names == whole.names and np.array_equal(store.ids, whole.ids)


def test_a_second_run_reads_and_tokenizes_nothing(tmp_path):
    tokenizer = Counting()
    first = tokenize([Document("a", text="abc")], tokenizer, tmp_path, KEY, longer_than=1)
    second = tokenize(iter(()), tokenizer, tmp_path, KEY, longer_than=1)
    assert tokenizer.calls == 1 and second.names == first.names and np.array_equal(second.ids, first.ids)
    tokenize([Document("b", text="abc")], tokenizer, tmp_path, "1" * 64, longer_than=1)
    assert tokenizer.calls == 2


def test_few_documents_are_in_memory_at_a_time(tmp_path):
    alive, most = weakref.WeakSet(), 0

    def stream():
        nonlocal most
        for i in range(1000):
            document = Document(str(i), text=f"{i:05}")
            alive.add(document)
            most = max(most, len(alive))
            yield document

    assert len(tokenize(stream(), Counting(), tmp_path, KEY, longer_than=1)) == 1000
    assert most <= 2 * module.MAX_BATCH_TEXTS


def test_a_failure_leaves_nothing(tmp_path):
    def stream():
        yield Document("a", text="abc" * module.MAX_BATCH_CHARACTERS)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tokenize(stream(), Counting(), tmp_path, KEY, longer_than=1)
    assert list(tmp_path.iterdir()) == []


KILLED = """
import sys
from pathlib import Path
from isentrope.data.corpus import Document
from isentrope.data.store import tokenize

class Tokenizer:  # no more than this, since transformers takes seconds to import
    __len__ = lambda self: 128
    __call__ = lambda self, texts, **options: {"input_ids": [[ord(letter) for letter in text] for text in texts]}

def stream():
    for i in range(10**9):
        if i == 500:
            print("half-way", flush=True)
            sys.stdin.read()
        yield Document(str(i), text=f"{i:09}" * 100)

tokenize(stream(), Tokenizer(), Path(sys.argv[1]), sys.argv[2], longer_than=1)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="its partial files are kept on Windows")
def test_a_killed_run_leaves_nothing_that_counts_and_the_next_one_succeeds(tmp_path):
    command = [sys.executable, "-c", KILLED, str(tmp_path), KEY]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as process:
        assert process.stdout.readline() == "half-way\n"
        process.send_signal(signal.SIGKILL)
    left = list(tmp_path.iterdir())
    assert len(left) == 1 and left[0].name.startswith(".") and left[0].name.endswith(".partial")
    assert left[0].stat().st_size > 0
    with pytest.raises(FileNotFoundError):
        TokenStore.open(tmp_path, KEY)
    store = tokenize([Document("a", text="abc")], Counting(), tmp_path, KEY, longer_than=1)
    assert store.names == ["a"]
    assert sorted(tmp_path.iterdir()) == sorted(store_paths(tmp_path, KEY))  # what was left is gone


def test_an_array_without_its_index_is_written_again(tmp_path):
    tokenize([Document("a", text="abc")], Counting(), tmp_path, KEY, longer_than=1)
    store_paths(tmp_path, KEY)[1].unlink()
    assert tokenize([Document("b", text="abcd")], Counting(), tmp_path, KEY, longer_than=1).names == ["b"]


def test_an_array_of_another_size_is_refused(tmp_path):
    tokenize([Document("a", text="abc")], Counting(), tmp_path, KEY, longer_than=1)
    np.save(store_paths(tmp_path, KEY)[0], np.zeros(2, np.int32))
    with pytest.raises(CorpusError, match=r"expected 3 tokens, got int32 \(2,\); delete it"):
        TokenStore.open(tmp_path, KEY)


@pytest.mark.parametrize("tokens", [(0, 128), (-1, 3)])
def test_tokens_of_another_tokenizer_are_refused(tmp_path, tokens):
    with pytest.raises(CorpusError, match=r"x: expected tokens of the tokenizer, 0 … 127, got"):
        tokenize([Document("x", tokens=tokens)], Counting(), tmp_path, KEY, longer_than=1)


def test_nothing_long_enough(tmp_path):
    store = tokenize([Document("a", text="abc"), Document("b", tokens=())], Counting(), tmp_path, KEY)
    assert len(store) == 0 and store.counts["too_short"] == 2 and list(store) == []


def test_frequencies(tmp_path, monkeypatch):
    store = tokenize([Document("a", text="aab"), Document("b", tokens=(1, 1))], Counting(), tmp_path, KEY, 1)
    for at_once in (1, 2, 100):
        monkeypatch.setattr(module, "TOKENS_PER_COUNT", at_once)
        counts = store.count_tokens()
        assert counts[[1, 97, 98]].tolist() == [2, 2, 1] and counts.sum() == 5
