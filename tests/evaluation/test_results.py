"""Results files: versions, what a run resumes from and what it refuses, files that are whole or absent."""

from __future__ import annotations

import json
import re

import pytest

from isentrope.data.tasks import load_filler
from isentrope.evaluation import results
from isentrope.evaluation.ranking import rank_recipes
from isentrope.evaluation.results import (
    CALIBRATION,
    PERPLEXITY,
    RETRIEVAL,
    ResultsStore,
    is_done,
    read_cell,
    read_results,
    write_cell,
)
from isentrope.report.tables.perplexity import build_perplexity_table

MODEL = {"name": "m", "type": "llama", "dtype": "float32", "weights": "0"}
HEAD = {"model": MODEL, "config": {"recipes": ("plain",), "edges": (0, 8), "seed": 0}}
CELL = {"recipe": "plain", "text": "a", "loss": [1.0], "seconds": 1.0}


def stored(folder, head=HEAD, schema=PERPLEXITY, **fields):
    data = json.loads(json.dumps(head)) | {"cells": [CELL]} | fields
    (folder / schema.file).write_text(json.dumps(data))
    return folder / schema.file


def test_a_file_without_a_version_is_of_version_1_and_a_newer_one_is_refused(tmp_path):
    path = stored(tmp_path)
    assert read_results(path, "again", "cells")["cells"] == [CELL]
    stored(tmp_path, version=1)
    assert ResultsStore(tmp_path, PERPLEXITY, HEAD).cells == {("plain", "a"): CELL}
    stored(tmp_path, version=2, texts=[], rows=[])
    readers = (lambda: ResultsStore(tmp_path, PERPLEXITY, HEAD), lambda: rank_recipes(tmp_path))
    for read in (*readers, lambda: build_perplexity_table(path)):
        with pytest.raises(ValueError, match=r"perplexity\.json: results of version 2, .* reads version 1; upgrade it"):
            read()


def test_what_an_earlier_run_measured_is_taken_over(tmp_path):
    stored(tmp_path)
    head = {"model": MODEL, "config": HEAD["config"] | {"recipes": ("infoscale", "plain")}}
    store = ResultsStore(tmp_path, PERPLEXITY, head)
    assert store.head["config"]["recipes"] == ["plain", "infoscale"]
    store.cells["infoscale", "a"] = CELL | {"recipe": "infoscale"}
    store.write(store.results())
    again = ResultsStore(tmp_path, PERPLEXITY, head)
    assert list(again.cells) == [("plain", "a"), ("infoscale", "a")] and again.results() == store.results()
    assert [path.name for path in tmp_path.iterdir()] == ["perplexity.json"]


def test_lengths_and_depths_are_sorted(tmp_path):
    config = {"recipes": ["plain"], "tasks": ["words"], "lengths": [64, 512], "depths": [100], "examples": 4}
    config["fillers"] = ["noise"]
    head = {"model": MODEL, "fillers": {"noise": "hash"}, "texts": {}, "config": config}
    cell = {"recipe": "plain", "task": "words", "length": 64, "depth": None, "filler": "noise", "failed": None}
    (tmp_path / "retrieval.json").write_text(json.dumps(head | {"cells": [cell]}))
    wanted = head | {"config": config | {"lengths": [128], "depths": [0]}}
    store = ResultsStore(tmp_path, RETRIEVAL, wanted)
    assert store.head["config"]["lengths"] == [64, 128, 512] and store.head["config"]["depths"] == [0, 100]
    assert list(store.cells) == [("plain", "words", 64, None, "noise")]
    with pytest.raises(ValueError, match=r"retrieval\.json: holds another .* \(prompts or tokenizer differ\)"):
        ResultsStore(tmp_path, RETRIEVAL, wanted | {"fillers": {"noise": "other"}})
    more = ResultsStore(tmp_path, RETRIEVAL, wanted | {"fillers": {"book": "other"}})
    assert more.head["fillers"] == {"noise": "hash", "book": "other"}


