"""Which lines `--reuse` looks up, and what becomes of lines whose answers are gone."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import orjson
import pytest

from contract.index import IndexChunk
from contract.known import BodyFilter, Offer, answer_digest, body_hash, second
from contract.message import MessageWriter, encode_args
from contract.naming import request_id
from contract.openai.body import COMPLETION_URL
from contract.redis.enqueued import Enqueued
from contract.redis.known import KnownAnswer
from producer.input.options import BadOption
from producer.submit.lines import PreparedChunk
from producer.submit.reuse import Reuse, oldest_age_s

SIZE = 65536
WRITER = MessageWriter("b1", 1, "life", "warmq", 6)


def body(n: int, **fields: Any) -> bytes:
    return orjson.dumps({"prompt": f"question {n}", "temperature": 0} | fields)


def digest(n: int) -> str:
    return answer_digest("m", COMPLETION_URL, orjson.loads(body(n)))


def old_id(n: int) -> str:
    return request_id("old", str(n))


class Answers:
    """The known answers to some questions, in memory."""

    def __init__(self, known: Iterable[int], identity: str | None = "m") -> None:
        self.known = {digest(n): old_id(n) for n in known}
        self.hashes = [body_hash(encode_args(body(n))) for n in known]
        self.identity = identity
        self.asked: list[str] = []
        self.noted: list[KnownAnswer] = []
        self.gone: set[str] = set()

    def offer(self, queue: str) -> Offer | None:
        return None if self.identity is None else Offer(self.identity, 100)

    def filter(self, tenant: str) -> BodyFilter:
        bits = bytearray(SIZE // 8)
        for number in [*self.hashes, *map(second, self.hashes)]:
            bits[number % SIZE // 8] |= 0x80 >> number % 8
        return BodyFilter(bytes(bits) if self.hashes else b"")

    def find(self, tenant: str, digests: Sequence[str]) -> list[str]:
        self.asked += digests
        return [self.known.get(one, "") for one in digests]

    def with_results(self, request_ids: Sequence[str]) -> list[str]:
        return ["" if one in self.gone else one for one in request_ids]

    def drop(self, tenant: str, digests: Sequence[str]) -> None:
        for one in digests:
            del self.known[one]

    def note(self, tenant: str, most: int, ttl_ms: int, answers: Iterable[KnownAnswer]) -> None:
        self.noted += answers


def search(answers: Answers) -> Reuse:
    return Reuse(answers, "b1", "default", "warmq", math.inf, 1000)  # type: ignore[arg-type]


def chunk(bodies: Sequence[bytes]) -> PreparedChunk:
    made = PreparedChunk(0, 1, (0, ""), IndexChunk(len(bodies), "d", []))
    made.messages = [
        WRITER.write(request_id("b1", f"c{n}"), f"c{n}", n, COMPLETION_URL, text)
        for n, text in enumerate(bodies, 1)
    ]
    return made


def test_known_lines_leave_the_messages_and_name_the_old_request():
    made, reuse = chunk([body(n) for n in range(4)]), search(Answers([1, 3]))
    reuse.find(made)
    messages, queues, known = made.parts()
    assert (messages, queues) == ([made.messages[0], made.messages[2]], [])
    own = request_id("b1", "c2")
    assert known.splitlines()[:2] == [b"-", f'{own} {old_id(1)} {digest(1)} 2 "c2"'.encode()]
    assert len(known.splitlines()) == 3


def test_lines_with_queues_of_their_own_keep_them():
    made, reuse = chunk([body(n) for n in range(3)]), search(Answers([1]))
    made.queues = ["a", "b", "c"]
    reuse.find(made)
    assert made.parts()[:2] == ([made.messages[0], made.messages[2]], ["a", "c"])


def test_the_first_chunk_is_looked_up_whole_and_later_ones_by_the_filter():
    answers = Answers([1])
    reuse = search(answers)
    for first in (0, 1000):
        answers.asked.clear()
        reuse.find(chunk([body(n) for n in range(first + 10, first + 330)]))
        assert len(answers.asked) == (320 if first == 0 else pytest.approx(6, abs=4))
    made = chunk([body(n) for n in range(320)])
    reuse.find(made)
    assert set(made.known) == {1}
    assert not reuse._exact


def test_after_chunks_of_unknown_lines_a_known_one_still_finds_all_of_its_chunk():
    answers = Answers(range(100, 120))
    reuse = search(answers)
    for first in range(1000, 3000, 320):
        reuse.find(chunk([body(n) for n in range(first, first + 320)]))
    made = chunk([body(n) for n in range(320)])
    reuse.find(made)
    assert set(made.known) == set(range(100, 120))


def test_bodies_that_are_written_otherwise_are_all_looked_up_once_one_is_known():
    answers = Answers(range(100))
    reuse = search(answers)
    for space in (b" ", b"  "):
        made = chunk([space + body(n) for n in range(100)])
        reuse.find(made)
        assert len(made.known) == 100 and reuse._exact


def test_a_thorough_search_looks_at_every_line():
    answers = Answers([1])
    reuse = search(answers)
    reuse.thorough = True
    for first in range(1000, 3000, 320):
        reuse.find(chunk([body(n) for n in range(first, first + 320)]))
    assert len(answers.asked) == 7 * 320


def test_a_thorough_search_does_not_count_answers_whose_results_are_gone():
    answers = Answers([1, 2])
    answers.gone = {old_id(2)}
    reuse = search(answers)
    reuse.thorough = True
    made = chunk([body(n) for n in range(4)])
    reuse.find(made)
    assert set(made.known) == {1}


@pytest.mark.parametrize(
    "answers", [Answers([]), Answers([1], identity=None), Answers([1], identity="another")]
)
def test_nothing_is_known_without_answers_or_of_another_model(answers: Answers):
    made = chunk([body(1)])
    search(answers).find(made)
    assert made.known == {}


def test_a_line_whose_answer_varies_is_not_looked_up():
    answers, made = Answers([1]), chunk([body(1, temperature=1), b'{"prompt":"question 1"}'])
    search(answers).find(made)
    assert answers.asked == [] and made.known == {}


def test_answers_that_are_gone_are_dropped_and_their_lines_queued():
    answers = Answers([0, 1])
    made, sent = chunk([body(0), body(1)]), []

    def send() -> Enqueued:
        sent.append(made.parts())
        gone = request_id("b1", "c1")
        return Enqueued("unknown", text=gone) if len(sent) == 1 else Enqueued("ok")

    assert search(answers).send(made, send).answer == "ok"
    assert [len(messages) for messages, _, _ in sent] == [0, 1]
    assert answers.known.keys() == {digest(1)}
    assert answers.noted == [
        KnownAnswer(digest(1), body_hash(encode_args(body(1))), request_id("b1", "c2"))
    ]


@pytest.mark.parametrize(
    ("value", "seconds"),
    [(None, None), (False, None), (True, math.inf), ("any", math.inf), ("7d", 604_800)],
)  # fmt: skip
def test_an_age_is_a_duration_or_any(value: object, seconds: float | None):
    assert oldest_age_s(value, "--reuse") == seconds


@pytest.mark.parametrize("value", ["", "7", "0s", "week", 7, "9" * 50 + "d"])
def test_any_other_age_is_refused(value: object):
    with pytest.raises(BadOption, match="--reuse"):
        oldest_age_s(value, "--reuse")
