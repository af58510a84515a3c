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
from isentrope.data.corpus import CorpusError, Document, read_documents, read_sympy_documents

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
    actual = list(read_documents([tmp_path / (name + ending) for name in contents]))
    texts = ["plain ½", "one", None, "ACGTAC", "GG", "TT", "two", "three", '{"a": 1}', "four", "five", "// five\n[6]"]
    assert [document.text for document in actual] == texts
    assert [document.name for document in actual[1:]][:4] == ["x", f"b.jsonl{ending}:3", "chr1", "chr2"]
    assert actual[2].tokens == (1, 2)


def test_parquet(tmp_path):
    table = pyarrow.table({"id": ["x", "y"], "content": ["one", None]})
    parquet.write_table(table, tmp_path / "a.parquet")
    reading = read_documents([tmp_path / "a.parquet"], column="content")
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
        list(read_documents([path]))
    with caplog.at_level(logging.WARNING):
        actual = list(read_documents([path], skip_broken=True))
    assert [document.text for document in actual] == ["one", "two"]
    assert f"{name}:2" in caplog.text


@pytest.mark.parametrize("ending", [".gz", ".xz", ".bz2"])
def test_a_file_cut_short_is_named(tmp_path, ending):
    opener = corpus.DECOMPRESSORS[ending]
    path = tmp_path / f"a.jsonl{ending}"
    with opener(path, "wt", encoding="utf-8") as file:
        file.writelines(f'{{"text": "{i * 7919}"}}\n' for i in range(20000))
    path.write_bytes(path.read_bytes()[:-2000])
    with pytest.raises(CorpusError, match="cannot be read to its end"):
        list(read_documents([path]))
    kept = len(list(read_documents([path], skip_broken=True)))
    assert kept > 100 or ending == ".bz2"  # one block of that holds it all


def test_files_that_are_no_text(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xff\xfe\xfa")
    (tmp_path / "b.fasta").write_text("ACGT\n")
    for name, message in (
        ("a.txt", "expected text in UTF-8"),
        ("b.fasta", "begins with '>'"),
        ("none", "expected a file"),
    ):
        with pytest.raises(CorpusError, match=message):
            list(read_documents([tmp_path / name]))


def test_hashes_are_of_content():
    assert Document("a", text="x").sha256 == Document("b", text="x").sha256 != Document("a", text="y").sha256
    assert Document("a", tokens=(1, 2)).sha256 != Document("a", tokens=(1, 3)).sha256


def test_sympy_is_the_same_everywhere(monkeypatch):
    actual = read_sympy_documents()
    assert len(actual) == 550 and sum(len(document.text) for document in actual) == 16_148_451
    assert all(len(document.text) > 4096 and "/tests/" not in document.name for document in actual)
    assert {"polys", "physics", "core"} <= {document.group for document in actual}
    monkeypatch.setattr(corpus, "SYMPY_SHA256", "0" * 64)
    with pytest.raises(CorpusError, match=r"sympy==1\.14\.0"):
        read_sympy_documents()
    assert len(read_sympy_documents(verify=False)) == 550


def lines(path, *contents):
    path.write_bytes(b"\n".join(contents))
    return path


@pytest.mark.parametrize("ending", ["", ".gz"])
def test_a_wrong_byte_breaks_its_own_line_and_no_other(tmp_path, caplog, ending):
    """Read as one text, its block of thousands of bytes would be lost with it."""
    rows = [b'{"text": "%d"}' % i for i in range(1, 9)]
    rows[4] = b'{"text": "caf\xe9"}'
    path = tmp_path / f"texts.jsonl{ending}"
    with gzip.open(path, "wb") if ending else path.open("wb") as file:
        file.write(b"\n".join(rows))
    with pytest.raises(CorpusError, match=r"texts\.jsonl.*:5: expected UTF-8, got .*0xe9") as caught:
        list(read_documents([path]))
    assert str(caught.value).startswith(f"{path}:5: ")
    with caplog.at_level(logging.WARNING):
        actual = [document.text for document in read_documents([path], skip_broken=True)]
    assert actual == ["1", "2", "3", "4", "6", "7", "8"]
    assert len(caplog.messages) == 1 and f"{path}:5:" in caplog.messages[0]


@pytest.mark.parametrize(
    ("name", "content", "texts"),
    [
        ("a.jsonl", b'{"text": "one"}\n{"text": "two"}\n', ["one", "two"]),
        ("a.txt", b"one", ["one"]),
        ("a.json", b'[{"text": "one"}]', ["one"]),
        ("a.fasta", b">x\nACGT\n", ["ACGT"]),
    ],
)
def test_a_byte_order_mark_is_no_text(tmp_path, name, content, texts):
    (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + content)
    assert [document.text for document in read_documents([tmp_path / name])] == texts


@pytest.mark.parametrize("end", [b"\r\n", b"\r", b"\n"])
def test_ends_of_lines(tmp_path, end):
    (tmp_path / "a.jsonl").write_bytes(end.join((b'{"text": "one"}', b"", b'{"text": "two"}', b"")))
    assert [(d.name, d.text) for d in read_documents([tmp_path / "a.jsonl"])] == [
        ("a.jsonl:1", "one"),
        ("a.jsonl:3", "two"),
    ]


@pytest.mark.parametrize("broken", [b"[" * 100_000, b'{"text": ' * 100_000, b'{"text": ' + b"9" * 5000 + b"}"])
def test_brackets_in_brackets_are_a_broken_line(tmp_path, broken):
    path = lines(tmp_path / "a.jsonl", b'{"text": "one"}', broken, b'{"text": "two"}')
    with pytest.raises(CorpusError, match=":2: expected a JSON object a line, got "):
        list(read_documents([path]))
    assert [document.text for document in read_documents([path], skip_broken=True)] == ["one", "two"]
    whole = tmp_path / "a.json"
    whole.write_bytes(broken)
    assert [document.text for document in read_documents([whole])] == [broken.decode()]  # JSON of no kind is a text


def test_a_wrong_byte_breaks_its_record(tmp_path):
    path = lines(tmp_path / "a.fasta", b">x", b"AC", b">y", b"AC", b"\xff", b"GT", b">z", b"GG")
    with pytest.raises(CorpusError, match=":5: expected UTF-8"):
        list(read_documents([path]))
    actual = [(document.name, document.text) for document in read_documents([path], skip_broken=True)]
    assert actual == [("x", "AC"), ("z", "GG")]