@pytest.mark.parametrize(("text", "name"), [("of a book", "text"), (load_filler("sentences").sha256, "sentences")])
def test_retrieval_of_versions_with_one_filler_is_resumed(tmp_path, text, name):
    config = {"recipes": ["plain"], "tasks": ["words"], "lengths": [64], "depths": [100], "examples": 4}
    cell = {"recipe": "plain", "task": "words", "length": 64, "depth": None, "failed": None}
    old = {"model": MODEL, "examples": "hash", "text": text, "config": config, "cells": [cell]}
    (tmp_path / "retrieval.json").write_text(json.dumps(old))
    head = {"model": MODEL, "fillers": {name: "hash"}, "texts": {name: text}, "config": config | {"fillers": [name]}}
    store = ResultsStore(tmp_path, RETRIEVAL, head)
    assert list(store.cells) == [("plain", "words", 64, None, name)]
    with pytest.raises(ValueError, match="holds another model, or other examples"):
        ResultsStore(tmp_path, RETRIEVAL, head | {"fillers": {name: "other"}})


@pytest.mark.parametrize(
    ("head", "words"),
    [
        (HEAD | {"model": MODEL | {"weights": "1"}}, "model"),
        (HEAD | {"model": MODEL | {"name": "other"}}, "model"),
        (HEAD | {"config": HEAD["config"] | {"edges": (0, 9)}}, "edges"),
        (HEAD | {"config": HEAD["config"] | {"edges": (0, 9), "seed": 1}}, "edges and seed"),
    ],
)
def test_results_of_another_model_or_other_data_are_refused(tmp_path, head, words):
    path = stored(tmp_path)
    before = path.read_bytes()
    message = f"holds another model or other buckets ({words} differ); choose another folder"
    with pytest.raises(ValueError, match=re.escape(message)):
        ResultsStore(tmp_path, PERPLEXITY, head)
    assert path.read_bytes() == before


def test_without_a_folder_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    store = ResultsStore(None, CALIBRATION, HEAD)
    store.write(store.results())
    assert store.path is None and store.cells == {} and not list(tmp_path.iterdir())


def test_names_of_files_that_are_no_text(tmp_path):
    """A file's name may hold bytes that are no UTF-8."""
    store = ResultsStore(tmp_path, PERPLEXITY, HEAD | {"texts": [{"name": "\udc80", "sha256": "a"}]})
    store.write(store.results())
    assert ResultsStore(tmp_path, PERPLEXITY, HEAD).earlier["texts"][0]["name"] == "\udc80"


def test_cells_of_masked_tokens(tmp_path, caplog):
    result = dict.fromkeys(results.MASKED_METRICS, 1.0) | {"failed": None}
    write_cell(tmp_path, "key", {"result": result, "timing": {}})
    assert is_done(tmp_path, "key") and read_cell(tmp_path, "key") == {"result": result, "timing": {}}
    write_cell(tmp_path, "key", {"result": result | {"failed": "out of memory"}, "timing": {}})
    assert not is_done(tmp_path, "key") and not is_done(tmp_path, "none")
    write_cell(tmp_path, "key", {"result": {}, "timing": {}})
    assert read_cell(tmp_path, "key") is None and "it has to be measured again" in caplog.messages[0]


def test_what_another_process_writes_meanwhile_is_kept(tmp_path):
    first, second = (ResultsStore(tmp_path, PERPLEXITY, HEAD) for _ in range(2))
    first.write(first.results() | {"cells": [CELL]})
    written = (tmp_path / PERPLEXITY.file).read_bytes()
    with pytest.raises(ValueError, match="another process has written to it meanwhile; run the same command again"):
        second.write(second.results())
    assert (tmp_path / PERPLEXITY.file).read_bytes() == written
    first.write(first.results())  # its own are no surprise
    ResultsStore(tmp_path, PERPLEXITY, HEAD).write(HEAD | {"cells": []})
