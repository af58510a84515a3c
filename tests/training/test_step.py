"""Batches made ahead of the step that takes them."""

from __future__ import annotations

import threading

import pytest
import torch

from isentrope.training.step import prefetch

pytestmark = pytest.mark.usefixtures("on_one_thread")


def test_batches_come_in_order_and_errors_where_they_belong():
    with prefetch(lambda step: {"step": step}, 3, 50, pin=False) as batches:
        assert [batch["step"] for batch in batches] == list(range(3, 50))
    with prefetch(lambda step: {"step": step}, 5, 5, pin=False) as batches:
        assert list(batches) == []

    def failing(step):
        if step == 4:
            raise ValueError("no such batch")
        return {"step": step}

    with prefetch(failing, 0, 9, pin=False) as batches:
        assert [next(batches)["step"] for _ in range(4)] == [0, 1, 2, 3]
        with pytest.raises(ValueError, match="no such batch"):
            next(batches)


def test_batches_are_not_made_far_ahead():
    made = []
    with prefetch(lambda step: made.append(step) or {}, 0, 10_000, pin=False, depth=2) as batches:
        for _ in range(5):
            next(batches)
    assert 5 <= len(made) <= 12


@pytest.mark.parametrize("asked_for", [0, 1, 5])
def test_no_thread_outlives_its_batches(asked_for):
    """One inside torch when the interpreter ends takes the process down with it: SIGABRT instead of a code."""
    before = threading.active_count()
    with prefetch(lambda step: {"x": torch.rand(1000).sort()[0]}, 0, 10_000, pin=False) as batches:
        for _ in range(asked_for):
            next(batches)
    assert threading.active_count() == before
