"""Trackers of a training run."""

from __future__ import annotations

import logging

import pytest

from isentrope.training.checkpoint import read_log
from isentrope.training.trainer import Interrupted, train
from tests.fixtures.training import TINY, stop_at, without

pytestmark = pytest.mark.usefixtures("on_one_thread")


def scalars(run):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "isentrope"))
    events.Reload()
    return {tag: {event.step: event.value for event in events.Scalars(tag)} for tag in events.Tags()["scalars"]}


def test_tensorboard_holds_the_losses(done):
    actual, rows = scalars(done), read_log(done / "log.jsonl")
    assert actual.keys() == {"epoch", "loss", "rate", "validation"}
    for tag, values in actual.items():
        assert values == pytest.approx({row["step"]: row[tag] for row in rows if tag in row}, rel=1e-6)


def test_trackers_that_are_unknown_or_missing(corpus, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="track: expected tensorboard or wandb, got 'tensorbord'"):
        train(corpus, TINY, tmp_path, ("tensorbord",))
    without(monkeypatch, "wandb")
    with pytest.raises(ValueError, match="track: expected wandb to be installed; pip install wandb"):
        train(corpus, TINY, tmp_path, ("tensorboard", "wandb"))


def test_no_tracker_is_needed(corpus, done, tmp_path):
    train(corpus, TINY, tmp_path, ())
    assert (tmp_path / "log.jsonl").read_text() == (done / "log.jsonl").read_text()
    assert not (tmp_path / "isentrope").exists()


def test_without_tensorboard_the_log_is_enough(corpus, tmp_path, monkeypatch, caplog):
    without(monkeypatch, "tensorboard")
    with caplog.at_level(logging.WARNING, "isentrope"):
        train(corpus, TINY, tmp_path)
    assert "tensorboard is not installed" in caplog.text and len(read_log(tmp_path / "log.jsonl")) == 6


@pytest.mark.parametrize("at", [5, 6])
def test_tensorboard_goes_on_with_the_curve(corpus, done, tmp_path, monkeypatch, at):
    """Logged or not, the step that a run goes on from."""
    with monkeypatch.context() as patch:
        stop_at(patch, at)
        with pytest.raises(Interrupted):
            train(corpus, TINY, tmp_path)
    (events,) = (tmp_path / "isentrope").iterdir()
    events.rename(events.with_name("events.out.tfevents.0"))  # the first of all, even if the second is still the same
    train(corpus, TINY, tmp_path)
    assert scalars(tmp_path) == scalars(done)
