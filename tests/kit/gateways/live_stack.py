"""A Redis, a worker with the simulated engine and a gateway, asked as OpenAI's clients ask."""

from __future__ import annotations

import hashlib
import socket
from collections import Counter
from pathlib import Path
from typing import Any

import openai
import orjson
from kit.gateways.gateway_process import GatewayProcess
from kit.stacks.celery_side import simulated

from contract import naming
from contract.redis import keys
from contract.redis.batches import BatchStore
from demo.stack import RedisServer, Worker, eventually

MODEL = "small"
QUEUE = f"{naming.DEFAULT_QUEUE}.{MODEL}"
HELLO: Any = [{"role": "user", "content": "Hello"}]


class Stack:
    """One of each, four slots; `settings` are the gateway's, `traces` both sides'. `client` is the
    SDK's."""

    def __init__(
        self, folder: Path, *, worker: bool = True, traces: float | None = None, **settings: object
    ) -> None:
        self.folder = folder
        self.redis = RedisServer(folder / "redis")
        self.log = folder / "engine.log"
        traced = {} if traces is None else {"traces": traces}
        self.worker: Worker = simulated(
            self.redis.url, folder / "worker.log", served_model_name=MODEL, simulated_slots=4,
            look_ahead=0, simulated_log=self.log, lease_s=6, **traced,
        )  # fmt: skip
        self._with_worker = worker
        self.gateway = GatewayProcess(self.redis.url, folder, **settings, **traced)
        self.url = f"{self.gateway.url}/v1"
        self.client = openai.OpenAI(base_url=self.url, api_key="none", max_retries=0, timeout=30)

    def __enter__(self) -> Stack:
        try:
            self.redis.start()
            self.store = BatchStore(self.redis.client(), ttl_ms=60_000)
            if self._with_worker:
                self.worker.start()
                eventually(self.store.announcements, 30, "a worker announces itself")
            self.gateway.start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()
        self.gateway.kill()
        if self.worker.process is not None:
            self.worker.kill()
        self.redis.stop()

    # -- asking -----------------------------------------------------------------------

    def begin(self, user: str, **fields: object) -> socket.socket:
        """Send a chat, whose `user` is its fate, and read no answer."""
        body = orjson.dumps({"model": MODEL, "messages": HELLO, "user": user} | fields)
        sock = socket.create_connection(("127.0.0.1", self.gateway.port))
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: {len(body)}"
        )
        sock.sendall(head.encode() + b"\r\n\r\n" + body)
        return sock

    @staticmethod
    def text_of(question: str) -> str:
        """Return what the simulated engine answers."""
        prompt = orjson.dumps([{"role": "user", "content": question}])
        return "simulated " + hashlib.sha256(prompt).hexdigest()[:16]

    @staticmethod
    def said(answer: Any) -> str:
        """Return the text of an answer of the SDK, streamed or not."""
        if hasattr(answer, "choices"):
            return str(answer.choices[0].message.content)
        return "".join(chunk.choices[0].delta.content or "" for chunk in answer)

    # -- looking ----------------------------------------------------------------------

    def started(self) -> int:
        """Return how many computations the engine has begun."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return sum(line.startswith("start ") for line in lines)

    def running(self) -> int:
        """Return how many requests the worker holds."""
        (found,) = self.store.workers(QUEUE) or [{"id": ""}]
        return int(self.store._client.hlen(keys.worker_key(found["id"])))

    def waiting(self) -> int:
        """Return how many messages wait."""
        return sum(self.waiting_by_step().values())

    def waiting_by_step(self) -> dict[str, int]:
        """Return how many messages wait at each priority."""
        counts: Counter[str] = Counter()
        for key, count in self.store.queue_lengths(QUEUE).items():
            counts[key.partition(naming.PRIORITY_SEPARATOR)[2][:1] or "0"] += count
        return {step: n for step, n in counts.items() if n}

    def revoked(self) -> list[bytes]:
        """Return the requests that were cancelled."""
        return list(self.store._client.zrange(keys.REVOKED, 0, -1))

    def messages(self) -> list[dict[str, Any]]:
        """Return the messages that wait."""
        found = (self.store._client.lrange(key, 0, -1) for key in self.store.queue_lengths(QUEUE))
        return [orjson.loads(raw) for raws in found for raw in raws]
