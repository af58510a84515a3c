"""Facts scattered in a text, as in bAbI (Weston et al., 2015) and BABILong (Kuratov et al., 2024): who went where.

Sentences and words are our own. The answer follows from one fact (where somebody is: the last place they went to), or
from two (where a thing is: the last place of whoever took it). A guess is right once in `PLACES`.
"""

from __future__ import annotations

from isentrope.data.tasks.draw import Draw, pick, shuffle, spread_depths
from isentrope.data.tasks.example import ExampleDraft
from isentrope.data.tasks.vocabulary import OBJECTS, PEOPLE, PLACES

FACT_PEOPLE = 4  # who move about in one example
MOVES_EACH = 2  # of every person, so that an earlier place is there to be confused with the last
MOVES = ("went to the", "walked to the", "moved to the", "came to the")
INTRO = "The text below tells where people go and what they take along. Only the latest place of each counts."


def draft_one_fact(draw: Draw) -> ExampleDraft:
    """Ask where a person is: the place of their last move, one supporting fact."""
    people = _draw_people(draw)
    moves = _draw_moves(draw, people)
    person = pick(draw.random, people)
    place = next(place for who, place in reversed(moves) if who == person)
    facts = [_write_move(draw, who, where) for who, where in moves]
    return _draft(draw, facts, f"Where is {person} now?", f"{person} is in the", place)


def draft_two_facts(draw: Draw) -> ExampleDraft:
    """Ask where a thing is: who took it, and the place of their last move, two supporting facts."""
    people = _draw_people(draw)
    things = shuffle(draw.random, OBJECTS)[:FACT_PEOPLE]
    moves = _draw_moves(draw, people)
    owner = int(draw.random.random() * FACT_PEOPLE)
    person, thing = people[owner], things[owner]
    place = next(place for who, place in reversed(moves) if who == person)
    facts = list[str]()
    for i, (who, where) in enumerate(moves):
        facts.append(_write_move(draw, who, where))
        # everybody takes a thing after their first move and carries it to the next place
        if who not in (earlier for earlier, _ in moves[:i]):
            facts.append(f"{who} took the {things[people.index(who)]} along from then on.")
    return _draft(draw, facts, f"Where is the {thing} now?", f"The {thing} is now in the", place)


def _draw_people(draw: Draw) -> list[str]:
    """Draw people whom the text does not name."""
    strangers = [name for name in PEOPLE if name not in draw.haystack.text]
    if len(strangers) < FACT_PEOPLE:
        raise ValueError(f"filler: names too many of {', '.join(PEOPLE)}; use another text")
    return shuffle(draw.random, strangers)[:FACT_PEOPLE]


def _draw_moves(draw: Draw, people: list[str]) -> list[tuple[str, str]]:
    """Draw who goes where, in order; nobody goes twice in a row to the same place."""
    moves = list[tuple[str, str]]()
    last: dict[str, str] = {}
    for _ in range(MOVES_EACH):
        for person in shuffle(draw.random, people):
            last[person] = pick(draw.random, [place for place in PLACES if place != last.get(person)])
            moves.append((person, last[person]))
    return moves


def _write_move(draw: Draw, person: str, place: str) -> str:
    return f"{person} {pick(draw.random, MOVES)} {place}."


def _draft(draw: Draw, facts: list[str], question: str, lead: str, place: str) -> ExampleDraft:
    needles = list(zip(spread_depths(draw.random, len(facts)), facts, strict=True))
    others = tuple(other for other in PLACES if other != place)
    return ExampleDraft(INTRO, question, lead, (place,), others, draw.hide(needles, False))
