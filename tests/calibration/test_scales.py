"""The search for DPE's scales, on scores that are known."""

import math

import pytest

import isentrope as ise
from isentrope.calibration.scales import search_scales
from tests.fixtures.errors import refused


def known_score(best):
    """Highest where every group has its best scale; each group counts by itself."""

    def score(text):
        scales = ise.Recipe.parse(text).position.scales
        return -sum(abs(math.log2(scale / b)) for scale, b in zip(scales, best, strict=True))

    return score


def test_each_group_finds_its_own():
    # twice an extension of 8: starts at 16, and tries 1, 4, 8, 16, 32, 64, 256
    best = (4, 1, 16, 32, 256, 8, 64, 16)
    search = search_scales(known_score(best), 128, 8192, 1024)
    assert search.position == ise.DPE(128, best)
    assert len(search.scores) == 1 + 8 * 6
    assert (16,) * 8 in search.scores
    changed = [sum(scale != 16 for scale in scales) for scales in search.scores]
    assert sorted(set(changed)) == [0, 1]


def test_equal_scores_stay_near_the_start():
    assert search_scales(lambda text: 0.5, 8, 256, 64, groups=3).position.scales == (8, 8, 8)


def test_the_recipe_that_is_scored():
    texts = []

    def score(text):
        texts.append(text)
        return len(texts)

    search_scales(score, 16, 100, 100, groups=2, rest="infoscale:train_length=100+share", multiples=(1, 3))
    assert texts[0] == "dpe:window=16,scales=(2,2,)+infoscale:train_length=100+share"
    assert [ise.Recipe.parse(text).position.scales for text in texts] == [(2, 2), (6, 2), (2, 6)]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"length": 0}, ["search_scales(length=…)", "positive", "0"]),
        ({"groups": 0}, ["search_scales(groups=…)", "positive"]),
        ({"multiples": ()}, ["search_scales(multiples=…)", "positive"]),
        ({"score": lambda text: math.nan}, ["search_scales(score=…)", "dpe:window=8", "nan"]),
    ],
)
def test_bad_arguments(options, words):
    arguments = {"score": lambda text: 1.0, "window": 8, "length": 256, "train_length": 64} | options
    refused(lambda: search_scales(**arguments), *words)
