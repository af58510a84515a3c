"""`isentrope data prepare` from end to end, on small corpora: reproducible, without leaks, resumable."""

from __future__ import annotations

import json
import os
from collections import Counter

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from typer.testing import CliRunner

import isentrope.models as models
from isentrope.cli import app
from isentrope.data import corpus as corpus_files
from isentrope.data import prepare as study
from isentrope.data.features import mean_hidden_states
from isentrope.data.prepare import PrepareOptions, prepare
from isentrope.data.prepared import PreparedCorpus
from isentrope.data.source import Source
from isentrope.models.tokenizer import build_character_tokenizer
from isentrope.report.figures import partition as corpus
from isentrope.report.tables.partition import build_partition_table

SMALL = PrepareOptions(longer_than=300, test=4)
WORDS = [f"{a}{b}{c}" for a in "bcdfghklm" for b in "aeiou" for c in "nrst"]


def text(seed, words=120):
    return " ".join(np.random.default_rng(seed).choice(WORDS, words).tolist())


def make_corpus(path, count=60):
    """Documents, some of them short, twice there, near-duplicates, or of one group."""
    rows = [{"id": f"d{i}", "text": text(i)} for i in range(count)]
    rows += [{"id": f"short{i}", "text": text(i, 10)} for i in range(3)]
    rows += [{"id": "copy", "text": text(0)}]
    rows += [{"id": f"near{i}-{j}", "text": text(i) + f" and more of it {j}"} for i in range(8) for j in range(3)]
    rows += [{"id": f"g{i}", "text": text(1000 + i), "group": f"group{i % 4}"} for i in range(16)]
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return path


@pytest.fixture(scope="module")
def laws(tmp_path_factory):
    return make_corpus(tmp_path_factory.mktemp("corpus") / "laws.jsonl")


@pytest.fixture(scope="module")
def done(laws, tmp_path_factory):
    return prepare(Source(str(laws)), tmp_path_factory.mktemp("out"), SMALL).parent


def manifest(folder, without_run=True):
    data = json.loads((folder / "manifest.json").read_text())
    return {key: value for key, value in data.items() if key != "run" or not without_run}


def test_a_broken_manifest_is_named(laws, tmp_path):
    (tmp_path / "manifest.json").write_text('{"format"')
    with pytest.raises(ValueError, match=r"manifest\.json: expected JSON, .*; delete it to prepare the corpus again"):
        prepare(Source(str(laws)), tmp_path, PrepareOptions(test=2))


def test_the_manifest_says_what_was_done(laws, done):
    data = manifest(done, without_run=False)
    assert data["source"]["name"] == str(laws) and data["options"]["seed"] == 0
    assert data["counts"] == {"read": 104, "too_short": 3, "duplicates": 1, "kept": 100}
    assert data["near_duplicates"] == {"shingle": 8, "threshold": 0.5, "clusters": 8, "documents": 32}
    assert data["tokenizer"]["made_of"] == "characters of all documents"
    assert data["features"] == {"kind": "hashed token bigrams", "model": None, "size": 768}
    assert {"torch", "commit", "date"} <= set(data["run"])
    assert "/" not in str(data["run"]["date"]) and len(data["documents"]) == 100
    statistics, rows = data["statistics"], data["documents"]
    for name, count in Counter(row["set"] for row in rows).items():
        lengths = [row["tokens"] for row in rows if row["set"] == name]
        actual = statistics[name]
        assert (actual["documents"], actual["tokens"]) == (count, sum(lengths))
        assert (actual["min"], actual["max"]) == (min(lengths), max(lengths))
        assert actual["mean"] == pytest.approx(np.mean(lengths))
    assert statistics["train"]["documents"] == 80 and statistics["test"]["documents"] == 4


def test_no_document_no_near_duplicate_and_no_group_is_in_two_sets(laws, tmp_path):
    for seed in range(4):
        prepare(Source(str(laws)), tmp_path / str(seed), PrepareOptions(longer_than=300, test=4, seed=seed))
        rows = manifest(tmp_path / str(seed))["documents"]
        assert len({row["sha256"] for row in rows}) == len(rows)
        units = {}
        for row in rows:
            units.setdefault(row.get("near_duplicate_of", row["sha256"]), []).append(row["set"])
            if row["group"]:
                units.setdefault(row["group"], []).append("train" if row["set"] == "train" else "held out")
        for sets in units.values():
            assert "train" not in sets or set(sets) == {"train"}
            if "test" in sets:
                assert sets.count("test") == 1 and set(sets) <= {"test", "left out"}
        assert sum(len(sets) == 4 for sets in units.values()) == 12  # eight of near-duplicates, four groups


