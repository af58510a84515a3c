"""Every recipe on every backend against the dense fp64 reference: output, log-sum-exp, entropy, dq, dk, dv."""

from __future__ import annotations

from collections import Counter
from itertools import product
from typing import NamedTuple

import pytest

import isentrope as ise
from isentrope.backends import additive_masks, chunked
from isentrope.dispatch import BACKENDS
from isentrope.recipe import KINDS
from tests.contract.matrix import (
    CAUSAL,
    CPU_BACKENDS,
    FAR_LAWS,
    FAR_POSITIONS,
    MASKS,
    NAMES,
    NOT_ON_CPU,
    POSITIONS,
    RETRIEVES,
    SCORES,
    SETTINGS,
    SHARES,
    TEMPERATURES,
    TOLERANCE,
    Setting,
    build,
    difference,
    meaningless,
    run,
    takes,
)

ONE_LAW = "infoscale:train_length=16"
PAIR_AND_SHARE = "infoscale:train_length=16,keys=near+logn:train_length=16,keys=far+share:beta={table},reference=5"
TURNS = (*CPU_BACKENDS, "sdpa", "chunked")  # twice as often: those that large calls run on


@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_every_backend_is_compared(backend):
    """One that cannot be is listed in `NOT_ON_CPU` of tests/contract/matrix.py, with the file that compares it."""
    assert NOT_ON_CPU.keys() <= BACKENDS.keys(), "NOT_ON_CPU in tests/contract/matrix.py names a backend that is gone"
    try:
        run(ise.Recipe(), SETTINGS[0], False, backend)
    except (ValueError, RuntimeError, NotImplementedError) as error:
        pytest.fail(f"compare {backend!r} elsewhere, and list it in NOT_ON_CPU of tests/contract/matrix.py: {error}")


@pytest.mark.parametrize(
    ("kind", "texts"),
    [("position", POSITIONS), ("temperature", TEMPERATURES), ("share", SHARES), ("retrieve", RETRIEVES)],
)
def test_every_method_is_in_the_matrix(kind, texts):
    missing = {part.name() for part in KINDS[kind]} - {text.partition(":")[0] for text in texts}
    assert not missing, f"add {missing} to {kind.upper()}S of tests/contract/matrix.py"


class Case(NamedTuple):
    """One comparison with the reference."""

    mask: str
    score: str
    causal: bool
    setting: Setting
    backends: tuple[str, ...]


def list_calls(scores=SCORES):
    """Masks × scores × causal; `None` for a score that is left to the turn."""
    calls = product(MASKS, scores, CAUSAL)
    return [call for call in calls if not meaningless("", "", call[0], call[1] or "", call[2])]


