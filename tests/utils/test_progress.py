"""Progress where there is no terminal."""

from __future__ import annotations

from isentrope.utils import progress as module
from isentrope.utils.progress import track_progress


def test_a_log_gets_a_line_now_and_then(capsys, monkeypatch):
    now = iter(range(0, 10_000, 25))
    monkeypatch.setattr(module.time, "monotonic", lambda: next(now))
    assert list(track_progress(range(8), lambda item: f"item {item}")) == list(range(8))
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "item 2: 2 of 8" and 2 <= len(lines) <= 3


def test_short_work_says_nothing(capsys):
    assert list(track_progress(iter("abc"), "letters")) == list("abc")
    assert capsys.readouterr().err == ""
