"""Reads a file as submit would, without queueing it, and adds up what it asks for.

Bodies and custom_ids are remembered in tables of fixed size, beginnings as order/ does it.
"""

import hashlib
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import orjson

from contract.message import MessageWriter
from contract.openai.body import LIMITS
from contract.settings import Settings
from producer.input.reader import RawChunk
from producer.input.seen import SeenIds
from producer.submit.lines import LinesToMessages, PreparedChunk
from producer.submit.order.keys import keys_of, text_of
from producer.submit.order.plan import UNKNOWN_CACHE_TOKENS, plan
from producer.submit.order.records import Records
from producer.submit.plan.content import FileContent, Shared
from producer.submit.plan.prompts import Prompt, prompt_of
from producer.submit.plan.tokens import Estimate

#: Bad lines that are told, as submit would tell them.
TOLD = 10
#: As long as those of a real batch, for the sizes of messages.
_CREATED, _LIFE = 1_700_000_000_000, "sixteen.letters.12345"


class _Look(MessageWriter):
    """Writes messages as submit would, and shows each request to `look`."""

    def __init__(self, look: Callable[[str, bytes], None], batch_id: str, queue: str) -> None:
        super().__init__(batch_id, _CREATED, _LIFE, queue, 6)
        self._look = look

    def write(
        self,
        request_id: str,
        custom_id: str | None,
        line: int,
        url: str,
        body: bytes,
        sequences: int = 1,
    ) -> bytes:
        """Return one message."""
        self._look(url, body)
        return super().write(request_id, custom_id, line, url, body, sequences)


class FileReader:
    """Reads one file.

    Args:
        overrides: body fields that replace those of every line.
        counter: counts the tokens of prompts.
        mean_answer: tokens of the queue's answers on average; None if nobody knows.
        cache: tokens that the workers' prefix caches hold; None if nobody knows.
    """

    def __init__(
        self,
        settings: Settings,
        queue: str,
        overrides: dict[str, Any],
        counter: Estimate,
        mean_answer: float | None,
        cache: int | None = None,
        batch_id: str = "plan",
    ) -> None:
        self.content = FileContent()
        self._counter = counter
        self._mean = mean_answer
        self._bodies: list[tuple[str, dict[str, Any]]] = []
        self._ids, self._same = SeenIds(), SeenIds()
        self._cache = UNKNOWN_CACHE_TOKENS if cache is None else cache
        self._texts: list[list[bytes]] = []
        self._records = Records()
        self._lines = LinesToMessages(
            batch_id,
            _Look(self._look, batch_id, queue),
            overrides,
            settings.max_line_bytes,
            self._ids,
        )

    def read(
        self, raw_chunks: Iterator[RawChunk], report: Callable[[FileContent], None]
    ) -> FileContent:
        """Read to the end; `report` is called now and then with what was found so far.

        Raises:
            InputUnreadable: for damaged input.
        """
        with closing(self._records):
            with closing(self._ids), closing(self._same):  # the plan needs their memory
                for raw in raw_chunks:
                    self._take(self._lines.prepare(raw, (0, "")))
                    self.content.lines = raw.cursor
                    report(self.content)
            found = plan(self._records, self._cache)
        self.content.shared = Shared(found.prompt, found.saved, found.saved_as_is, found.distinct)
        return self.content

    def _look(self, url: str, raw: bytes) -> None:
        body = orjson.loads(raw)
        self._bodies.append((url, body))
        self._texts.append(text_of(url, raw))
        same = orjson.dumps([url, body], option=orjson.OPT_SORT_KEYS)
        new = self._same.add(hashlib.blake2b(same, digest_size=16).hexdigest())
        self.content.duplicates += not new

    def _take(self, chunk: PreparedChunk) -> None:
        content, bodies = self.content, self._bodies
        content.requests += len(bodies)
        content.bad += len(chunk.rejects)
        content.without_limit += chunk.without_limit
        content.message_bytes += sum(map(len, chunk.messages))
        content.index_bytes += len(chunk.index.dump())
        for _, meta in chunk.rejects:
            content.reject_bytes += len(meta)
            if len(content.first_bad) < TOLD:
                content.first_bad.append(orjson.loads(meta)["warmq"]["error"]["message"])
        prompts = [prompt_of(url, body, self._counter.chat) for url, body in bodies]
        counts = self._counter.count(prompts)
        for (url, body), prompt, count in zip(bodies, prompts, counts, strict=True):
            self._add(url, body, prompt, count)
        bodies.clear()
        self._records.add(*keys_of(self._texts))
        self._texts.clear()

    def _add(self, url: str, body: dict[str, Any], prompt: Prompt, count: int) -> None:
        content = self.content
        content.prompt_tokens += count
        content.estimated += not self._counter.exact(prompt)
        if url not in LIMITS:
            return
        choices = body.get("n") or 1
        limit = next((body[name] for name in reversed(LIMITS[url]) if body.get(name)), None)
        fixed = limit is not None and (body.get("ignore_eos") or body.get("min_tokens") == limit)
        content.choices += choices
        content.fixed += bool(fixed)
        content.limits += choices * (limit or 0)
        usual = limit if fixed or self._mean is None else min(self._mean, limit or self._mean)
        content.expected.add(count, usual or 0, choices)
        content.most.add(count, limit or usual or 0, choices)
