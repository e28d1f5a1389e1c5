"""Text while it runs: one channel for a listener, positions, a result at the end."""

from __future__ import annotations

import time
from contextlib import closing

import pytest
import redis
from kit.drain.draining import draining, send, soon
from kit.drain.writing import Writer, begun, hears, telling
from kit.protocol.lessee import QUEUE, Lessee, celery_message, chat, stored

from contract import naming
from contract.message import read_delivery
from contract.redis import keys
from contract.streaming import (
    Listener,
    Piece,
    decode_pieces,
    encode_pieces,
    listen_request,
    texts_of,
)
from worker.drain.events import FirstText
from worker.drain.running_text import PAUSE_S

GATEWAY = "gateway-1"
#: Lists that are too deep to be made a text of.
DEEP = b'{"listener":"a","ids":[' + b"[" * 1000 + b"]" * 1000 + b"]}"
HEADERS = {"warmq": {"listener": GATEWAY, "url": "/v1/chat/completions"}}


class Hearer:
    """One listener: all it heard, and the texts this makes up."""

    def __init__(self, client: redis.Redis, name: str = GATEWAY) -> None:
        self.client = client
        self.name = name
        self.pieces: list[Piece] = []
        self.publications = 0
        self._pubsub = client.pubsub(ignore_subscribe_messages=True)
        self._pubsub.subscribe(naming.text_channel(name))
        self._pubsub.get_message(timeout=5)

    def announce(self, *request_ids: str) -> None:
        self.client.publish(naming.LISTEN_CHANNEL, listen_request(self.name, request_ids))

    def hear(self) -> dict[tuple[str, int], str]:
        """Take in what was published; return the texts by request and choice."""
        while message := self._pubsub.get_message():
            self.publications += 1
            self.pieces += decode_pieces(message["data"])
        texts: dict[tuple[str, int], str] = {}
        for piece in self.pieces:
            have = texts.get((piece.request_id, piece.choice), "")
            assert piece.at <= len(have), f"{piece} leaves a gap after {have!r}"
            texts[piece.request_id, piece.choice] = have[: piece.at] + piece.text
        return texts

    def leave(self) -> None:
        self._pubsub.close()


async def test_texts_of_all_requests_come_on_one_channel_and_make_up_the_results(
    redis_client: redis.Redis, redis_url: str
) -> None:
    gateway = Hearer(redis_client)
    async with draining(redis_url, Writer) as running:
        await hears(running, redis_client)
        first, second = send(redis_client, chat("one"), chat("two"), **HEADERS)
        await begun(running, 2)
        running.engine.writes("Once ")
        await soon(lambda: gateway.hear() == {(first, 0): "Once ", (second, 0): "Once "})
        assert gateway.publications == 1
        running.engine.writes("Once upön", "Twice")
        one = {(first, 0): "Once upön", (first, 1): "Twice"}
        await soon(lambda: gateway.hear().items() >= one.items())
        assert stored(redis_client, first) is None
        running.engine.writes("Once upön a time.", "Twice told.")
        running.engine.go.set()
        await soon(lambda: stored(redis_client, first) and stored(redis_client, second))
        for request_id in (first, second):
            meta = stored(redis_client, request_id)
            assert meta is not None
            for choice, text in texts_of(meta["result"]).items():
                assert text.startswith(gateway.hear()[request_id, choice])
        await soon(lambda: not telling(running)._published or telling(running)._stepped())
    assert {piece.attempt for piece in gateway.pieces} == {1}


