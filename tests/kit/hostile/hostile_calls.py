"""Calls of every route of a gateway, drawn by a seed, with bombs among them; and their verdict.

Each call is drawn from the seed and its number alone: a call that failed is drawn again by both.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

import httpx
import orjson
from kit.hostile.hostile import dump
from kit.hostile.hostile_parts import (
    FIELDS,
    FORMS,
    MODEL,
    SMALL,
    Call,
    as_json,
    files,
    form,
    headers,
    spoilt,
    text,
    value,
)
from kit.hostile.hostile_requests import REQUESTS

from contract.openai.body import CHAT_URL
from gateway.http.idempotency import ONLINE_BODY_TYPES

#: A call that has no answer by then is a fault.
PATIENCE_S = 30.0
BATCH_URLS = ("/v1/batches", "/v1/messages/batches")
PAGES = (
    "/ui", "/ui/batches", "/ui/workers", "/ui/tenants", "/ui/dead", "/ui/submit", "/ui/login",
    "/metrics", "/health", "/ready", "/version", "/openapi.json", "/warmq/v1/scale", "/v1/models",
)  # fmt: skip
OBJECTS = (
    "/v1/files/{}", "/v1/files/{}/content", "/v1/batches/{}", "/v1/models/{}",
    "/v1/messages/batches/{}", "/v1/messages/batches/{}/results", "/ui/batches/{}",
    "/ui/batches/{}/request", "/ui/batches/{}/download/output", "/ui/submit?file={}",
    "/ui/live?batch={}", "/ui/live?request={}&of={}", "/ui/assets/{}/{}", "/v1/responses/{}",
    "/v1/responses/{}/input_items", "/v1/responses/{}/input_items?after={}",
)  # fmt: skip
LISTS = (
    "/v1/files",
    "/v1/batches",
    "/v1/messages/batches",
    "/ui/batches",
    "/ui/submit",
    "/ui/dead",
)
WRITES = (
    "/v1/batches/{}/cancel", "/v1/uploads/{}/cancel", "/v1/uploads/{}/complete",
    "/v1/messages/batches/{}/cancel", "/ui/batches/{}/cancel", "/ui/batches/{}/retry", "/ui/dead",
    "/ui/login", "/ui/logout", "/ui/submit/start", "/v1/responses/{}/cancel",
)  # fmt: skip


#: The largest body that is drawn, in bytes: four are held at a time.
LARGEST = 300 << 20


@dataclass
class Judged:
    """How all calls ended: statuses, and what must not be, with the call's number."""

    statuses: Counter[int] = field(default_factory=Counter)
    broken: list[str] = field(default_factory=list)
    slowest_s: float = 0.0


