"""Text while it runs: one channel for a listener, positions, a result at the end."""

from __future__ import annotations

import asyncio
import sys
import time
from contextlib import closing

import orjson
import pytest
import redis
from kit.commands.support import producer_env
from kit.drain.draining import LONG, Draining, draining, send, soon
from kit.drain.writing import Writer
from kit.protocol.lessee import QUEUE, Lessee, celery_message, chat, now, stored, submit_batch

from contract import naming
from contract.message import read_delivery
from contract.redis import keys
from contract.redis.batches import BatchStore
from contract.streaming import (
    LISTEN_S,
    Listener,
    Piece,
    announcement,
    published,
    read_published,
    texts_of,
)
from worker.drain.events import FirstText
from worker.drain.running_text import PAUSE_S, RunningText

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
        self.client.publish(naming.LISTEN_CHANNEL, announcement(self.name, request_ids))

    def hear(self) -> dict[tuple[str, int], str]:
        """Take in what was published; return the texts by request and choice."""
        while message := self._pubsub.get_message():
            self.publications += 1
            self.pieces += read_published(message["data"])
        texts: dict[tuple[str, int], str] = {}
        for piece in self.pieces:
            have = texts.get((piece.request_id, piece.choice), "")
            assert piece.at <= len(have), f"{piece} leaves a gap after {have!r}"
            texts[piece.request_id, piece.choice] = have[: piece.at] + piece.text
        return texts

    def leave(self) -> None:
        self._pubsub.close()


def telling(running: Draining) -> RunningText:
    return running.side_tasks.text


async def begun(running: Draining, count: int = 1) -> None:
    """Wait until so many requests are in the engine."""
    await soon(lambda: running.engines)
    await soon(lambda: len([r for r in running.drain.in_flight if r.since]) == count)


async def hears(running: Draining, client: redis.Redis) -> None:
    """Wait until the worker hears announcements."""
    await soon(lambda: client.pubsub_numsub(naming.LISTEN_CHANNEL)[0][1])
    await soon(lambda: running.engines)


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
        await soon(lambda: not telling(running)._told or telling(running)._stepped())
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
        await soon(lambda: not telling(running)._told)  # nobody heard it: nothing more is told
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
        await soon(lambda: telling(running)._told)
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
        assert {listener for _, listener in telling(running)._told} == {GATEWAY}
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
    assert read_published(published(pieces)) == pieces
    for junk in (b"", b"{}", b"[[1,1,1,1,1]]", b'[["a",1,0,0]]', b"\xff"):
        with pytest.raises(ValueError):
            read_published(junk)


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


# -- who reads one request's text ------------------------------------------------------


def text_of(listener: Listener, request_id: str) -> dict[int, str]:
    """Return what a listener has of a request's text by now."""
    listener.read(0)
    return listener.transcripts[request_id].texts


async def test_who_comes_late_hears_the_text_from_its_start_and_all_hear_the_same(
    redis_client: redis.Redis, redis_url: str
) -> None:
    async with draining(redis_url, Writer) as running:
        seen: list[FirstText] = []
        running.drain.events.subscribe(FirstText, seen.append)
        await hears(running, redis_client)
        (rid,) = send(redis_client, chat())
        with (
            closing(Listener(redis_client, [rid])) as early,
            closing(Listener(redis_client, [rid, "of another batch"])) as late,
        ):
            await begun(running)
            running.engine.writes("Once upon", "Twice")
            await soon(lambda: text_of(early, rid) == {0: "Once upon", 1: "Twice"})
            await soon(lambda: text_of(late, rid) == {0: "Once upon", 1: "Twice"})
            running.engine.writes("Once upon a time", "Twice")
            both = {0: "Once upon a time", 1: "Twice"}
            await soon(lambda: text_of(early, rid) == text_of(late, rid) == both)
            early._announced.clear()  # as if nothing had been heard for SILENT_S
            assert early.read(1.0) == []  # what it has already comes again, and is no news
            running.engine.go.set()
            await soon(lambda: not early.read(0) and early.transcripts[rid].ended)
            assert early.transcripts[rid].ended == "completed"
    assert [event.delivery.request_id for event in seen] == [rid]


