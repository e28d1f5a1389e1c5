"""Clients of gateways that are killed: each asks again until it has its answer."""

from __future__ import annotations

import io
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import openai
import orjson
from kit.gateways.http_batches import request
from openai.types import Batch

from gateway.batches.api.record import ENDED
from worker.engine.simulated.engine import digest

T = TypeVar("T")
#: A request that has no answer for so long, whatever was killed, is lost.
PATIENCE_S = 120.0
MODEL = "small"


class Slow(io.BytesIO):
    """A file that comes in pieces, with pauses: so there are moments at which half has come."""

    def __init__(self, data: bytes, pause_s: float) -> None:
        super().__init__(data)
        self._pause_s = pause_s

    def read(self, size: int | None = -1, /) -> bytes:
        time.sleep(self._pause_s)  # not a synchronisation: a client on a slow line
        return super().read(size)


@dataclass
class Asked:
    """A batch that a client has made, and what must come of it."""

    id: str
    kind: str
    file_id: str
    content: bytes
    custom_ids: list[str]


class Gateways:
    """The gateways as a client knows them: it asks one, and the next one if that has gone."""

    def __init__(self, urls: list[str]) -> None:
        self._clients = [
            openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=30)
            for url in urls
        ]
        #: Online requests that each gateway has not answered yet.
        self.online = [0] * len(urls)
        self.refused: Counter[str] = Counter()
        self._lock = threading.Lock()

    def close(self) -> None:
        for client in self._clients:
            client.close()

    def persistently(self, ask: Callable[[openai.OpenAI], T], *, online: bool = False) -> T:
        """Ask until there is an answer.

        Raises:
            openai.APIError: an error that no repetition heals, or none has healed in time.
        """
        until, at = time.monotonic() + PATIENCE_S, random.randrange(len(self._clients))
        while True:
            try:
                return self._once(ask, at, online)
            except (openai.APIConnectionError, openai.APIStatusError) as error:
                told = f"{getattr(error, 'status_code', 'gone')} {error.code or ''}".strip()
                with self._lock:
                    self.refused[told] += 1
                if not _heals(error) or time.monotonic() > until:
                    raise
            time.sleep(0.1)  # not a synchronisation: it asks again, as clients do
            at = (at + 1) % len(self._clients)

    def _once(self, ask: Callable[[openai.OpenAI], T], at: int, online: bool) -> T:
        with self._lock:
            self.online[at] += online
        try:
            return ask(self._clients[at])
        finally:
            with self._lock:
                self.online[at] -= online


def _heals(error: openai.APIError) -> bool:
    if not isinstance(error, openai.APIStatusError):
        return True
    running = error.code == "idempotency_in_progress" or error.status_code == 408
    # 500 is for bugs: none is expected whatever is killed.
    return running or error.status_code > 500


class Client:
    """One client: what it does is drawn by its seed, one batch after the other."""

    def __init__(self, gateways: Gateways, name: str, seed: int, most_lines: int) -> None:
        self.gateways = gateways
        self.made: list[Asked] = []
        self.answered = 0
        self._name = name
        self._random = random.Random(f"{seed} {name}")
        self._most = most_lines
        self._count = 0

    # -- batches ------------------------------------------------------------------------

    def batch(self, made: Callable[[Asked], None]) -> None:
        """Upload a file, make a batch of it, and wait for its end."""
        chance, name = self._random, f"{self._name}-{self._count}"
        self._count += 1
        large = chance.random() < 0.4
        lines = chance.randint(self._most // 2, self._most) if large else chance.randint(20, 600)
        kind = chance.choices(("whole", "cancelled", "late", "refused"), (7, 1, 1, 1))[0]
        ids = [f"{name}-{n}" for n in range(lines)]
        if kind == "refused":
            ids[-1] = ids[0]
        asked = [request(i, "none" if n == 3 else MODEL) for n, i in enumerate(ids)]
        content = b"\n".join(map(orjson.dumps, asked))
        upload = self._in_parts if chance.random() < 0.5 else self._whole
        file_id = upload(name, content)
        batch = self._ask(f"{name}-batch", lambda client, headers: client.batches.create(
            input_file_id=file_id, endpoint="/v1/chat/completions", extra_headers=headers,
            completion_window="5s" if kind == "late" else "1h",
        ))  # fmt: skip
        mine = Asked(batch.id, kind, file_id, content, ids)
        self.made.append(mine)
        made(mine)
        if kind == "cancelled":
            time.sleep(chance.uniform(0, 1))  # not a synchronisation: a moment at random
            self._cancel(batch.id)
        self.end_of(mine)

    def _cancel(self, batch_id: str) -> None:
        try:
            self.gateways.persistently(lambda client: client.batches.cancel(batch_id))
        except openai.BadRequestError:
            return  # it had ended by then

    def _ask(self, key: str, ask: Callable[[openai.OpenAI, dict[str, str]], T]) -> T:
        headers = {"Idempotency-Key": key}
        return self.gateways.persistently(lambda client: ask(client, headers))

    def _whole(self, name: str, content: bytes) -> str:
        pause = self._random.uniform(0, 0.02)
        return self._ask(f"{name}-file", lambda client, headers: client.files.create(
            file=("in.jsonl", Slow(content, pause)), purpose="batch", extra_headers=headers
        )).id  # fmt: skip

    def _in_parts(self, name: str, content: bytes) -> str:
        size, pause = -(-len(content) // self._random.randint(1, 4)), self._random.uniform(0, 0.02)
        upload = self._ask(f"{name}-upload", lambda client, headers: client.uploads.create(
            bytes=len(content), filename="in.jsonl", mime_type="application/jsonl",
            purpose="batch", extra_headers=headers,
        ))  # fmt: skip

        def part(at: int) -> str:
            piece = content[at : at + size]
            return self._ask(f"{name}-{at}", lambda client, headers: client.uploads.parts.create(
                upload.id, data=("part", Slow(piece, pause)), extra_headers=headers
            )).id  # fmt: skip

        parts = [part(at) for at in range(0, len(content), size)]
        done = self._ask(f"{name}-complete", lambda client, headers: client.uploads.complete(
            upload.id, part_ids=parts, extra_headers=headers
        ))  # fmt: skip
        assert done.file is not None
        return done.file.id

    def end_of(self, asked: Asked) -> Batch:
        """Wait for a batch's end.

        Raises:
            TimeoutError: nothing of it has moved for long.
        """
        last, since = "", time.monotonic()
        while True:
            batch = self.gateways.persistently(lambda client: client.batches.retrieve(asked.id))
            if batch.status in ENDED:
                return batch
            if (now := f"{batch.status} {batch.request_counts}") != last:
                last, since = now, time.monotonic()
            if time.monotonic() - since > PATIENCE_S:
                raise TimeoutError(f"{asked.id} ({asked.kind}) hangs: {last}")
            time.sleep(0.2)  # not a synchronisation: it is asked until it has ended

    # -- online ---------------------------------------------------------------------------

    def online(self) -> None:
        """Ask one chat, and judge its answer."""
        self._count += 1
        name = f"{self._name}-{self._count}"
        messages: Any = [{"role": "user", "content": name}]
        answer = self.gateways.persistently(lambda client: client.chat.completions.create(
            model=MODEL, messages=messages, user="simulate:sleep=0.2",
            extra_headers={"Idempotency-Key": name},
        ), online=True)  # fmt: skip
        assert answer.choices[0].message.content == f"simulated {digest({'messages': messages})}"
        self.answered += 1