def list_turns(first, second, calls, every, shares):
    """Cases of every pair of parts that has its turn: one pair in `every` of each row, with one call in `shares`.

    The calls of a pair are those that the pairs beside it leave out, so that each part meets each call. Scores left to
    the turn, settings and backends are those that both parts have met least.
    """
    turns, met = {}, Counter()
    for (i, a), (j, b) in product(enumerate(first), enumerate(second)):
        if (i + j // 2) % every:
            continue

        def choose(options, a=a, b=b):
            least = min(options, key=lambda option: met[0, a, option] + met[1, b, option])
            met.update([(0, a, least), (1, b, least)])
            return least

        rank, cases = j % 2 + j // (2 * every) * 2 + i // every, []
        for mask, score, causal in calls[-rank % shares :: shares]:
            score, setting = choose(SCORES) if score is None else score, choose(SETTINGS)
            # flex is dense and slow on a CPU: once for each part, here, and with each setting and mask below
            backends = (choose(TURNS),)
            if not met[0, a, "flex"] or not met[1, b, "flex"]:
                backends += (choose(("flex",)),)
            cases.append(Case(mask, score, causal, setting, backends))
        turns[a, b] = cases
    return turns


def list_whole(first, second, calls):
    """Every pair with every call on every backend; settings move on."""
    whole, turn = {}, 0
    for a, b in product(first, second):
        cases = []
        for mask, score, causal in calls:
            turn += 1
            backends = (*CPU_BACKENDS, "flex") if turn % 13 == 0 else CPU_BACKENDS
            score = SCORES[turn // len(SETTINGS) % len(SCORES)] if score is None else score
            cases.append(Case(mask, score, causal, SETTINGS[turn % len(SETTINGS)], backends))
        whole[a, b] = cases
    return whole


CALLS, ANY_SCORE = list_calls(), list_calls((None,))
PAIRS = list_turns(POSITIONS, TEMPERATURES, ANY_SCORE, 4, 4)
FAR_PAIRS = list_turns(FAR_POSITIONS, FAR_LAWS, ANY_SCORE, 3, 4)


def in_turn(pairs, first, second, calls):
    """One test for each pair: in turns, and whole with `-m slow`."""
    whole = list_whole(first, second, calls).items()
    return [pytest.param(*pair, cases, id="-".join(pair)) for pair, cases in pairs.items()] + [
        pytest.param(*pair, cases, marks=pytest.mark.slow, id="-".join((*pair, "whole"))) for pair, cases in whole
    ]


@pytest.mark.parametrize(
    ("pairs", "place"), [(PAIRS, 0), (PAIRS, 1), (FAR_PAIRS, 0), (FAR_PAIRS, 1)],
    ids=["positions", "temperatures", "far positions", "far laws"],
)  # fmt: skip
def test_every_part_meets_every_call_score_setting_and_backend(pairs, place):
    for part in {pair[place] for pair in pairs}:
        cases = [case for pair, cases in pairs.items() if pair[place] == part for case in cases]
        assert {(case.mask, None, case.causal) for case in cases} == set(ANY_SCORE), part
        assert {case.score for case in cases} == set(SCORES), part
        assert {case.setting for case in cases} == set(SETTINGS), part
        assert {backend for case in cases for backend in case.backends} >= {*CPU_BACKENDS, "flex"}, part


@pytest.fixture
def _several_chunks(monkeypatch):
    """Even at these sizes."""
    monkeypatch.setattr(chunked, "MAX_CHUNK_SCORES", {"cpu": 1 << 13})
    monkeypatch.setattr(additive_masks, "MAX_MASK_ELEMENTS", 1 << 11)


@pytest.mark.usefixtures("_several_chunks")
@pytest.mark.parametrize(("position", "temperature", "cases"), in_turn(PAIRS, POSITIONS, TEMPERATURES, CALLS))
def test_backends_agree_with_reference(position, temperature, cases):
    compare(position, temperature, cases)


@pytest.mark.usefixtures("_several_chunks")
@pytest.mark.parametrize(("position", "law", "cases"), in_turn(FAR_PAIRS, FAR_POSITIONS, FAR_LAWS, ANY_SCORE))
def test_backends_agree_with_reference_on_near_and_far_keys(position, law, cases):
    compare(position, law, cases)


def compare(position, temperature, cases):
    for mask, score, causal, setting, backends in cases:
        recipe = build(position, temperature, mask, score, setting)
        reference = run(recipe, setting, causal, "reference")
        for backend in backends:
            if takes(backend, recipe):
                check(recipe, setting, causal, backend, reference)


def check(recipe, setting, causal, backend, reference):
    ours = run(recipe, setting, causal, backend, gradients=backend != "flex")
    errors = zip(NAMES, map(difference, ours, reference), strict=backend != "flex")
    worst = {name: error for name, error in errors if not error < TOLERANCE}
    assert not worst, f"{recipe} causal={causal} {setting} on {backend}: {worst}"


METHODS = [("rope", ONE_LAW), ("rerope:window=8", PAIR_AND_SHARE), ("alibi", ONE_LAW)]


@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("setting", SETTINGS, ids=str)
@pytest.mark.parametrize(("position", "law"), METHODS)
def test_every_setting(position, law, setting, whole):
    """Each setting with a one-branch, a several-branch and a biased method, on each backend; calls in turns."""
    first = turn = SETTINGS.index(setting)
    for mask, _, causal in ANY_SCORE if whole else ANY_SCORE[turn % 2 :: 2]:
        turn += 1
        backends = (*CPU_BACKENDS, "flex") if whole else (CPU_BACKENDS[turn % len(CPU_BACKENDS)],)
        compare(position, law, [Case(mask, "", causal, setting, backends)])
    if not whole and first % len(METHODS) == METHODS.index((position, law)):
        compare(position, law, [Case(MASKS[first % len(MASKS)], "", True, setting, ("flex",))])
