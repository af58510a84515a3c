"""Claims decided over pre-trainings, seeds and documents: estimates by hand, coverage and error rates by simulation."""

import numpy as np
import pytest

from isentrope.evaluation import decisions
from isentrope.evaluation.decisions import Effect, correct_p_values, decide_claims, estimate_components, estimate_effect

DRAWS = 400


@pytest.fixture
def few_draws(monkeypatch):
    monkeypatch.setattr(decisions, "BOOTSTRAP_DRAWS", DRAWS)


def simulate(generator, mean=0.0, pretrainings=6, seeds=2, documents=20, spread=(0.1, 0.02, 0.05, 0.05)):
    """Differences with the standard deviations of pre-trainings, seeds, documents and the rest."""
    by_run, by_seed, by_document, rest = spread
    a = generator.normal(0, by_run, (pretrainings, 1, 1))
    b = generator.normal(0, by_seed, (pretrainings, seeds, 1))
    c = generator.normal(0, by_document, (1, 1, documents))
    return list(mean + a + b + c + generator.normal(0, rest, (pretrainings, seeds, documents)))


def make_effect(mean, error, freedom=7):
    return Effect(mean, error, freedom, freedom + 1, freedom + 1, 100, {})


def test_two_documents_by_hand():
    effect = estimate_effect([np.array([[0.1, 0.3]])])
    assert effect.mean == pytest.approx(0.2)
    assert effect.error == pytest.approx(0.1, rel=0.05)  # the standard deviation 0.1414 over √2
    assert (effect.freedom, effect.covers) == (1, ("documents",))


def test_pretrainings_that_agree_on_nothing_but_the_mean():
    effect = estimate_effect([np.full((1, 50), value) for value in (0.0, 0.1, 0.2, 0.3)])
    assert effect.error == pytest.approx(np.std([0, 0.1, 0.2, 0.3], ddof=1) / 2, rel=0.05)
    assert effect.components == pytest.approx({"pre-training": 0.1291, "document": 0, "rest": 0}, abs=1e-4)
    low, high = effect.interval()
    assert low == pytest.approx(0.15 - 3.1824 * effect.error, rel=1e-4)
    assert high > 0.3  # four pre-trainings leave a wide interval, where fifty documents alone would leave none
    assert effect.covers == ("pre-trainings", "seeds", "documents")


def test_components_are_those_simulated():
    generator = np.random.default_rng(0)
    components = estimate_components(simulate(generator, pretrainings=60, seeds=1, documents=60))
    assert components["pre-training"] == pytest.approx(np.hypot(0.1, 0.02), rel=0.3)
    assert components["document"] == pytest.approx(0.05, rel=0.3)
    assert components["rest"] == pytest.approx(0.05, rel=0.1)


@pytest.mark.parametrize(
    "spread",
    [(0.1, 0.02, 0.05, 0.05), (0.0, 0.05, 0.0, 0.05), (0.01, 0.0, 0.1, 0.05), (0.0, 0.0, 0.0, 0.1)],
    ids=["runs", "seeds", "documents", "rest"],
)
def test_intervals_cover_what_they_say(few_draws, spread):
    generator = np.random.default_rng(1)
    trials = 200
    inside = 0
    for _ in range(trials):
        low, high = estimate_effect(simulate(generator, 0.3, spread=spread)).interval()
        inside += low <= 0.3 <= high
    assert inside / trials >= 0.91  # 95 % less three standard errors of 200 trials


def test_documents_alone_would_cover_far_less(few_draws):
    """What the interval of a single pre-training leaves out: the reason for this module."""
    generator = np.random.default_rng(2)
    inside = 0
    for _ in range(100):
        low, high = estimate_effect([simulate(generator, 0.3)[0]]).interval()
        inside += low <= 0.3 <= high
    assert inside < 80


def test_no_family_of_true_nulls_errs_more_than_agreed(few_draws):
    generator = np.random.default_rng(3)
    wrong = 0
    for _ in range(100):
        effects = [estimate_effect(simulate(generator, documents=10)) for _ in range(5)]
        wrong += any(d.verdict != "undecided" for d in decide_claims(effects, [1e-6] * 5, [False] * 5))
    assert wrong <= 12  # 5 % and three standard errors


def test_verdicts():
    effects = [make_effect(0.1, 0.005), make_effect(-0.1, 0.005), make_effect(0.001, 0.001), make_effect(0.01, 0.02)]
    verdicts = [d.verdict for d in decide_claims(effects, [0.01] * 4, [False, False, True, True])]
    assert verdicts == ["superior", "inferior", "equivalent", "undecided"]


def test_a_small_difference_that_is_known_well_is_what_the_claim_says():
    small = make_effect(0.004, 0.0001)
    assert [d.verdict for d in decide_claims([small, small], [0.01] * 2, [False, True])] == ["superior", "equivalent"]


def test_no_error_at_all():
    exact = [make_effect(0.0, 0.0), make_effect(0.2, 0.0)]
    assert [d.verdict for d in decide_claims(exact, [0.01] * 2, [True, False])] == ["equivalent", "superior"]


def test_correction_by_hand():
    assert correct_p_values([0.04, 0.01, 0.03]) == pytest.approx([0.06, 0.03, 0.06])
    assert correct_p_values([0.9, 0.8]) == [1.0, 1.0]
    assert correct_p_values([]) == []
    assert correct_p_values([0.01, 0.03], 5) == pytest.approx([0.05, 0.12])


@pytest.mark.parametrize(
    ("differences", "message"),
    [
        ([], "array \\(seeds, documents\\)"),
        ([np.zeros((1, 3)), np.zeros((1, 4))], "same documents"),
        ([np.zeros((1, 1))], "two documents, seeds or pre-trainings"),
        ([np.array([[0.0, np.nan]])], "finite"),
    ],
)
def test_refused(differences, message):
    with pytest.raises(ValueError, match=message):
        estimate_effect(differences)
