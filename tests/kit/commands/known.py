"""Answers that a worker with WARMQ_KNOWN_ANSWERS would commit, and what `--reuse` makes of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import redis
from kit.commands.submitting import ONCE, submit
from kit.commands.support import TTL_MS, answer, state, write_lines
from kit.protocol.lessee import QUEUE, Lessee, client_of, life_of

from contract.batch import Batch
from contract.errors import RequestFailed
from contract.known import answer_digest, body_hash
from contract.message import args_in, read_body, read_delivery
from contract.openai.body import CHAT_URL
from contract.redis import keys
from contract.redis.batches import BatchStore
from contract.redis.known import KnownAnswer, known_text
from contract.results import failure_meta, result_line, success_meta
from producer.submit.submission import Submission

REUSE = replace(ONCE, reuse_s=math.inf)
#: The identity that `announce` gives a worker's model.
MODEL = "m1"
Fate = Callable[[str], str]


def announce(
    client: redis.Redis, identity: str = MODEL, most: int = 10_000, queue: str = QUEUE
) -> None:
    """Announce the one worker of a queue, which notes answers."""
    seconds, micros = client.time()
    state = {
        "state": "ready", "queue": queue, "protocol": 2, "identity": identity,
        "known_answers": most,
    }  # fmt: skip
    record = b"%d\0" % (seconds * 1000 + micros // 1000) + orjson.dumps(state)
    client.hset(keys.WORKERS, f"w-{queue}", record)


def asked(text: str, **fields: Any) -> dict[str, Any]:
    """Return the body of a question whose answer can be repeated."""
    return {"messages": [{"role": "user", "content": text}], "temperature": 0} | fields


def questions(path: Path, texts: Iterable[str], **fields: Any) -> Path:
    """Write a file with a line for each question; its custom_ids are r0, r1, ..."""
    lines = (
        {"custom_id": f"r{n}", "method": "POST", "url": CHAT_URL, "body": asked(text, **fields)}
        for n, text in enumerate(texts)
    )
    return write_lines(path, lines)


def says(text: str, identity: str = MODEL) -> str:
    """Return the only right answer of a model to a question."""
    return f"{identity} says {text}"


def answer_all(
    store: BatchStore,
    identity: str = MODEL,
    *,
    most: int = 10_000,
    tenant: str = "default",
    fate: Fate = lambda text: "",
    queue: str = QUEUE,
) -> list[str]:
    """Answer what waits as a worker would; return the questions that were computed.

    `fate` returns for a question whether it is `cut` or will `fail`.
    """
    lessee, computed = Lessee(client_of(store), queue=queue), list[str]()
    while leases := lessee.pop(500):
        args: list[Any] = []
        known: list[KnownAnswer] = []
        for lease in leases:
            it = read_delivery(lease.id, lease.message)
            number = body_hash(args_in(lease.message))
            body = read_body(it)
            text = body["messages"][0]["content"]
            computed.append(text)
            outcome, flag, how = "completed", "0", fate(text)
            if how == "fail":
                outcome, flag = "failed", "1"
                error = RequestFailed("in vain")
                meta = failure_meta(
                    it.request_id, error, batch=it.batch, custom_id=it.custom_id, line=it.line
                )
            else:
                said = answer(says(text, identity))
                digest = answer_digest(identity, it.url or "", body)
                if how == "cut":
                    said["choices"][0]["finish_reason"], flag, digest = "length", "cut", ""
                meta = success_meta(it, orjson.dumps(said), {"engine_s": 1.5}, "", digest)
                if digest:
                    known.append(KnownAnswer(digest, number, it.request_id))
            args += [lease.id, it.request_id, it.batch, life_of(it), outcome, flag, 3, 2, meta]
        lessee.run("done", lessee.worker, TTL_MS, *args)
        if known:
            lessee.run("know", tenant, most, TTL_MS, known_text(known))
    return computed


def reusing(batch_id: str, submission: Submission = REUSE, **options: Any) -> Submission:
    """Return the options of a submit with --reuse."""
    return replace(submission, batch_id=batch_id, **options)


def ask(
    store: BatchStore, path: Path, batch_id: str, texts: Iterable[str], **options: Any
) -> Batch:
    """Submit questions with --reuse as a batch; return it."""
    submit(store, questions(path, texts), reusing(batch_id, **options))
    return state(store, batch_id)


def lines_of(store: BatchStore, batch_id: str) -> list[dict[str, Any]]:
    """Return the output lines of a batch, in the file's order."""
    lines = []
    for chunk in store.index(batch_id):
        ids = chunk.request_ids(batch_id)
        for entry, rid, raw in zip(chunk.entries, ids, store.results(ids), strict=True):
            lines.append(orjson.loads(result_line(rid, entry[1], entry[0], raw).json))
    return lines


def text_of(line: dict[str, Any]) -> str:
    """Return the text of an output line's answer."""
    return str(line["response"]["body"]["choices"][0]["message"]["content"])
