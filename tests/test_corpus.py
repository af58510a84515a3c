"""Documents from files of every kind, whole, broken or cut short, and from SymPy."""

from __future__ import annotations

import bz2
import gzip
import logging
import lzma

import pyarrow
import pytest
from pyarrow import parquet

from isentrope.data import corpus
from isentrope.data.corpus import CorpusError, Document, documents, sympy_documents

LINES = '{"id": "x", "text": "one"}\n\n{"input_ids": [1, 2]}\n'


@pytest.mark.parametrize(("ending", "opener"), [("", open), (".gz", gzip.open), (".xz", lzma.open), (".bz2", bz2.open)])
def test_every_kind_plain_and_compressed(tmp_path, ending, opener):
    contents = {
        "a.txt": "plain ½",
        "b.jsonl": LINES,
        "c.fasta": ">chr1 some words\nACGT\nAC\n\n>chr2\nGG\n>\nTT\n",
        "d.json": '[{"id": "y", "text": "two"}, {"text": "three"}]',
        "e.json": '{"a": 1}',
        "f.json": '{"text": "four"}\n{"text": "five"}\n',
        "g.json": "// five\n[6]",
    }
    for name, content in contents.items():
        with opener(tmp_path / (name + ending), "wt", encoding="utf-8") as file:
            file.write(content)
    found = list(documents([tmp_path / (name + ending) for name in contents]))
    texts = ["plain ½", "one", None, "ACGTAC", "GG", "TT", "two", "three", '{"a": 1}', "four", "five", "// five\n[6]"]
    assert [document.text for document in found] == texts
    assert [document.name for document in found[1:]][:4] == ["x", f"b.jsonl{ending}:3", "chr1", "chr2"]
    assert found[2].tokens == (1, 2)


def test_parquet(tmp_path):
    table = pyarrow.table({"id": ["x", "y"], "content": ["one", None]})
    parquet.write_table(table, tmp_path / "a.parquet")
    reading = documents([tmp_path / "a.parquet"], column="content")
    assert next(reading).text == "one"
    with pytest.raises(CorpusError, match=r"a\.parquet:2: expected 'content'"):
        next(reading)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", '{"text": "one"}\n{"text": \n{"text": "two"}\n', r"a\.jsonl:2: expected a JSON object"),
        ("b.jsonl", '{"text": "one"}\n[1]\n{"text": "two"}\n', r"b\.jsonl:2: expected an object with 'text', got list"),
        ("c.jsonl", '{"text": "one"}\n{"words": 3}\n{"text": "two"}\n', r"c\.jsonl:2: .*got words"),
        ("d.jsonl", '{"text": "one"}\n{"input_ids": ["a"]}\n{"text": "two"}\n', r"d\.jsonl:2"),
    ],
)
def test_a_broken_line_is_named_and_skipped_if_asked(tmp_path, caplog, name, content, message):
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(CorpusError, match=message):
        list(documents([path]))
    with caplog.at_level(logging.WARNING):
        found = list(documents([path], skip_broken=True))
    assert [document.text for document in found] == ["one", "two"]
    assert f"{name}:2" in caplog.text


@pytest.mark.parametrize("ending", [".gz", ".xz", ".bz2"])
def test_a_file_cut_short_is_named(tmp_path, ending):
    opener = corpus.COMPRESSED[ending]
    path = tmp_path / f"a.jsonl{ending}"
    with opener(path, "wt", encoding="utf-8") as file:
        file.writelines(f'{{"text": "{i * 7919}"}}\n' for i in range(20000))
    path.write_bytes(path.read_bytes()[:-2000])
    with pytest.raises(CorpusError, match="cannot be read to its end"):
        list(documents([path]))
    kept = len(list(documents([path], skip_broken=True)))
    assert kept > 100 or ending == ".bz2"  # one block of that holds it all


def test_files_that_are_no_text(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xff\xfe\xfa")
    (tmp_path / "b.fasta").write_text("ACGT\n")
    for name, message in (("a.txt", "cannot be read"), ("b.fasta", "begins with '>'"), ("none", "expected a file")):
        with pytest.raises(CorpusError, match=message):
            list(documents([tmp_path / name]))


def test_hashes_are_of_content():
    assert Document("a", text="x").sha256 == Document("b", text="x").sha256 != Document("a", text="y").sha256
    assert Document("a", tokens=(1, 2)).sha256 != Document("a", tokens=(1, 3)).sha256


def test_sympy_is_the_same_everywhere(monkeypatch):
    found = sympy_documents()
    assert len(found) == 550 and sum(len(document.text) for document in found) == 16_148_451
    assert all(len(document.text) > 4096 and "/tests/" not in document.name for document in found)
    assert {"polys", "physics", "core"} <= {document.group for document in found}
    monkeypatch.setattr(corpus, "SYMPY_SHA256", "0" * 64)
    with pytest.raises(CorpusError, match=r"sympy==1\.14\.0"):
        sympy_documents()
    assert len(sympy_documents(verify=False)) == 550
