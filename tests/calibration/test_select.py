"""The law that held-out texts select."""

from __future__ import annotations

import numpy as np
import pytest

from isentrope.calibration.select import select_law

NOISE = np.array([0.01, -0.01, 0.02, -0.02, 0.005, -0.005])
DOCUMENTS = np.array([1.0, 2.0, 3.0, 1.5, 2.5, 2.0])  # differ more than laws do
KNOWN = {"none": 0.2, "infoscale": 0.0, "logn": 0.1}


def select(changes, texts=6):
    return select_law({name: (DOCUMENTS + change)[:texts] for name, change in (KNOWN | changes).items()})


@pytest.mark.parametrize(
    ("changes", "chosen", "reason"),
    [
        ({"scalar": -0.05 + NOISE, "layer": -0.055 - NOISE}, "scalar", "simplest that is not clearly worse"),
        ({"scalar": -0.05 + NOISE, "layer": -0.09 + NOISE}, "layer", "layer is the best"),
        ({"scalar": -0.05 + 0 * NOISE, "layer": -0.0505 + 0 * NOISE}, "scalar", "simplest"),  # sure, but too small
        ({"scalar": -0.004 + NOISE, "none": NOISE / 2 - 0.003}, "none", "no law is kept"),
        ({"scalar": -0.004 + NOISE, "none": 0.001 + NOISE}, "infoscale", "InfoScale is kept"),  # never worse than it
        ({"scalar": 0.05 + NOISE, "logn": -0.05 + NOISE / 2}, "logn", "LogN is kept"),
        ({}, "infoscale", "no law was fitted"),
        ({"closed": -0.1 + NOISE, "head": -0.102 - NOISE}, "closed", "the closed law is kept"),
        ({"closed": -0.1 + NOISE, "head": -0.2 - NOISE}, "head", "-0.1000 nats a token against the closed law"),
        ({"head": -0.2 + NOISE, "near": -0.2005 + NOISE}, "head", "head is the simplest"),
        ({"closed": NOISE, "given": -0.1 - NOISE, "scalar": -0.05 + NOISE}, "given", "the law given is kept"),
    ],
)
def test_the_simplest_law_wins_ties_and_none_is_worse_than_a_default(changes, chosen, reason):
    actual, why = select(changes)
    assert actual == chosen and reason in why


@pytest.mark.parametrize("texts", [1, 2, 5])
def test_few_texts_claim_no_interval(texts):
    gain = {"closed": -0.1 + 0 * NOISE, "scalar": -0.2 + NOISE, "layer": -0.2005 + NOISE, "head": -0.1995 + NOISE}
    chosen, why = select(gain, texts)
    assert chosen == "scalar"  # the others are no better, or by next to nothing
    assert f"{texts} held-out text" in why and "cannot carry a 95 % interval: 6 are needed, that is 11 documents" in why
    assert "scalar is better on every one, -0." in why and "clearly" not in why


def test_with_few_texts_a_law_that_is_worse_on_one_is_not_taken():
    worse_on_one = -0.2 + 0.25 * (np.arange(6) == 1)
    chosen, why = select({"closed": -0.1, "scalar": worse_on_one, "none": -0.3}, texts=3)
    assert chosen == "closed" and "no fitted law is better than the closed law on every one: it is kept" in why
    assert select({"scalar": worse_on_one}, texts=3)[0] == "infoscale"


def test_with_few_texts_the_closed_law_gives_way_to_infoscale_that_is_better_on_every_one():
    chosen, why = select({"closed": 0.1}, texts=3)
    assert chosen == "infoscale" and "no fitted law is better than InfoScale on every one: it is kept" in why
    assert select({"closed": 0.1 - 0.2 * (np.arange(6) == 1)}, texts=3)[0] == "closed"
