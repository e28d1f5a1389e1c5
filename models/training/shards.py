"""Training batches, drawn and tokenised by worker processes while the model learns.

A shard is one training step: listed questions in short rows, reading questions in long ones, so
that two fixed shapes go through the model and little of either is padding.  Its number seeds it;
the same run therefore sees the same texts whatever the number of workers.
"""

import multiprocessing
import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from prompt_forms import Piece, chat_pieces, completion_pieces
from questions import Question, letter_questions, reading_questions, sum_questions
from tokenizers import Tokenizer

Block = tuple[NDArray[np.int16], NDArray[np.uint8]]
SHORT, LONG = 80, 256


@dataclass(frozen=True)
class ShardPlan:
    """What a worker needs to know besides the number of the shard."""

    tokenizer: Path
    seed: int
    short_rows: int
    long_rows: int


@cache
def _trained(kind: str) -> tuple[Question, ...]:
    """The listed questions of a kind, without the held-out pairings."""
    every = letter_questions() if kind == "letters" else sum_questions()
    return tuple(question for question in every if not question.held_out)


@cache
def _tokenizer(path: Path) -> Tokenizer:
    return Tokenizer.from_file(str(path))


def draw_listed(rng: random.Random) -> list[Question]:
    """Usually one question about letters or sums, sometimes two in a row."""
    kind = rng.choice(("letters", "sums"))
    return [rng.choice(_trained(kind)) for _ in range(rng.choice((1, 1, 1, 2)))]


def draw_reading(rng: random.Random) -> list[Question]:
    """A paragraph with one to three questions."""
    return reading_questions(rng, False, most=rng.choice((1, 2, 3)))


def render(rng: random.Random, questions: list[Question]) -> list[Piece]:
    """The questions in the chat form or the completion form, half and half."""
    return rng.choice((chat_pieces, completion_pieces))(rng, questions)


def _rows(rng: random.Random, tokenizer: Tokenizer, count: int, width: int) -> Block:
    """That many rows of that width; an example which does not fit is drawn again."""
    tokens = np.zeros((count, width), np.int16)
    roles = np.zeros((count, width), np.uint8)
    draw = draw_listed if width == SHORT else draw_reading
    filled = 0
    while filled < count:
        pieces = render(rng, draw(rng))
        ids: list[int] = []
        marks: list[int] = []
        for text, role in pieces:
            piece = tokenizer.encode(text, add_special_tokens=False).ids
            ids += piece
            marks += [role] * len(piece)
        if len(ids) <= width:
            tokens[filled, : len(ids)] = ids
            roles[filled, : len(ids)] = marks
            filled += 1
    return tokens, roles


def build_shard(plan_and_number: tuple[ShardPlan, int]) -> tuple[Block, Block]:
    """One training step's rows, the short ones and the long ones."""
    plan, number = plan_and_number
    rng = random.Random(f"{plan.seed}/{number}")
    tokenizer = _tokenizer(plan.tokenizer)
    return (
        _rows(rng, tokenizer, plan.short_rows, SHORT),
        _rows(rng, tokenizer, plan.long_rows, LONG),
    )


def stream(plan: ShardPlan, steps: int, workers: int) -> Iterator[tuple[Block, Block]]:
    """The shards of a run in order."""
    numbered = ((plan, number) for number in range(steps))
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        yield from pool.imap(build_shard, numbered, chunksize=4)
