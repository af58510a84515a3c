"""Documents by one word of a command line: SymPy, files, folders, globs, and data sets through the hub's library."""

from __future__ import annotations

import gzip
import json
import logging
import sys

import pytest

from isentrope.data.corpus import CorpusError, read_sympy_documents
from isentrope.data.source import Source
from isentrope.utils.extras import MissingExtraError

datasets = pytest.importorskip("datasets")


def write(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def texts(source):
    return [document.text for document in source.documents()]


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A folder as the hub has it, with two subsets, read by the real library without a network."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    root = tmp_path / "set"
    write(root / "laws" / "a.jsonl", [{"text": f"law {i}", "id": f"law-{i}", "group": "g"} for i in range(3)])
    write(root / "patents" / "a.jsonl", [{"text": f"patent {i}"} for i in range(2)])
    write(root / "patents" / "b.jsonl", [{"text": "patent 2"}])
    configs = "".join(f"- config_name: {name}\n  data_files: {name}/*.jsonl\n" for name in ("laws", "patents"))
    (root / "README.md").write_text(f"---\nconfigs:\n{configs}---\n")
    return root


def test_sympy():
    actual = list(Source("sympy", limit=3).documents())
    assert actual == read_sympy_documents()[:3] and actual[0].group is not None


def test_files_folders_and_globs(tmp_path, caplog):
    write(tmp_path / "b.jsonl", [{"text": "b", "group": 7}, {"text": "bb", "group": None}])
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "c.txt").write_text("c")
    (tmp_path / ".hidden").write_text("no")
    (tmp_path / "cover.png").write_bytes(b"\x89PNG\r\n\0\0")
    assert texts(Source(str(tmp_path))) == ["a", "b", "bb", "c"]
    assert "cover.png: not a text file" in caplog.text
    with pytest.raises(CorpusError, match=r"cover\.png: expected text in UTF-8, got a file with zeros in it"):
        texts(Source(str(tmp_path / "cover.png")))
    assert texts(Source(str(tmp_path / "a.txt"))) == ["a"]
    assert texts(Source(str(tmp_path / "**" / "*.txt"))) == ["a", "c"]
    assert [document.group for document in Source(str(tmp_path / "b.jsonl")).documents()] == ["7", None]
    with pytest.raises(CorpusError, match="expected files, got none"):
        texts(Source(str(tmp_path / "*.parquet")))


