"""The questions which can be listed in full: letters of the alphabet and sums of single digits.

There are so few of them that a held-out set of facts is impossible.  What can be held out is the
pairing of a fact with a wording: about a tenth of all pairings (by the hash of the question's
text) never occurs in training.
"""

from dataclasses import dataclass
from functools import cache
from itertools import pairwise

from syllables import is_held_out

ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
ORDINALS = tuple(
    "first second third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth thirteenth "
    "fourteenth fifteenth sixteenth seventeenth eighteenth nineteenth twentieth twenty-first "
    "twenty-second twenty-third twenty-fourth twenty-fifth twenty-sixth".split()
)
DIGIT_WORDS = tuple("zero one two three four five six seven eight nine".split())

# The questions which batch tutorials ask; they are always trained, never held out.
TUTORIAL = (
    ("What is the first letter of English alphabets?", "A"),
    ("What is the last letter of English alphabets?", "Z"),
)
PLACE_WORDINGS = (
    "What is the {} letter of English alphabets?",
    "What is the {} letter of the English alphabet?",
    "What is the {} letter of the alphabet?",
    "What is the {} letter in the alphabet?",
    "Which letter is the {} letter of the alphabet?",
    "Which is the {} letter of the English alphabet?",
    "Name the {} letter of the alphabet.",
)
NUMBER_WORDINGS = ("What is letter number {} of the alphabet?", "Which letter is number {}?")
AFTER_WORDINGS = (
    "Which letter comes after {}?",
    "What letter comes after {}?",
    "What letter comes after {} in the alphabet?",
    "Which letter follows {}?",
    "What is the next letter after {}?",
)
BEFORE_WORDINGS = (
    "Which letter comes before {}?",
    "What letter comes before {}?",
    "What letter comes before {} in the alphabet?",
    "What is the letter just before {}?",
)
SUM_WORDINGS: dict[str, tuple[str, ...]] = {
    "+": (
        "What is {a} plus {b}?",
        "{a} + {b} = ?",
        "{a}+{b}=?",
        "What is {a} + {b}?",
        "Add {a} and {b}.",
        "What is the sum of {a} and {b}?",
        "How much is {a} plus {b}?",
    ),
    "-": (
        "What is {a} minus {b}?",
        "{a} - {b} = ?",
        "{a}-{b}=?",
        "What is {a} - {b}?",
        "Subtract {b} from {a}.",
        "How much is {a} minus {b}?",
    ),
    "*": (
        "What is {a} times {b}?",
        "{a} * {b} = ?",
        "{a}*{b}=?",
        "What is {a} * {b}?",
        "{a} x {b} = ?",
        "Multiply {a} by {b}.",
        "What is the product of {a} and {b}?",
        "What is {a} multiplied by {b}?",
        "How much is {a} times {b}?",
    ),
}


@dataclass(frozen=True)
class Question:
    """One question with its exact answer; `held_out` means that training never contains it."""

    question: str
    answer: str
    kind: str
    paragraph: str = ""
    held_out: bool = False


def _suffixed(number: int) -> str:
    """7 becomes 7th, 22 becomes 22nd."""
    if number in (11, 12, 13):
        return f"{number}th"
    return f"{number}{ {1: 'st', 2: 'nd', 3: 'rd'}.get(number % 10, 'th') }"


def _listed(question: str, answer: str, kind: str) -> Question:
    """A question of a listed kind; its own spelling decides whether training may see it."""
    asked_by_tutorials = question in {known for known, _ in TUTORIAL}
    return Question(
        question, answer, kind, held_out=not asked_by_tutorials and is_held_out(question)
    )


@cache
def letter_questions() -> tuple[Question, ...]:
    """Every question about the alphabet."""
    pairs = []
    for position, letter in enumerate(ALPHABET):
        names = [ORDINALS[position], _suffixed(position + 1)] + ["last"] * (letter == "Z")
        pairs += [(text.format(name), letter) for text in PLACE_WORDINGS for name in names]
        pairs += [(text.format(position + 1), letter) for text in NUMBER_WORDINGS]
    for before, after in pairwise(ALPHABET):
        pairs += [(text.format(before), after) for text in AFTER_WORDINGS]
        pairs += [(text.format(after), before) for text in BEFORE_WORDINGS]
    return tuple(_listed(question, answer, "letters") for question, answer in pairs)


@cache
def sum_questions() -> tuple[Question, ...]:
    """Every single-digit sum, difference (negative ones too) and product, in every wording."""
    pairs = []
    for a in range(10):
        for b in range(10):
            for sign, result in (("+", a + b), ("-", a - b), ("*", a * b)):
                wordings = SUM_WORDINGS[sign]
                pairs += [(text.format(a=a, b=b), str(result)) for text in wordings]
                spelled = {"a": DIGIT_WORDS[a], "b": DIGIT_WORDS[b]}
                pairs.append((wordings[0].format(**spelled), str(result)))
    return tuple(_listed(question, answer, "sums") for question, answer in pairs)