def test_a_silent_subscription_is_asked_for_a_sign_of_life(redis_client: redis.Redis) -> None:
    with closing(Listener(redis_client, ["a"])) as listener:
        listener.read(0)
        listener._heard_at = listener._pinged_at = 0.0  # as if nothing had come for SILENT_S
        listener.read(0)
        assert listener._pinged_at > listener._heard_at
        pubsub = listener._pubsub
        listener.read(2.0)
        assert listener._pinged_at < listener._heard_at
        assert listener._pubsub is pubsub


async def test_a_piece_that_was_lost_is_told_again(
    redis_client: redis.Redis, redis_url: str
) -> None:
    async with draining(redis_url, Writer) as running:
        await hears(running, redis_client)
        (rid,) = send(redis_client, chat())
        with closing(Listener(redis_client, [rid])) as listener:
            await begun(running)
            running.engine.writes("Once")
            await soon(lambda: text_of(listener, rid) == {0: "Once"})
            listener.transcripts[rid].texts[0] = "On"
            running.engine.writes("Once upon")
            await soon(lambda: text_of(listener, rid) == {0: "Once upon"})
            assert listener._due(rid) < time.monotonic() + LISTEN_S


async def test_a_retry_is_told_anew_and_its_end_is_its_own(
    redis_client: redis.Redis, redis_url: str, store: BatchStore
) -> None:
    (rid,) = submit_batch(store, 1).ids
    async with draining(redis_url, Writer) as running:
        await hears(running, redis_client)
        with closing(Listener(redis_client, [rid])) as listener:
            running.engine.fails = True
            running.engine.writes("<think>no")
            await soon(lambda: text_of(listener, rid))
            running.engine.go.set()
            await soon(lambda: not listener.read(0) and listener.transcripts[rid].ended == "failed")
            running.engine.go.clear()
            running.engine.fails = False
            running.engine.writes("yes")
            store.retry(now(store), ["failed"])
            await soon(lambda: text_of(listener, rid) == {0: "yes"}, LISTEN_S)
            assert (listener.transcripts[rid].begun, listener.transcripts[rid].ended) == (2, "")


async def test_watch_prints_the_text_as_it_comes(
    redis_client: redis.Redis, redis_url: str, store: BatchStore
) -> None:
    submit_batch(store, bodies=[chat("one"), chat("two", user=LONG)])
    async with draining(redis_url, Writer) as running:
        await hears(running, redis_client)
        watching = await watch(redis_url, "b1", "--request", "c1", "--stream")
        shown = await watch(redis_url, "b1", "--request", "c1", "--stream", "--json")
        assert watching.stdout is not None and shown.stdout is not None
        running.engine.writes("Once\nupon")
        assert await watching.stdout.readline() == b"Once\n"
        assert stored(redis_client, now_id(store)) is None
        begin = {"event": "begin", "attempt": "1"}
        assert orjson.loads(await shown.stdout.readline()) == begin
        running.engine.writes("Once\nupon a time")
        running.engine.go.set()
        assert await watching.stdout.read() == b"upon a time\n"
        assert await watching.wait() == 0
        entries = [orjson.loads(line) for line in (await shown.stdout.read()).splitlines()]
        assert "".join(entry.get("text", "") for entry in entries) == "Once\nupon a time"
        end = {"event": "end", "attempt": "1", "outcome": "completed", "whole": "1"}
        assert entries[-1] == end
        assert await shown.wait() == 0
    # And of a request that has ended, the result's
    again = await watch(redis_url, "b1", "--request", "c1", "--stream")
    assert (await again.communicate())[0] == b"Once\nupon a time\n"
    # Or, if that is gone, says so instead of waiting
    redis_client.delete(keys.result_key(now_id(store)))
    redis_client.hset(keys.batch_key("b1"), "finished_at", 1)
    gone = await watch(redis_url, "b1", "--request", "c1", "--stream")
    assert b"expired" in (await gone.communicate())[1]
    assert gone.returncode == 2
    wrong = await watch(redis_url, "b1", "--stream")
    assert await wrong.wait() == 2


def now_id(store: BatchStore) -> str:
    return store.find(now(store), "c1")[1]


async def watch(url: str, *words: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "producer", "watch", *words,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, env=producer_env(url),
    )  # fmt: skip
