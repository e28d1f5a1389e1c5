"""Invented words and numbers, split for good between training and the held-out set.

The split must not depend on a seed, on the order of calls or on the Python version: a word belongs
to the held-out tenth if the SHA-256 of its spelling says so.  Training draws only from the other
nine tenths, so a held-out paragraph has names and values which no training text ever contained.
"""

import hashlib
import random

HELD_OUT_ONE_IN = 10

ONSETS = tuple("b br c d dr f fl g gr h j k kl l m n p pr qu r s sh st t th tr v w y z".split())
VOWELS = tuple("a a e e i i o o u ae ei ou".split())
INNER_CODAS = ("", "", "", "", "n", "r", "l", "s")
CODAS = ("", "", "", "n", "r", "l", "k", "s", "th", "nd", "x", "m", "v", "th", "sk")
# Letters for words that follow no syllable rule: copying must not depend on familiar pieces.
LETTERS = "aabcdeeefghiijklmnoopqrrssttuvwxyz"
ODD_SPELLINGS = 0.1


def is_held_out(text: str) -> bool:
    """Whether this spelling belongs to the held-out tenth; single characters never do."""
    if len(text) < 2:
        return False
    digest = hashlib.sha256(text.encode()).digest()
    return int.from_bytes(digest[:4], "big") % HELD_OUT_ONE_IN == 0


def _spell(rng: random.Random, shortest: int, longest: int) -> str:
    """One capitalised word of so many syllables, or now and then a string of odd letters."""
    if rng.random() < ODD_SPELLINGS:
        return "".join(rng.choice(LETTERS) for _ in range(rng.randint(3, 7))).capitalize()
    count = rng.randint(shortest, longest)
    pieces = []
    for index in range(count):
        coda = rng.choice(CODAS if index == count - 1 else INNER_CODAS)
        pieces.append(rng.choice(ONSETS) + rng.choice(VOWELS) + coda)
    return "".join(pieces).capitalize()


def invent_word(rng: random.Random, held_out: bool, shortest: int = 2, longest: int = 3) -> str:
    """A word from the asked side of the split."""
    while True:
        word = _spell(rng, shortest, longest)
        if is_held_out(word) == held_out:
            return word


def invent_person(rng: random.Random, held_out: bool) -> str:
    """First name and family name, each from the asked side of the split."""
    return f"{invent_word(rng, held_out)} {invent_word(rng, held_out, 1, 2)}"


def invent_number(rng: random.Random, held_out: bool, lowest: int, highest: int) -> str:
    """A number from the asked side of the split, short ones as likely as long ones."""
    while True:
        top = min(highest, 10 ** rng.randint(len(str(lowest)), len(str(highest))) - 1)
        number = str(rng.randint(lowest, top))
        if is_held_out(number) == held_out:
            return number
