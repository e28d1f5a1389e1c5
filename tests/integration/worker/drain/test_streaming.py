"""Text while it runs: a drain in this process, an engine that writes when told, and listeners."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Sequence

import orjson
import redis
from kit.commands.support import producer_env
from kit.drain.draining import LONG, Draining, draining, error_of, send, soon
from kit.drain.writing import Writer
from kit.protocol.lessee import QUEUE, celery_message, chat, now, stored, submit_batch

from contract import naming, streaming
from contract.redis import keys
from contract.redis.batches import BatchStore
from contract.streaming import Entry, Listener, Transcript, texts_of
from worker.drain.events import Committed, FirstText
from worker.drain.streaming import Streaming


class Reader:
    """A listener of one request, and all it read; announces itself as often as a client does."""

    def __init__(self, client: redis.Redis, request_id: str) -> None:
        self.entries: list[Entry] = []
        self.transcript = Transcript()
        self.listener = Listener(client, request_id)
        self.announce()

    def announce(self) -> None:
        self.listener.announce()
        self.again_at = time.monotonic() + streaming.LISTEN_S / 3

    def read(self) -> Transcript:
        if time.monotonic() > self.again_at:
            self.announce()
        for entry in self.listener.read(0):
            self.entries.append(entry)
            self.transcript.add(entry)
        return self.transcript

    @property
    def events(self) -> list[str]:
        return [entry["event"] for entry in self.entries]


def listening(running: Draining) -> list[object]:
    """Return which side tasks of text are told of endings."""
    listeners = [one.__self__ for one in running.drain.events.listeners(Committed)]  # type: ignore[attr-defined]
    return [one for one in listeners if isinstance(one, Streaming)]


async def hears(running: Draining, client: redis.Redis) -> None:
    """Wait until the worker has subscribed."""
    await soon(lambda: client.pubsub_numsub(naming.LISTEN_CHANNEL)[0][1])
    await soon(lambda: running.engines)


async def test_text_comes_before_the_end_and_makes_up_the_result(
    redis_client: redis.Redis, redis_url: str
) -> None:
    async with draining(redis_url, Writer) as running:
        await hears(running, redis_client)
        (rid,) = send(redis_client, chat())
        reader = Reader(redis_client, rid)
        running.engine.texts = ["Once ", ""]
        await soon(lambda: reader.read().texts == {0: "Once "})
        running.engine.texts = ["Once upon", "Twice"]
        await soon(lambda: reader.read().texts == {0: "Once upon", 1: "Twice"})
        assert stored(redis_client, rid) is None
        running.engine.texts = ["Once upon a time.", "Twice told."]
        running.engine.go.set()
        await soon(lambda: reader.read().ended)
    meta = stored(redis_client, rid)
    assert meta is not None
    assert reader.transcript.texts == texts_of(meta["result"])
    assert reader.entries[-1] == streaming.end(1, "completed", whole=True)
    pieces = [e["text"] for e in reader.entries if e.get("choice") == "0"]
    assert "".join(pieces) == "Once upon a time."
    assert 0 < redis_client.pttl(naming.stream_key(rid)) <= streaming.STREAM_TTL_MS


async def test_who_comes_late_sees_what_was_written_and_all_see_the_same(
    redis_client: redis.Redis, redis_url: str
) -> None:
    async with draining(redis_url, Writer) as running:
        await hears(running, redis_client)
        (rid,) = send(redis_client, chat())
        await soon(lambda: len(running.drain.in_flight))
        running.engine.texts = ["Once upon"]
        early = Reader(redis_client, rid)  # of a request that runs already
        await soon(lambda: early.read().texts == {0: "Once upon"})
        late = Reader(redis_client, rid)
        assert late.read().texts == {0: "Once upon"}
        running.engine.texts = ["Once upon a time"]
        await soon(lambda: late.read().texts == early.read().texts == {0: "Once upon a time"})
        running.engine.go.set()
        await soon(lambda: early.read().ended and late.read().ended)
    assert early.entries == late.entries


async def test_an_attempt_elsewhere_begins_anew(redis_client: redis.Redis, redis_url: str) -> None:
    (rid,) = send(redis_client, chat())
    async with draining(redis_url, Writer) as running:
        await hears(running, redis_client)
        reader = Reader(redis_client, rid)
        running.engine.texts = ["Once upon"]
        await soon(lambda: reader.read().texts)
    # Redis may still count the first worker's subscription
    await soon(lambda: not redis_client.pubsub_numsub(naming.LISTEN_CHANNEL)[0][1])
    async with draining(redis_url, Writer) as running:
        await hears(running, redis_client)
        reader.announce()
        running.engine.texts = ["Another"]
        await soon(lambda: reader.read().texts == {0: "Another"})
        running.engine.go.set()
        await soon(lambda: reader.read().ended)
    begins = [e for e in reader.entries if e["event"] == "begin"]
    assert begins == [streaming.begin(1), streaming.begin(2)]
    # And what the first worker might still write counts for nothing
    assert reader.transcript.add(streaming.text(1, 0, 9, " a time")) == ""
    assert reader.transcript.texts == {0: "Another"}


async def test_a_failure_and_a_result_of_other_words_are_told_as_such(
    redis_client: redis.Redis, redis_url: str, store: BatchStore
) -> None:
    submitted = submit_batch(store, 1)
    (rid,) = submitted.ids
    async with draining(redis_url, Writer) as running:
        await hears(running, redis_client)
        reader = Reader(redis_client, rid)
        running.engine.texts, running.engine.fails = ["<think>no"], True
        await soon(lambda: reader.read().texts)
        running.engine.go.set()
        await soon(lambda: reader.read().ended)
        assert reader.entries[-1] == streaming.end(1, "failed", whole=False)
        assert error_of(redis_client, rid)["code"] == "request_failed"
        # A retry is a first attempt again: nothing of the failed one is left
        running.engine.go.clear()
        running.engine.fails = False
        store.retry(now(store), ["failed"])
        await soon(lambda: reader.read().ended == "")
        running.engine.answers = ["yes"]
        running.engine.go.set()
        await soon(lambda: reader.read().ended)
    assert reader.entries[-1] == streaming.end(1, "completed", whole=False)
    entries = [fields[b"event"] for _, fields in redis_client.xrange(naming.stream_key(rid))]
    assert entries[0] == b"begin"
    assert b"end" not in entries[:-1]


async def test_requests_nobody_listens_to_cost_no_command_and_no_call(
    redis_client: redis.Redis, redis_url: str
) -> None:
    async with draining(redis_url, Writer, simulated_slots=8) as running:
        await hears(running, redis_client)
        redis_client.config_resetstat()
        send(redis_client, *[chat(f"{n}", user="at once") for n in range(300)])
        await soon(lambda: running.drain.counts.completed == 300)
        assert "cmdstat_xadd" not in redis_client.info("commandstats")
        assert listening(running) == []
        # Nor do they while another one is listened to
        for rid, body in [("heard", chat())] + [(f"u{n}", chat(user="at once")) for n in range(99)]:
            redis_client.lpush(QUEUE, celery_message(rid, body))
        reader = Reader(redis_client, rid := "heard")
        running.engine.texts = ["Once"]
        await soon(lambda: reader.read().texts and running.drain.counts.completed == 399)
        assert running.engine.asked == {rid}
        streams = redis_client.keys("warmq:stream:*")
        assert streams == [naming.stream_key(rid).encode()]
        assert len(reader.entries) == redis_client.info("commandstats")["cmdstat_xadd"]["calls"]


async def test_the_first_text_of_an_attempt_is_published_once(
    redis_client: redis.Redis, redis_url: str
) -> None:
    async with draining(redis_url, Writer) as running:
        seen: list[FirstText] = []
        running.drain.events.subscribe(FirstText, seen.append)
        await hears(running, redis_client)
        (rid,) = send(redis_client, chat())
        reader = Reader(redis_client, rid)
        running.engine.texts = ["Once"]
        await soon(lambda: reader.read().texts)
        running.engine.texts = ["Once upon"]
        await soon(lambda: reader.read().texts == {0: "Once upon"})
    assert [event.delivery.request_id for event in seen] == [rid]
    assert seen[0].after_s > 0


async def test_a_listener_that_is_gone_costs_nothing_more(
    redis_client: redis.Redis, redis_url: str
) -> None:
    async with draining(redis_url, Writer) as running:
        await hears(running, redis_client)
        (rid,) = send(redis_client, chat())
        reader = Reader(redis_client, rid)
        running.engine.texts = ["Once"]
        await soon(lambda: reader.read().texts)
        running.side_tasks.streaming._until[rid] = 0.0  # as if LISTEN_S had gone by
        await soon(lambda: not listening(running))
        written = redis_client.xlen(naming.stream_key(rid))
        running.engine.texts = ["Once upon"]
        running.engine.go.set()
        await soon(lambda: stored(redis_client, rid))
        assert redis_client.xlen(naming.stream_key(rid)) == written


async def test_neither_junk_nor_a_key_of_another_type_stops_the_others(
    redis_client: redis.Redis, redis_url: str
) -> None:
    async with draining(redis_url, Writer) as running:
        await hears(running, redis_client)
        bad, good = send(redis_client, chat("bad"), chat("good"))
        redis_client.set(naming.stream_key(bad), "no stream")
        for junk in (b"\xff", b"{", b"7", b"null", b'"text"'):
            redis_client.publish(naming.LISTEN_CHANNEL, junk)
        redis_client.publish(naming.LISTEN_CHANNEL, orjson.dumps([bad]))
        reader = Reader(redis_client, good)
        running.engine.texts = ["Once"]
        await soon(lambda: reader.read().texts == {0: "Once"})
        running.engine.go.set()
        await soon(lambda: reader.read().ended)
        await soon(lambda: stored(redis_client, bad))


async def test_no_fault_in_it_ends_the_drain(redis_client: redis.Redis, redis_url: str) -> None:
    class Faulty(Writer):
        def text_so_far(self, request_id: str) -> Sequence[str]:
            self.asked.add(request_id)
            raise ZeroDivisionError

    async with draining(redis_url, Faulty) as running:
        await hears(running, redis_client)
        (rid,) = send(redis_client, chat())
        Reader(redis_client, rid)
        await soon(lambda: running.engine.asked)
        running.engine.go.set()
        await soon(lambda: stored(redis_client, rid))


async def test_watch_prints_the_text_as_it_comes(
    redis_client: redis.Redis, redis_url: str, store: BatchStore
) -> None:
    submit_batch(store, bodies=[chat("one"), chat("two", user=LONG)])
    async with draining(redis_url, Writer) as running:
        await hears(running, redis_client)
        watching = await watch(redis_url, "b1", "--request", "c1", "--stream")
        shown = await watch(redis_url, "b1", "--request", "c1", "--stream", "--json")
        assert watching.stdout is not None and shown.stdout is not None
        running.engine.texts = ["Once\nupon"]
        assert await watching.stdout.readline() == b"Once\n"
        assert stored(redis_client, now_id(store)) is None
        assert orjson.loads(await shown.stdout.readline()) == streaming.begin(1)
        running.engine.texts = ["Once\nupon a time"]
        running.engine.go.set()
        assert await watching.stdout.read() == b"upon a time\n"
        assert await watching.wait() == 0
        assert b'"event":"end"' in await shown.stdout.read()
        assert await shown.wait() == 0
    # And of a request that has ended, the result's
    again = await watch(redis_url, "b1", "--request", "c1", "--stream")
    assert (await again.communicate())[0] == b"Once\nupon a time\n"
    # Or, if that is gone, says so instead of waiting
    redis_client.delete(keys.result_key(now_id(store)), naming.stream_key(now_id(store)))
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