def test_the_same_seed_gives_the_same_manifest_and_another_one_another(laws, done, tmp_path):
    prepare(Source(str(laws)), tmp_path / "same", SMALL)
    assert manifest(tmp_path / "same") == manifest(done)
    prepare(Source(str(laws)), tmp_path / "other", PrepareOptions(longer_than=300, test=4, seed=1))
    sets = [[row["set"] for row in manifest(folder)["documents"]] for folder in (done, tmp_path / "other")]
    assert sets[0] != sets[1]


def test_what_training_reads(laws, done):
    prepared = PreparedCorpus.open(done)
    tokenizer = AutoTokenizer.from_pretrained(prepared.tokenizer_path)
    texts = {document.name: document.text for document in Source(str(laws)).documents()}
    names = set()
    for which, count in (("train", 80), ("validation", None), ("test", 4)):
        actual = prepared.documents(which)
        assert len(actual) == len(actual.names) == len(actual.starts) == len(actual.lengths)
        assert count in (None, len(actual)) and not names & set(actual.names)
        names |= set(actual.names)
        for i in (0, len(actual) - 1):
            assert tokenizer.decode(actual[i].tolist()) == texts[actual.names[i]]
            assert np.array_equal(actual[i], actual.ids[actual.starts[i] :][: actual.lengths[i]])
    with pytest.raises(ValueError, match="set_name: expected one of train, validation, test, got 'left out'"):
        prepared.documents("left out")


def test_a_second_run_tokenizes_nothing_and_says_so(laws, tmp_path, monkeypatch):
    prepare(Source(str(laws)), tmp_path, SMALL)
    before, said = manifest(tmp_path), []

    def never(*args, **kwargs):
        raise AssertionError("read again")

    monkeypatch.setattr(study, "build_character_tokenizer", never)
    monkeypatch.setattr(PreTrainedTokenizerBase, "__call__", never)
    monkeypatch.setattr(corpus_files, "_read_json_lines", never)
    prepare(Source(str(laws)), tmp_path, SMALL, said.append)
    assert manifest(tmp_path) == before and "tokens of an earlier run" in said[0]


def test_an_interrupted_run_goes_on(laws, done, tmp_path, monkeypatch):
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    for place, name in (
        (study, "tokenize"),
        (study.duplicates, "compute_signature"),
        (study.partition, "split_held_out"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(place, name, interrupted)
            with pytest.raises(KeyboardInterrupt):
                prepare(Source(str(laws)), tmp_path, SMALL)
        assert not (tmp_path / "manifest.json").exists()
    said = []
    prepare(Source(str(laws)), tmp_path, SMALL, said.append)
    assert len(said) == 1 and manifest(tmp_path) == manifest(done)
    assert not list(tmp_path.rglob("*.partial"))


def test_a_partition_is_not_replaced_by_another(laws, done, tmp_path):
    before = (done / "manifest.json").read_text()
    other = make_corpus(tmp_path / "other.jsonl", 50)
    vocabulary = tmp_path / "vocab.txt"
    vocabulary.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]))
    for source, options, message in (
        (laws, PrepareOptions(longer_than=300, test=4, seed=1), "seed 0, not 1"),
        (other, SMALL, "source"),
        (laws, PrepareOptions(str(vocabulary), longer_than=300, test=4), "tokenizer"),
    ):
        with pytest.raises(ValueError, match=rf"holds a partition with {message}"):
            prepare(Source(str(source)), done, options)
    assert (done / "manifest.json").read_text() == before
    AutoTokenizer.from_pretrained(done / "tokenizer").decode(PreparedCorpus.open(done).store[0].tolist())