def test_what_a_word_means(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner" / "name").mkdir(parents=True)
    words = {"sympy": "sympy", "./owner/name": "files", "owner/name": "files", "hub:owner/name": "hub"}
    words |= {"yuyijiong/LongData-Corpus": "hub", "owner/na*": "files"}
    assert {word: Source(word).kind for word in words} == words


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Source("nothing"), "source: expected 'sympy', a file, .* got 'nothing'"),
        (lambda: Source("./no/such"), "source: expected"),
        (lambda: Source(""), "source: expected"),
        (lambda: Source("sympy", limit=0), "limit: expected 1 or more, got 0"),
        (lambda: Source("sympy", split="train"), "split: expected a data set on the hub, got 'sympy'"),
        (lambda: Source("*.txt", data_files="a"), "data_files: expected a data set on the hub"),
    ],
)
def test_bad_words(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_reading_is_lazy(tmp_path):
    path = write(tmp_path / "a.jsonl", [{"text": "one"}, {"text": "two"}])
    path.write_text(path.read_text() + "broken\n")
    assert texts(Source(str(path), limit=2)) == ["one", "two"]
    reading = Source(str(path)).documents()
    assert [next(reading).text, next(reading).text] == ["one", "two"]
    with pytest.raises(CorpusError, match=r"a\.jsonl:3: expected a JSON object"):
        next(reading)
    assert texts(Source(str(path), skip_broken=True)) == ["one", "two"]


def test_a_file_cut_short_is_named_with_its_line(tmp_path):
    path = tmp_path / "a.jsonl.gz"
    with gzip.open(path, "wt") as file:
        file.writelines(json.dumps({"text": str(i * 7919)}) + "\n" for i in range(20000))
    path.write_bytes(path.read_bytes()[:-2000])
    kept = len(texts(Source(str(path), skip_broken=True)))
    assert 100 < kept < 20000
    with pytest.raises(CorpusError, match=rf"a\.jsonl\.gz: cannot be read to its end: past line {kept}: "):
        texts(Source(str(path)))


def test_half_a_surrogate_is_no_text(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "fine"}\n{"text": "\\ud800"}\n')
    with pytest.raises(CorpusError, match=r"a\.jsonl:2: expected text"):
        texts(Source(str(path)))


def test_fingerprints_are_of_content_names_and_options(tmp_path):
    path = write(tmp_path / "x" / "a.jsonl", [{"text": "one"}])
    first = Source(str(path)).fingerprint()
    assert Source(str(write(tmp_path / "y" / "a.jsonl", [{"text": "one"}]))).fingerprint() == first
    others = [
        Source(str(write(tmp_path / "b.jsonl", [{"text": "one"}]))),
        Source(str(write(tmp_path / "z" / "a.jsonl", [{"text": "two"}]))),
        Source(str(path), column="content"),
        Source(str(path), limit=1),
        Source("sympy"),
    ]
    assert len({first, *(source.fingerprint() for source in others)}) == 6


def test_a_hub_data_set_and_its_parts(hub):
    laws = Source(f"hub:{hub}", subset="laws")
    actual = list(laws.documents())
    assert [document.text for document in actual] == ["law 0", "law 1", "law 2"]
    assert actual[1].name == "law-1" and actual[1].group == "g"
    patents = Source(f"hub:{hub}", subset="patents")
    assert texts(patents) == ["patent 0", "patent 1", "patent 2"]
    assert texts(Source(f"hub:{hub}", subset="patents", limit=1)) == ["patent 0"]
    only = Source(f"hub:{hub}", data_files="patents/b*")
    assert texts(only) == ["patent 2"]
    prints = {source.fingerprint() for source in (laws, patents, only)}
    assert len(prints) == 3 and Source(f"hub:{hub}", subset="laws").fingerprint() in prints


def test_a_hub_fingerprint_is_of_content(hub):
    first = Source(f"hub:{hub}", subset="patents").fingerprint()
    (hub / "patents" / "b.jsonl").touch()
    assert Source(f"hub:{hub}", subset="patents").fingerprint() == first
    write(hub / "patents" / "b.jsonl", [{"text": "another"}])
    assert Source(f"hub:{hub}", subset="patents").fingerprint() != first


def test_what_a_hub_data_set_has_not(hub):
    for options, message in (
        ({"subset": "laws", "column": "content"}, "expected a column 'content', got text, id, group"),
        ({"subset": "laws", "split": "test"}, "expected a split it has, got 'test'"),
        ({"subset": "novels"}, "cannot be loaded: .*novels"),
        ({"data_files": "none/*"}, "cannot be loaded"),
    ):
        with pytest.raises(CorpusError, match=message):
            texts(Source(f"hub:{hub}", skip_broken=True, **options))
    with pytest.raises(CorpusError, match="cannot be loaded"):
        texts(Source(f"hub:{hub / 'none'}"))


def test_broken_rows_of_a_hub_data_set(hub, caplog):
    write(hub / "laws" / "a.jsonl", [{"text": "one"}, {"text": None}, {"text": "two"}])
    with pytest.raises(CorpusError, match="row 2: expected 'text'"):
        texts(Source(f"hub:{hub}", subset="laws"))
    with caplog.at_level(logging.WARNING):
        assert texts(Source(f"hub:{hub}", subset="laws", skip_broken=True)) == ["one", "two"]
    assert "row 2" in caplog.text
    (hub / "laws" / "b.jsonl").write_text('{"text": \n{"text": "three"}\n')
    with pytest.raises(CorpusError, match="cannot be read past row"):
        texts(Source(f"hub:{hub}", data_files="laws/b.jsonl"))
    with caplog.at_level(logging.WARNING):
        assert texts(Source(f"hub:{hub}", data_files="laws/b.jsonl", skip_broken=True)) == []


def test_no_network_and_no_library(monkeypatch):
    def unreachable(*args, **kwargs):
        raise ConnectionError("Couldn't reach 'owner/name' on the Hub")

    monkeypatch.setattr(datasets, "load_dataset_builder", unreachable)
    with pytest.raises(CorpusError, match="owner/name: cannot be loaded: Couldn't reach"):
        texts(Source("owner/name"))
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingExtraError, match=r"isentrope\[hub\]"):
        texts(Source("owner/name"))
