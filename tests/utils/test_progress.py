"""Progress where there is no terminal."""

from __future__ import annotations

from isentrope.utils import progress as module
from isentrope.utils.progress import ProgressBar, track_progress


def test_a_log_gets_a_line_now_and_then(capsys, monkeypatch):
    now = iter(range(0, 10_000, 25))
    monkeypatch.setattr(module.time, "monotonic", lambda: next(now))
    assert list(track_progress(range(8), lambda item: f"item {item}")) == list(range(8))
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "item 2: 2 of 8" and 2 <= len(lines) <= 3


def test_short_work_says_nothing(capsys):
    assert list(track_progress(iter("abc"), "letters")) == list("abc")
    assert capsys.readouterr().err == ""


def test_metrics_and_speed(capsys, monkeypatch):
    now = iter(range(0, 10_000, 5))
    monkeypatch.setattr(module.time, "monotonic", lambda: next(now))
    with ProgressBar(40, completed=10, label="training", line_interval=15.0) as bar:
        bar.update(20)
        bar.report(20, {"loss": 1.5})
        bar.report(30, {"loss": 1.25, "validation": 2.0}, always=True)
    line = "step 30/40  loss 1.2500  validation 2.0000  1.3 steps/s"
    assert capsys.readouterr().err.splitlines() == [line]


def test_disabled_progress_says_nothing(capsys):
    with ProgressBar(2, enabled=False) as bar:
        bar.report(1, {"loss": 1.0}, always=True)
    assert capsys.readouterr().err == ""


def test_weights_are_the_units_of_a_bar(monkeypatch):
    seen = []
    monkeypatch.setattr(ProgressBar, "update", lambda bar, done, label=None: seen.append((bar.total, done)))
    assert list(track_progress([3, 5], "n", weights=[3, 5])) == [3, 5]
    assert seen == [(8, 0), (8, 3), (8, 3), (8, 8)]
