"""The text of one request as a listener hears it: late, after gaps, over attempts, in `watch`."""

from __future__ import annotations

import asyncio
import sys
import time
from contextlib import closing

import orjson
import redis
from kit.commands.support import producer_env
from kit.drain.draining import LONG, draining, send, soon
from kit.drain.writing import Writer, begun, hears
from kit.protocol.lessee import chat, now, stored, submit_batch

from contract.redis import keys
from contract.redis.batches import BatchStore
from contract.streaming import (
    LISTEN_S,
    Listener,
)
from worker.drain.events import FirstText


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
            early._subscribed_at.clear()  # as if nothing had been heard for SILENT_S
            assert early.read(1.0) == []  # what it has already comes again, and is no news
            running.engine.go.set()
            await soon(lambda: not early.read(0) and early.transcripts[rid].ended)
            assert early.transcripts[rid].ended == "completed"
    assert [event.delivery.request_id for event in seen] == [rid]


def test_a_silent_subscription_is_asked_for_a_sign_of_life(redis_client: redis.Redis) -> None:
    with closing(Listener(redis_client, ["a"])) as listener:
        listener.read(0)
        listener._active_at = listener._pinged_at = 0.0  # as if nothing had come for SILENT_S
        listener.read(0)
        assert listener._pinged_at > listener._active_at
        pubsub = listener._pubsub
        listener.read(2.0)
        assert listener._pinged_at < listener._active_at
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
            assert listener._subscribe_at(rid) < time.monotonic() + LISTEN_S


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
            assert (listener.transcripts[rid].restarts, listener.transcripts[rid].ended) == (2, "")


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