class Drawing:
    """Draws calls; `known` are ids of objects that earlier calls have made."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.known: list[str] = ["file-1", "batch_1", "upload_1", "msgbatch_1"]

    def call(self, number: int) -> Call:
        """Return the call of a number."""
        chance = random.Random(f"{self.seed} {number}")
        kinds: Sequence[tuple[Callable[[random.Random], Call], int]] = (
            (self._online, 8), (self._known_bomb, 3), (self._file, 8), (self._form, 4),
            (self._batch, 6), (self._messages, 3), (self._upload, 3), (self._get, 8),
            (self._list, 3), (self._write, 4), (self._response, 3),
        )  # fmt: skip
        (draw,) = chance.choices([k for k, _ in kinds], [weight for _, weight in kinds])
        call = draw(chance)
        kind = draw.__name__.strip("_")
        return call._replace(kind=kind, headers=call.headers | headers(chance))

    def note(self, answer: httpx.Response) -> None:
        """Remember the id of what a call has made."""
        kind = answer.headers.get("content-type", "")
        if answer.status_code == 200 and answer.content and kind.startswith("application/json"):
            made = orjson.loads(answer.content)
            if isinstance(made, dict) and isinstance(made.get("id"), str):
                self.known.append(made["id"])

    # -- kinds --------------------------------------------------------------------------

    def _online(self, chance: random.Random) -> Call:
        body: Any = {
            "model": MODEL, "messages": [{"role": "user", "content": "x"}], "max_tokens": 3,
        }  # fmt: skip
        for _ in range(chance.randrange(1, 4)):
            body[chance.choice(FIELDS)] = value(chance)
        return as_json("POST", chance.choice(list(ONLINE_BODY_TYPES)), spoilt(chance, dump(body)))

    def _response(self, chance: random.Random) -> Call:
        """Draw a background response, which later calls retrieve, cancel and delete."""
        body: Any = {"model": MODEL, "input": "x", "background": True}
        if chance.random() < 0.6:
            name = chance.choice([*body, "store", "stream", "metadata", "instructions", "tools"])
            body[name] = value(chance)
        return as_json("POST", "/v1/responses", spoilt(chance, dump(body)))

    def _known_bomb(self, chance: random.Random) -> Call:
        hostile = REQUESTS[chance.choice(SMALL)]
        return as_json("POST", hostile.url, hostile.content(MODEL))

    def _file(self, chance: random.Random) -> Call:
        name, content = chance.choice(files())
        fields = {"purpose": "batch"}
        if chance.random() < 0.2:
            fields[chance.choice(["purpose", "expires_after[seconds]", "x"])] = text(chance)
        return form("/v1/files", fields, name, content)

    def _form(self, chance: random.Random) -> Call:
        path = chance.choice(["/v1/files", "/v1/uploads/upload_1/parts", "/ui/submit"])
        return chance.choice(FORMS)(path)

    def _batch(self, chance: random.Random) -> Call:
        body: Any = {
            "input_file_id": self._id(chance), "endpoint": CHAT_URL,
            "completion_window": chance.choice(["10s", "20s", "24h"]),
        }  # fmt: skip
        if chance.random() < 0.4:
            name = chance.choice([*body, "metadata", "output_expires_after", "x", "priority"])
            body[name] = value(chance)
        return as_json("POST", "/v1/batches", spoilt(chance, dump(body)))

    def _messages(self, chance: random.Random) -> Call:
        one: Any = {"custom_id": text(chance), "params": {
            "model": MODEL, "max_tokens": 3, "messages": [{"role": "user", "content": "x"}],
            chance.choice(FIELDS): value(chance),
        }}  # fmt: skip
        # Written once: 3,000 of them would hold Python's lock for seconds, as a slow answer looks.
        written = dump(one)
        most = max(1, LARGEST // len(written))
        requests = b", ".join([written] * min(most, chance.choice([1, 2, 3000])))
        content = b'{"requests": [' + requests + b"]}"
        return as_json("POST", "/v1/messages/batches", spoilt(chance, content))

    def _upload(self, chance: random.Random) -> Call:
        body: Any = {
            "bytes": 10, "filename": "a", "mime_type": "application/jsonl", "purpose": "batch",
        }  # fmt: skip
        if chance.random() < 0.7:
            body[chance.choice([*body, "expires_after", "x"])] = value(chance)
        return as_json("POST", "/v1/uploads", spoilt(chance, dump(body)))

    def _get(self, chance: random.Random) -> Call:
        path = chance.choice(OBJECTS)
        path = path.format(*(quote(self._id(chance), safe="") for _ in range(path.count("{"))))
        if chance.random() < 0.3:
            path = chance.choice(PAGES)
        method = chance.choices(["GET", "DELETE", "HEAD", "PATCH"], [12, 2, 1, 1])[0]
        return Call("", method, path, {}, b"")

    def _list(self, chance: random.Random) -> Call:
        names = ("after", "limit", "order", "purpose", "after_id", "before_id", "page", "status")
        fields = "&".join(
            f"{chance.choice(names)}={quote(text(chance).encode('utf-8', 'replace')[:2000])}"
            for _ in range(chance.choice([1, 2, 500]))
        )
        return Call("", "GET", f"{chance.choice(LISTS)}?{fields}"[:60_000], {}, b"")

    def _write(self, chance: random.Random) -> Call:
        path = chance.choice(WRITES).format(quote(self._id(chance), safe=""))
        content = dump({chance.choice(["part_ids", "md5", "x"]): value(chance)})
        if chance.random() < 0.4:
            content = b"csrf=x&key=" + b"&next=//x" * chance.choice([1, 5000])
        return as_json("POST", path, spoilt(chance, content))

    def _id(self, chance: random.Random) -> str:
        if chance.random() < 0.7:
            return self.known[int(chance.random() * len(self.known))]
        return text(chance).encode("utf-8", "replace").decode()[:2000]


# -- doing them -------------------------------------------------------------------------------


def make_calls(url: str, drawing: Drawing, count: int, at_once: int = 4) -> Judged:
    """Send so many calls, `at_once` at a time; judge each answer."""
    judged, lock, numbers = Judged(), threading.Lock(), iter(range(count))
    files()  # made now: packing them would look as slow answers do

    def work() -> None:
        with httpx.Client(base_url=url, timeout=PATIENCE_S) as client:
            while True:
                with lock:
                    number = next(numbers, None)
                if number is None:
                    return
                call = drawing.call(number)
                began = time.monotonic()
                wrong = _made(client, call, drawing, judged.statuses)
                with lock:
                    judged.slowest_s = max(judged.slowest_s, time.monotonic() - began)
                    if wrong:
                        told = f"call {number} of seed {drawing.seed}: {call.kind} {call.method} "
                        told += f"{call.path[:80]} {call.content[:80]!r}: {wrong}"
                        judged.broken.append(told)

    workers = [threading.Thread(target=work) for _ in range(at_once)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return judged


def _made(client: httpx.Client, call: Call, drawing: Drawing, statuses: Counter[int]) -> str:
    """Make a call; return what is wrong with its answer, or nothing."""
    try:
        with client.stream(
            call.method, call.path, headers=call.headers, content=call.content
        ) as answer:
            statuses[answer.status_code] += 1
            if answer.headers.get("content-type", "").startswith("text/event-stream"):
                next(answer.iter_raw(), b"")  # it may be without end
                return ""
            answer.read()
    except httpx.TransportError as error:
        return f"no answer: {error!r}"
    drawing.note(answer)
    if answer.status_code >= 500 and not (
        answer.status_code == 503 and "retry-after" in answer.headers
    ):
        return f"{answer.status_code} {answer.text[:300]}"
    return ""
