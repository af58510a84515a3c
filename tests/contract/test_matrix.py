"""Every recipe on every backend against the dense fp64 reference: output, log-sum-exp, entropy, dq, dk, dv."""

from __future__ import annotations

import pytest

import isentrope as ise
from isentrope.backends import chunked, sdpa
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


def list_pairs(first, second, every):
    """Pairs for one test each: all for `-m slow` as (…, True), and one in `every` of each row otherwise."""
    turns = [(a, b, False) for i, a in enumerate(first) for j, b in enumerate(second) if (i + j // 2) % every == 0]
    return turns + [pytest.param(a, b, True, marks=pytest.mark.slow) for a in first for b in second]


@pytest.mark.parametrize(("position", "temperature", "whole"), list_pairs(POSITIONS, TEMPERATURES, 2))
def test_backends_agree_with_reference(position, temperature, whole, monkeypatch):
    """All masks × scores, and × causal by turns; for all pairs of position and temperature with `-m slow`.

    The setting moves on with every recipe, so that each part meets each. Backends take turns; with `-m slow` each
    recipe runs on each.
    """
    monkeypatch.setattr(chunked, "MAX_CHUNK_SCORES", {"cpu": 1 << 13})  # several chunks even at these sizes
    monkeypatch.setattr(sdpa, "MAX_MASK_ELEMENTS", 1 << 11)
    turn = POSITIONS.index(position) * 9 + TEMPERATURES.index(temperature) * 12
    even = POSITIONS.index(position) + TEMPERATURES.index(temperature)
    for mask in MASKS:
        for score in SCORES:
            for causal in CAUSAL:
                if meaningless(position, temperature, mask, score, causal):
                    continue
                odd = (even + MASKS.index(mask) + SCORES.index(score) + causal) % 2
                if odd and mask != "causal" and not whole:
                    continue
                turn += 1
                setting = SETTINGS[turn % len(SETTINGS)]
                recipe = build(position, temperature, mask, score, setting)
                reference = run(recipe, setting, causal, "reference")
                turns = [backend for backend in TURNS if takes(backend, recipe)]
                for backend in dict.fromkeys(turns) if whole else (turns[turn % len(turns)],):
                    check(recipe, setting, causal, backend, reference)
                if turn % 13 == 0:  # dense and slow there: a thirteenth of the matrix, every part among it
                    check(recipe, setting, causal, "flex", reference)


def check(recipe, setting, causal, backend, reference):
    ours = run(recipe, setting, causal, backend, gradients=backend != "flex")
    errors = zip(NAMES, map(difference, ours, reference), strict=backend != "flex")
    worst = {name: error for name, error in errors if not error < TOLERANCE}
    assert not worst, f"{recipe} causal={causal} {setting} on {backend}: {worst}"


@pytest.mark.parametrize(("position", "law", "whole"), list_pairs(FAR_POSITIONS, FAR_LAWS, 3))
def test_backends_agree_with_reference_on_near_and_far_keys(position, law, whole, monkeypatch):
    """Masks × causal, with scores, settings and backends by turns; all pairs of position and law with `-m slow`."""
    monkeypatch.setattr(chunked, "MAX_CHUNK_SCORES", {"cpu": 1 << 13})
    monkeypatch.setattr(sdpa, "MAX_MASK_ELEMENTS", 1 << 11)
    turn = FAR_POSITIONS.index(position) * 5 + FAR_LAWS.index(law) * 3
    for mask in MASKS:
        for causal in CAUSAL:
            if meaningless(position, law, mask, "", causal):
                continue
            turn += 1
            setting = SETTINGS[turn % len(SETTINGS)]
            recipe = build(position, law, mask, SCORES[turn // len(SETTINGS) % len(SCORES)], setting)
            reference = run(recipe, setting, causal, "reference")
            turns = [backend for backend in TURNS if takes(backend, recipe)]
            check(recipe, setting, causal, turns[turn % len(turns)], reference)


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
@pytest.mark.parametrize(
    ("position", "law"), [("rope", ONE_LAW), ("rerope:window=8", PAIR_AND_SHARE), ("alibi", ONE_LAW)]
)
def test_every_setting(position, law, setting):
    """Each setting with a one-branch, a several-branch and a biased method, on all backends."""
    for mask in MASKS:
        for causal in CAUSAL:
            if meaningless(position, "", mask, "", causal):
                continue
            recipe = build(position, law, mask, "", setting)
            reference = run(recipe, setting, causal, "reference")
            flex = ("flex",) if (MASKS.index(mask) + causal) % 2 else ()  # the slowest: every mask once
            for backend in (*CPU_BACKENDS, *flex):
                check(recipe, setting, causal, backend, reference)
