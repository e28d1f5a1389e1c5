"""Seeded generator of the questions the tiny model learns and is measured on.

Three kinds: letters of the alphabet and sums of single digits can be listed in full, reading
questions are drawn at random and ask about a paragraph of invented facts.  Pure standard library,
so that tests and the demonstration file can use it without the training dependencies (put this
folder on `sys.path`, then `import questions`).
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass

from common_words import CLOSED
from listed import Question, letter_questions, sum_questions
from relations import RELATIONS, Relation
from syllables import invent_number, invent_person, invent_word

__all__ = ["Question", "held_out_reading", "letter_questions", "reading_questions", "sum_questions"]

NUMBER_RANGES = {"number": (2, 999), "age": (5, 99), "year": (1000, 1999)}


@dataclass(frozen=True)
class Subject:
    """Somebody or something a paragraph is about, and the ways to refer to it."""

    kind: str
    name: str
    mention: str
    pronoun: str


@dataclass(frozen=True)
class Fact:
    """One relation with its subject, its value and the noun it shares with the question."""

    subject: Subject
    relation: Relation
    value: str
    noun: str


def _subject(rng: random.Random, held_out: bool) -> Subject:
    """A new person, town or engine; people come up most often."""
    kind = rng.choice(("person", "person", "person", "town", "engine"))
    if kind == "person":
        name = invent_person(rng, held_out)
        return Subject(kind, name, name, rng.choice(("She", "He")))
    name = invent_word(rng, held_out)
    return Subject(kind, name, f"the {name} engine" if kind == "engine" else name, "It")


def _value(rng: random.Random, kind: str, held_out: bool) -> str:
    """A value of that kind, from the asked side of the split where the kind is open."""
    if kind in CLOSED:
        return rng.choice(CLOSED[kind])
    if kind == "person":
        return invent_person(rng, held_out)
    if kind == "word":
        return invent_word(rng, held_out)
    return invent_number(rng, held_out, *NUMBER_RANGES[kind])


def _facts(rng: random.Random, held_out: bool, count: int) -> list[Fact]:
    """Distinct facts with distinct values, those about one subject standing together."""
    # Towns and engines have five relations, so nothing may be asked to carry more facts than that.
    subjects = [_subject(rng, held_out) for _ in range(rng.randint((count + 3) // 4, count))]
    slots = [index for index in range(len(subjects)) for _ in range(4)]
    chosen = sorted(rng.sample(slots, count))
    facts: list[Fact] = []
    while len(facts) < count:
        subject = subjects[chosen[len(facts)]]
        relation = rng.choice([known for known in RELATIONS if known.subject == subject.kind])
        fact = Fact(
            subject, relation, _value(rng, relation.value, held_out), rng.choice(relation.nouns)
        )
        clash = any(
            fact.value == other.value or (other.subject, other.relation) == (subject, relation)
            for other in facts
        )
        if not clash:
            facts.append(fact)
    return facts


def _tell(rng: random.Random, facts: list[Fact]) -> str:
    """The facts as running text; a repeated subject may become "and" or a pronoun."""
    text, previous, joined = "", None, False
    for fact in facts:
        said = rng.choice(fact.relation.states).format(v=fact.value, n=fact.noun)
        link = rng.random() if fact.subject is previous else 1.0
        if link < 0.4 and not joined:
            text += f" and {said}"
            joined = True
        else:
            opening = fact.subject.pronoun if link < 0.7 else fact.subject.mention
            text += f"{'. ' if text else ''}{opening[0].upper()}{opening[1:]} {said}"
            joined = False
        previous = fact.subject
    return text + "."


def _ask(rng: random.Random, fact: Fact) -> tuple[str, str, str]:
    """A question on one fact: for its value, or the other way round for its subject."""
    if rng.random() < 0.25:
        question = rng.choice(fact.relation.whose).format(v=fact.value, n=fact.noun)
        return question, fact.subject.name, "reading-name"
    mention = fact.subject.mention
    if fact.subject.kind == "person" and rng.random() < 0.15:
        mention = mention.split()[0]
    question = rng.choice(fact.relation.asks).format(s=mention, n=fact.noun)
    if fact.relation.value in CLOSED:
        return question, fact.value, "reading-word"
    numeric = fact.value.isdigit()
    return question, fact.value, "reading-number" if numeric else "reading-name"


def reading_questions(
    rng: random.Random, held_out: bool, facts: int | None = None, most: int = 1
) -> list[Question]:
    """Up to `most` questions about one new paragraph of 1 to 6 facts."""
    known = _facts(rng, held_out, facts or rng.randint(1, 6))
    paragraph = _tell(rng, known)
    asked = rng.sample(known, min(most, len(known)))
    return [
        Question(question, answer, kind, paragraph, held_out)
        for question, answer, kind in (_ask(rng, fact) for fact in asked)
    ]


def held_out_reading(seed: int, count: int) -> Iterator[Question]:
    """That many reading questions, each about its own held-out paragraph of 1 to 5 facts."""
    rng = random.Random(f"held-out-{seed}")
    for _ in range(count):
        yield from reading_questions(rng, True, facts=rng.randint(1, 5))
