"""A corpus small enough to train on in seconds, and a machine that always computes the same."""

from __future__ import annotations

import json
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from accelerate.state import AcceleratorState
from isentrope.study.prepare import Options, prepare

from isentrope.data.source import Source

LETTERS = "abcdefghijklmnop"


def make_corpus(folder, letters=LETTERS):
    """Sixty documents whose letters grow rarer along the alphabet: half of them are a, a quarter b, and so on."""
    shares = 0.5 ** np.arange(1.0, 17)
    rows = []
    for i in range(60):
        drawn = np.random.default_rng(i).choice(list(letters[:16]), 300, p=shares / shares.sum())
        rows.append(json.dumps({"id": f"d{i}", "text": "".join(drawn)}))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "texts.jsonl").write_text("\n".join(rows))
    return prepare(Source(str(folder / "texts.jsonl")), folder / "corpus", Options(longer_than=200, test=4)).parent


@contextmanager
def one_cpu_thread():
    """Threads change the order of sums; a GPU, or what other tests told accelerate, would change more."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    AcceleratorState._reset_state(reset_partial_state=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ACCELERATE_USE_CPU", "true")
        yield
    AcceleratorState._reset_state(reset_partial_state=True)
    torch.set_num_threads(threads)
