"""What a paragraph can say about somebody or something, and how one may ask for it.

`{s}` is the subject, `{v}` the value, `{n}` a noun which the statement and the question share.
Values of the kinds in `common_words.CLOSED` come from short lists, so the held-out set shares them
with training; all other values are invented words or numbers (see `syllables`).
"""

from dataclasses import dataclass

from common_words import BEASTS, PARTS, WARES


@dataclass(frozen=True)
class Relation:
    """One thing that can be said about a kind of subject, with every wording of it."""

    subject: str
    value: str
    states: tuple[str, ...]
    asks: tuple[str, ...]
    whose: tuple[str, ...] = ()
    nouns: tuple[str, ...] = ("",)


RELATIONS: tuple[Relation, ...] = (
    Relation(
        "person",
        "word",
        ("lives in {v}",),
        ("Where does {s} live?", "In which town does {s} live?", "Which town does {s} live in?"),
        ("Who lives in {v}?",),
    ),
    Relation(
        "person",
        "word",
        ("was born in {v}",),
        ("Where was {s} born?", "In which town was {s} born?"),
        ("Who was born in {v}?",),
    ),
    Relation(
        "person",
        "number",
        ("keeps {v} {n}", "owns {v} {n}", "has {v} {n}"),
        (
            "How many {n} does {s} have?",
            "How many {n} does {s} keep?",
            "How many {n} does {s} own?",
        ),
        ("Who keeps {v} {n}?", "Who has {v} {n}?"),
        BEASTS,
    ),
    Relation(
        "person",
        "number",
        ("paid {v} coins for a {n}",),
        ("How many coins did {s} pay for the {n}?", "How much did {s} pay for the {n}?"),
        ("Who paid {v} coins for a {n}?",),
        WARES,
    ),
    Relation(
        "person",
        "age",
        ("is {v} years old",),
        ("How old is {s}?", "What is the age of {s}?"),
        ("Who is {v} years old?",),
    ),
    Relation(
        "person",
        "number",
        ("stays in room {v}",),
        ("In which room does {s} stay?", "What is the room number of {s}?"),
        ("Who stays in room {v}?",),
    ),
    Relation(
        "person",
        "trade",
        ("works as a {v}", "is a {v}"),
        ("What does {s} work as?", "What is the job of {s}?", "What is {s}'s job?"),
        ("Who works as a {v}?", "Who is a {v}?"),
    ),
    Relation(
        "person",
        "colour",
        ("wears a {v} coat",),
        (
            "What colour is the coat of {s}?",
            "What colour is {s}'s coat?",
            "What color is {s}'s coat?",
        ),
        ("Who wears a {v} coat?",),
    ),
    Relation(
        "person",
        "goods",
        ("sells {v}", "trades in {v}"),
        ("What does {s} sell?", "What does {s} trade in?"),
        ("Who sells {v}?",),
    ),
    Relation(
        "person",
        "person",
        ("was taught by {v}",),
        ("Who taught {s}?", "Who was the teacher of {s}?", "Who was {s} taught by?"),
        ("Whom did {v} teach?", "Who was taught by {v}?"),
    ),
    Relation(
        "person",
        "person",
        ("is married to {v}",),
        ("Who is {s} married to?", "To whom is {s} married?"),
        ("Who is married to {v}?",),
    ),
    Relation(
        "person",
        "word",
        ("sails a ship called {v}", "owns a ship named {v}"),
        (
            "What is the name of {s}'s ship?",
            "What is {s}'s ship called?",
            "What is the ship of {s} called?",
        ),
        ("Who owns the ship {v}?",),
    ),
    Relation(
        "town",
        "word",
        ("lies on the river {v}",),
        ("On which river does {s} lie?", "Which river does {s} lie on?"),
        ("Which town lies on the river {v}?",),
    ),
    Relation(
        "town",
        "year",
        ("was founded in {v}",),
        ("When was {s} founded?", "In which year was {s} founded?"),
        ("Which town was founded in {v}?",),
    ),
    Relation(
        "town",
        "number",
        ("has {v} {n}",),
        ("How many {n} does {s} have?", "How many {n} are there in {s}?"),
        ("Which town has {v} {n}?",),
        PARTS,
    ),
    Relation(
        "town",
        "person",
        ("is ruled by {v}",),
        ("Who rules {s}?", "Who is the ruler of {s}?"),
        ("Which town is ruled by {v}?",),
    ),
    Relation(
        "town",
        "goods",
        ("is known for its {v}",),
        ("What is {s} known for?",),
        ("Which town is known for its {v}?",),
    ),
    Relation(
        "engine",
        "number",
        ("weighs {v} kilograms",),
        ("How much does {s} weigh?", "How many kilograms does {s} weigh?"),
        ("Which engine weighs {v} kilograms?",),
    ),
    Relation(
        "engine",
        "year",
        ("was built in {v}",),
        ("When was {s} built?", "In which year was {s} built?"),
        ("Which engine was built in {v}?",),
    ),
    Relation(
        "engine",
        "person",
        ("was designed by {v}",),
        ("Who designed {s}?", "Who was the designer of {s}?"),
        ("Which engine was designed by {v}?",),
    ),
    Relation(
        "engine",
        "word",
        ("stands in {v}",),
        ("Where does {s} stand?", "In which town does {s} stand?"),
        ("Which engine stands in {v}?",),
    ),
    Relation(
        "engine",
        "colour",
        ("is painted {v}",),
        ("What colour is {s}?", "What color is {s}?"),
        ("Which engine is painted {v}?",),
    ),
)