async def test_the_first_text_waits_for_no_pause(
    redis_client: redis.Redis, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.drain.running_text.PAUSE_S", 600)
    gateway = Hearer(redis_client)
    async with draining(redis_url, Writer) as running:
        seen: list[FirstText] = []
        running.drain.events.subscribe(FirstText, seen.append)
        await hears(running, redis_client)
        redis_client.lpush(QUEUE, celery_message("early", chat(), **HEADERS))
        await begun(running)
        running.engine.writes("Once")
        await soon(lambda: gateway.hear() == {("early", 0): "Once"})
        redis_client.lpush(QUEUE, celery_message("late", chat(), **HEADERS))
        await begun(running, 2)
        running.engine.writes("Once upon")
        await soon(lambda: gateway.hear().get(("late", 0)) == "Once upon")
        assert gateway.hear()["early", 0] == "Once"  # which began: the rest comes after the pause
    assert [event.delivery.request_id for event in seen] == ["early", "late"]


async def test_what_follows_the_last_step_comes_after_the_pause_without_another_step(
    redis_client: redis.Redis, redis_url: str
) -> None:
    gateway = Hearer(redis_client)
    async with draining(redis_url, Writer) as running:
        await hears(running, redis_client)
        (rid,) = send(redis_client, chat(), **HEADERS)
        await begun(running)
        running.engine.writes("a")
        await soon(gateway.hear)
        began = time.monotonic()
        running.engine.writes("ab")
        await soon(lambda: gateway.hear() == {(rid, 0): "ab"})
        assert time.monotonic() - began < 50 * PAUSE_S


async def test_a_listener_that_was_away_or_comes_late_is_told_all_from_the_beginning(
    redis_client: redis.Redis, redis_url: str
) -> None:
    gateway = Hearer(redis_client)
    async with draining(redis_url, Writer) as running:
        await hears(running, redis_client)
        (rid,) = send(redis_client, chat(), **HEADERS)
        await begun(running)
        running.engine.writes("Once")
        await soon(gateway.hear)
        gateway.leave()
        running.engine.writes("Once upon")
        await soon(lambda: not telling(running)._published)  # nobody heard it: nothing more is told
        back, other = Hearer(redis_client), Hearer(redis_client, "gateway-2")
        back.announce(rid)
        other.announce(rid, "of another worker")
        await soon(lambda: back.hear() == other.hear() == {(rid, 0): "Once upon"})
        running.engine.writes("Once upon a time")
        await soon(lambda: back.hear() == other.hear() == {(rid, 0): "Once upon a time"})
        running.engine.go.set()
        await soon(lambda: stored(redis_client, rid))


async def test_who_announces_a_request_that_waits_in_the_queue_hears_it_from_its_start(
    redis_client: redis.Redis, redis_url: str
) -> None:
    async with draining(redis_url, Writer, simulated_slots=1, look_ahead=0) as running:
        await hears(running, redis_client)
        other = Hearer(redis_client, "gateway-2")
        gateway = Hearer(redis_client)
        other.announce("waits")
        await soon(lambda: telling(running)._published)
        redis_client.lpush(QUEUE, celery_message("waits", chat(), **HEADERS))
        await begun(running)
        running.engine.writes("Once")
        await soon(lambda: other.hear() == gateway.hear() == {("waits", 0): "Once"})


async def test_an_attempt_elsewhere_begins_its_text_anew(
    redis_client: redis.Redis, redis_url: str
) -> None:
    gateway = Hearer(redis_client)
    (rid,) = send(redis_client, chat(), **HEADERS)
    async with draining(redis_url, Writer) as running:
        await begun(running)
        running.engine.writes("Once")
        await soon(gateway.hear)
    async with draining(redis_url, Writer) as running:
        await begun(running)
        running.engine.writes("Another")
        await soon(lambda: gateway.hear() == {(rid, 0): "Another"})
    assert gateway.pieces == [Piece(rid, 1, 0, 0, "Once"), Piece(rid, 2, 0, 0, "Another")]


async def test_a_text_that_does_not_go_on_as_it_was_told_begins_anew(
    redis_client: redis.Redis, redis_url: str
) -> None:
    gateway = Hearer(redis_client)
    async with draining(redis_url, Writer) as running:
        await hears(running, redis_client)
        (rid,) = send(redis_client, chat(), **HEADERS)
        await begun(running)
        running.engine.writes("Once upon")
        await soon(gateway.hear)
        running.engine.writes("Once")  # it may catch up
        running.engine.writes("Another time")
        await soon(lambda: gateway.hear() == {(rid, 0): "Another time"})
        running.engine.go.set()
        await soon(lambda: stored(redis_client, rid))
    assert gateway.pieces[1:] == [Piece(rid, 1, 0, 0, "Another time")]


MORE_THAN_TEXT = {
    "tools": chat(tools=[{"type": "function", "function": {"name": "f"}}]),
    "logprobs": chat(logprobs=True),
    "logprobs of a completion": {"prompt": "x", "logprobs": 0},
    "echo": {"prompt": "x", "echo": True},
    "token ids": chat(return_token_ids=True),
}


@pytest.mark.parametrize("form", MORE_THAN_TEXT)
async def test_of_an_answer_that_is_more_than_text_nothing_is_told(
    redis_client: redis.Redis, redis_url: str, form: str
) -> None:
    gateway = Hearer(redis_client)
    async with draining(redis_url, Writer) as running:
        await hears(running, redis_client)
        plain = {"warmq": {"listener": GATEWAY}}
        redis_client.lpush(QUEUE, celery_message("more", MORE_THAN_TEXT[form], **plain))
        redis_client.lpush(QUEUE, celery_message("plain", chat(logprobs=False), **plain))
        await begun(running, 2)
        running.engine.writes("Once")
        await soon(gateway.hear)
        running.engine.writes("Once upon")
        await soon(lambda: gateway.hear() == {("plain", 0): "Once upon"})
        with closing(Listener(redis_client, ["more"])) as raw:
            await soon(lambda: raw.read(0))
            assert raw.transcripts["more"].texts == {0: "Once upon"}


async def test_requests_without_a_listener_cost_no_command_and_no_call(
    redis_client: redis.Redis, redis_url: str
) -> None:
    gateway = Hearer(redis_client)
    async with draining(redis_url, Writer, simulated_slots=8) as running:
        await hears(running, redis_client)
        redis_client.config_resetstat()
        send(redis_client, *[chat(f"{n}", user="at once") for n in range(300)])
        await soon(lambda: running.drain.counts.completed == 300)
        stats = redis_client.info("commandstats")
        in_done = 300  # DONE publishes each result
        assert stats["cmdstat_publish"]["calls"] == in_done
        assert not running.engine.asked
        assert not telling(running)._due.is_set()
        redis_client.lpush(QUEUE, celery_message("heard", chat(), **HEADERS))
        await begun(running)
        running.engine.writes("Once")
        await soon(gateway.hear)
        assert running.engine.asked == {"heard"}


async def test_no_junk_on_the_channel_or_in_the_header_stops_anything(
    redis_client: redis.Redis, redis_url: str
) -> None:
    gateway = Hearer(redis_client)
    async with draining(redis_url, Writer, simulated_slots=8) as running:
        await hears(running, redis_client)
        for junk in (b"{}", b'{"listener":7,"ids":["x"]}', b'{"listener":"a b","ids":["x"]}',
                     b'{"listener":"a","ids":7}', b"\xff", b"{", b"7", b"null",
                     b'"text"', b'["x"]', DEEP):  # fmt: skip
            redis_client.publish(naming.LISTEN_CHANNEL, junk)
        redis_client.publish(keys.CANCEL_CHANNEL, b"[" + b"[" * 1000 + b"]" * 1000 + b"]")
        for n, listener in enumerate(("", "a b", "x" * 65, 7, None, ["a"], "a\n")):
            named = {"warmq": {"listener": listener}}
            redis_client.lpush(QUEUE, celery_message(f"junk{n}", chat(), **named))
        redis_client.lpush(QUEUE, celery_message("good", chat(), **HEADERS))
        await begun(running, 8)
        running.engine.writes("Once")
        await soon(lambda: gateway.hear() == {("good", 0): "Once"})
        assert {listener for _, listener in telling(running)._published} == {GATEWAY}
        running.engine.go.set()
        await soon(lambda: running.drain.counts.completed == 8)


async def test_no_fault_in_it_ends_the_drain(redis_client: redis.Redis, redis_url: str) -> None:
    class Faulty(Writer):
        def text_so_far(self, request_id: str) -> list[str]:
            self.asked.add(request_id)
            raise ZeroDivisionError

    async with draining(redis_url, Faulty) as running:
        await hears(running, redis_client)
        (rid,) = send(redis_client, chat(), **HEADERS)
        await begun(running)
        running.engine.writes("Once")
        await soon(lambda: running.engine.asked)
        running.engine.go.set()
        await soon(lambda: stored(redis_client, rid))


def test_only_what_was_published_is_read() -> None:
    pieces = [Piece("a", 1, 0, 0, "Onçe"), Piece("b", 2, 1, 7, "\n")]
    assert decode_pieces(encode_pieces(pieces)) == pieces
    for junk in (b"", b"{}", b"[[1,1,1,1,1]]", b'[["a",1,0,0]]', b"\xff"):
        with pytest.raises(ValueError):
            decode_pieces(junk)


def test_the_listener_stays_in_a_message_that_goes_back_to_the_queue(
    redis_client: redis.Redis,
) -> None:
    redis_client.lpush(QUEUE, celery_message("r", chat(), **HEADERS))
    lessee = Lessee(redis_client)
    (lease,) = lessee.pop()
    lessee.release(lease)
    (again,) = lessee.pop()
    assert read_delivery(again.id, again.message).listener == GATEWAY
    assert again.returns == 1
