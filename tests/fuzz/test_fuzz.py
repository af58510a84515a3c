"""The short form of the fuzzers: what minutes of them check, on a few hundred cases."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.fuzz import attention, recipes


@pytest.mark.parametrize("seed", range(2))
def test_mutated_recipes_are_refused_or_right(seed):
    counts = Counter(recipes.check(mutant) for mutant in recipes.mutants(seed, 100))
    assert counts["refused"] > 50 and counts["right"] > 3


def test_mutants_are_the_same_for_the_same_seed():
    first, again = ([recipes.shown(mutant) for mutant in recipes.mutants(5, 20)] for _ in range(2))
    assert first == again


@pytest.mark.parametrize("first", range(0, 60, 20))
def test_random_attention_is_right_on_every_backend(first):
    counts: Counter[str] = Counter()
    for seed in range(first, first + 20):
        counts.update(attention.check(attention.case(seed)))
    assert counts["right"] > 40


def test_a_wrong_backend_is_noticed(monkeypatch):
    drawn = next(c for c in map(attention.case, range(100)) if c.gradients and not attention.check(c)["refused"])
    right = attention.run

    def wrong(*given, **options):
        results = right(*given, **options)
        return results if given[3] != "sdpa" else [*results[:-1], results[-1] * 1.5]

    monkeypatch.setattr(attention, "run", wrong)
    with pytest.raises(AssertionError, match=f"'seed': {drawn.seed},.*sdpa"):
        attention.check(drawn)