def test_a_vocabulary_and_a_folder_as_tokenizers(laws, tmp_path):
    vocabulary = tmp_path / "vocab.txt"
    vocabulary.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]))
    options = {"longer_than": 100, "test": 4}
    prepare(Source(str(laws)), tmp_path / "a", PrepareOptions(str(vocabulary), **options))
    prepare(Source(str(laws)), tmp_path / "b", PrepareOptions(str(tmp_path / "a" / "tokenizer"), **options))
    a, b = manifest(tmp_path / "a"), manifest(tmp_path / "b")
    assert a["tokenizer"]["vocab_size"] == 5 + len(WORDS) and a["documents"][0]["tokens"] == 120
    assert a["documents"] == b["documents"] and a["tokenizer"]["sha256"] == b["tokenizer"]["sha256"]
    assert a["tokens"] == b["tokens"]


def test_features_of_a_model(laws, done, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(done / "tokenizer")
    config = models.GAUAlphaConfig(vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=1)
    models.GAUAlphaModel(config).save_pretrained(tmp_path / "model")
    options = PrepareOptions(longer_than=300, test=4, features=str(tmp_path / "model"))
    prepare(Source(str(laws)), tmp_path / "out", options)
    data = manifest(tmp_path / "out")
    assert data["features"] == {"kind": "mean hidden states", "model": str(tmp_path / "model"), "size": 32}
    assert data["statistics"]["test"]["documents"] == 4


def test_hidden_states_are_means_over_chunks(done, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(done / "tokenizer")
    config = models.GAUAlphaConfig(vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=1)
    model = models.GAUAlphaModel(config).eval()
    model.save_pretrained(tmp_path)
    ids = np.random.default_rng(0).integers(5, len(tokenizer), 5000, dtype=np.int32)
    for length in (100, 512, 1300, 5000):
        document = ids[:length]
        parts = [torch.tensor(document[:4096][at : at + 512][None]) for at in range(0, min(length, 4096), 512)]
        with torch.no_grad():
            expected = torch.cat([model(input_ids=part).last_hidden_state[0] for part in parts]).mean(0)
        (actual,) = mean_hidden_states(str(tmp_path), [document], tokenizer, "cpu")
        np.testing.assert_allclose(actual, expected.numpy(), atol=1e-5)
    # a model with another vocabulary reads the text; one without a tokenizer and with too few tokens is refused
    other = build_character_tokenizer(["".join(reversed(WORDS))])
    other.save_pretrained(tmp_path)
    text_ids = torch.tensor([other(tokenizer.decode(ids[:100].tolist()), add_special_tokens=False)["input_ids"]])
    with torch.no_grad():
        expected = model(input_ids=text_ids).last_hidden_state[0].mean(0)
    (actual,) = mean_hidden_states(str(tmp_path), [ids[:100]], tokenizer, "cpu")
    np.testing.assert_allclose(actual, expected.numpy(), atol=1e-5)
    small = models.GAUAlphaConfig(vocab_size=6, hidden_size=32, intermediate_size=64, num_hidden_layers=1)
    models.GAUAlphaModel(small).save_pretrained(tmp_path / "small")
    with pytest.raises(ValueError, match=r"features: expected a model of \d+ tokens or more, got 6"):
        list(mean_hidden_states(str(tmp_path / "small"), [ids], tokenizer, "cpu"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"vocab_size": 9, "tokenizer": "x"}, "vocab_size: expected it with the tokenizer 'characters'"),
        ({"longer_than": 0}, "longer_than"),
        ({"train_share": 1.2}, "train_share: expected a share between 0 and 1, got 1.2"),
        ({"tokenizer": "./none"}, "tokenizer: expected a folder or a name on the hub"),
        ({"features": "/none"}, "features: expected a folder or a name on the hub"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        PrepareOptions(**options)


def test_corpora_that_will_not_do(tmp_path):
    few = tmp_path / "few.jsonl"
    few.write_text("\n".join(json.dumps({"text": text(i)}) for i in range(12)))
    with pytest.raises(ValueError, match=r"test: expected fewer than the 2 documents held out.* tokens are kept in"):
        prepare(Source(str(few)), tmp_path / "a", SMALL)
    with pytest.raises(ValueError, match="expected documents longer than 4096 tokens, got none among 12"):
        prepare(Source(str(few)), tmp_path / "b", PrepareOptions())
    assert not (tmp_path / "b").exists()
    few.write_text('{"input_ids": [1, 2, 3]}\n')
    with pytest.raises(ValueError, match="texts: expected some text, got none"):
        prepare(Source(str(few)), tmp_path / "c", SMALL)
    few.write_text('{"text": "a"}\nbroken\n')
    with pytest.raises(ValueError, match=r"few\.jsonl:2"):
        prepare(Source(str(few)), tmp_path / "d", SMALL)


def test_folders_that_are_not_ready(done, tmp_path):
    def copied(name):
        for path in (p for p in done.rglob("*") if p.is_file()):
            target = tmp_path / name / path.relative_to(done)
            target.parent.mkdir(parents=True, exist_ok=True)
            os.link(path, target)
        return tmp_path / name

    def rewritten(name, change):
        path = copied(name) / "manifest.json"
        content = change(path.read_text())
        path.unlink()
        path.write_text(content)

    (tmp_path / "empty").mkdir()
    next(copied("no tokens").glob("*.npy")).unlink()
    (copied("no tokenizer") / "tokenizer" / "tokenizer.json").unlink()
    rewritten("cut", lambda content: content[:100])
    rewritten("another", lambda content: '{"format": 3}')
    sha256 = manifest(done)["documents"][0]["sha256"]
    rewritten("other documents", lambda content: content.replace(sha256, "0" * 64))
    for name, message in (
        ("empty", r"manifest\.json: expected a prepared corpus, .*run: isentrope data prepare"),
        ("no tokens", r"tokens-\w+\.npy: expected the corpus in tokens, .*isentrope data prepare"),
        ("no tokenizer", "tokenizer: expected the tokenizer, got none; run"),
        ("cut", "expected JSON"),
        ("another", "expected the format 'isentrope partition 1'"),
        ("other documents", "expected the documents of the token files"),
    ):
        with pytest.raises(ValueError, match=message):
            PreparedCorpus.open(tmp_path / name)


@pytest.mark.figures
def test_table_and_figure(done):
    table = build_partition_table(done / "manifest.json")
    assert [str(column.header) for column in table.columns] == ["", "Train", "Validation", "Test"]
    assert table.row_count == 4 and next(iter(table.columns[1].cells)) == "80"
    paths = corpus.draw_partition(done / "manifest.json")
    assert [path.name for path in paths] == ["partition.png", "partition.svg"]
    first = [path.read_bytes() for path in paths]
    assert all(len(content) > 5000 for content in first) and b"4 held out" not in first[1]
    assert [path.read_bytes() for path in corpus.draw_partition(done / "manifest.json")] == first


def test_the_command_on_the_default_corpus(tmp_path):
    arguments = ["data", "prepare", "sympy", "--out", str(tmp_path), "--limit", "60", "--test", "3"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    assert "number of samples" in done.output and str(tmp_path / "partition.svg") in done.output
    names = {path.name for path in tmp_path.iterdir()}
    assert {"manifest.json", "partition.png", "partition.svg", "tokenizer"} <= names and len(names) == 6
    rows = manifest(tmp_path)["documents"]
    held = {row["group"] for row in rows if row["set"] != "train"}
    assert len(rows) == 60 and held and not held & {row["group"] for row in rows if row["set"] == "train"}
    again = CliRunner().invoke(app, arguments)
    assert again.exit_code == 0 and "tokens of an earlier run" in again.stderr


def test_the_command_in_one_line(tmp_path):
    assert "Example" in CliRunner().invoke(app, ["data", "prepare", "--help"]).output
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\nbroken\n')
    for words, message in (
        (["nothing"], "source: expected"),
        ([str(tmp_path / "a.jsonl")], "a.jsonl:2: expected a JSON object"),
        ([str(tmp_path / "a.jsonl"), "--skip-broken"], "longer than 4096 tokens"),
        (["sympy", "--subset", "x"], "subset: expected a data set on the hub"),
    ):
        refused = CliRunner().invoke(app, ["data", "prepare", *words, "--out", str(tmp_path / "out")])
        assert refused.exit_code == 2 and message in refused.output
        assert refused.stderr.count("\n") == 1 + ("skipped" in refused.stderr)
