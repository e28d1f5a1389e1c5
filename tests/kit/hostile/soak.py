"""Ten tenants at the real engine for a long time, one of them hostile; what the nine notice.

First the nine are alone, then the tenth sends a hostile request after the other, drawn from the
list by a seed, online and as lines of batches. At last, as a control, the tenth sends honest heavy
requests in the same ways, and takes as many cores: what others wait then is sharing of a machine,
no attack. All parts are measured in the same way.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import httpx
import openai
import orjson
from kit.engines.run_batch_lines import NAME
from kit.hostile.attacked import Attacked
from kit.hostile.heavy_requests import HEAVY
from kit.hostile.hostile_batches import ends_of, send_as_batches
from kit.hostile.hostile_request import Hostile, chat
from kit.hostile.hostile_requests import REQUESTS
from kit.hostile.soak_report import Part, SoakReport, Span

from contract.openai.body import CHAT_URL

HONEST = 9
#: An honest client sends its next request so long after the last answer: think time, in seconds.
PAUSE_S = (0.2, 1.0)
LINES = 8
#: Nobody waits longer for a batch.
BATCH_S = 300.0
Requests = Mapping[str, Hostile]


class Soak:
    """Runs the parts on one stack; `said` is called when one has ended."""

    def __init__(self, on: Attacked, seed: int, said: Callable[[str], None] | None = None) -> None:
        self.on, self.report, self._said = on, SoakReport(seed), said or (lambda _: None)
        self._failed: list[BaseException] = []
        self._noting = threading.Lock()

    def run(self, alone_s: float, hostile_s: float, heavy_s: float = 0) -> SoakReport:
        """Run the parts; raise what a client raised that is no finding."""
        for request in (*REQUESTS.values(), *HEAVY.values()):
            request.content(NAME)  # now, since in its part it would take the others' time
        self._part("alone", alone_s, {})
        self._part("hostile", hostile_s, REQUESTS)
        if heavy_s:
            self._part("heavy", heavy_s, HEAVY, self.report.parts["hostile"].cores)
        return self.report

    def _part(self, name: str, seconds: float, tenth: Requests, cores: float = 0) -> None:
        """Run one: the tenth waits while all processes have had more than `cores`, if given."""
        part = self.report.parts[name] = Part()
        watch, before, began = self.on.watch, self.on.cpu_s(), time.monotonic()
        until = began + seconds
        watch.clear()

        def paced() -> bool:
            while (now := time.monotonic()) < until:
                if not cores or used(before, self.on.cpu_s()) <= cores * (now - began):
                    return True
                time.sleep(0.2)  # it is looked at again until it is its turn
            return False

        works = [lambda n=n: self._honest(n, part, until) for n in range(HONEST)]
        if tenth:
            works += [lambda way=way: way(part, tenth, paced)
                      for way in (self._online, self._in_batches)]  # fmt: skip
        self._together(works)
        after = self.on.cpu_s()
        part.lasted_s = time.monotonic() - began
        part.cpu_s = {name: after[name] - before.get(name, 0.0) for name in after}
        part.workers_ended, part.silent_s = len(watch.ended), watch.silent_s
        part.grown_mib = (watch.peak_bytes - self.on.base_bytes) // 2**20
        self._said(name)

    def _together(self, works: Sequence[Callable[[], None]]) -> None:
        threads = [threading.Thread(target=self._kept, args=(work,)) for work in works]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self._failed:
            raise self._failed[0]

    def _kept(self, work: Any) -> None:
        try:
            work()
        except Exception as error:
            self._failed.append(error)

    # -- the honest ones ----------------------------------------------------------------

    def _honest(self, number: int, part: Part, until: float) -> None:
        """Ask chats; every third tenant sends small batches, too."""
        chance = random.Random(f"{self.report.seed} {number}")
        key = self.on.key(f"honest-{number}")
        if number % 3:
            while time.monotonic() < until:
                self._chat(key, part)
                time.sleep(chance.uniform(*PAUSE_S))  # think time, not a synchronisation
            return
        with self.on.sdk(key) as client:
            while time.monotonic() < until:
                ids = [f"{number}-{n}" for n in range(LINES)]
                found = self._batch(client, ids)
                with self._noting:
                    part.batch_lines += len(ids)
                    part.lost += sum(1 for i in ids if not found[i])
                    part.doubled += sum(1 for i in ids if found[i] > 1)
                self._chat(key, part)

    def _chat(self, key: str, part: Part) -> None:
        began = time.monotonic()
        status, seconds = self.on.small_chat(key)
        with self._noting:
            part.chats.append(Span("chat", began, began + seconds))
            if status != 200:
                part.refused[str(status or "no answer")] += 1

    @staticmethod
    def _batch(client: openai.OpenAI, ids: list[str]) -> Counter[str]:
        """Send a batch; return how often each line was answered with 200."""
        lines = [
            {"custom_id": i, "method": "POST", "url": CHAT_URL, "body": chat(model=NAME)}
            for i in ids
        ]  # fmt: skip
        content = b"\n".join(map(orjson.dumps, lines))
        file = client.files.create(file=("in.jsonl", content), purpose="batch")
        made = client.batches.create(
            input_file_id=file.id, endpoint=CHAT_URL, completion_window="24h"
        )
        until = time.monotonic() + BATCH_S
        while made.status not in ("completed", "failed", "expired", "cancelled"):
            if time.monotonic() > until:
                return Counter()
            time.sleep(0.2)  # it is asked until it has ended
            made = client.batches.retrieve(made.id)
        if not made.output_file_id:
            return Counter()
        answers = client.files.content(made.output_file_id).content.splitlines()
        return Counter(orjson.loads(line)["custom_id"] for line in answers)

    # -- the tenth ----------------------------------------------------------------------

    def _online(self, part: Part, requests: Requests, paced: Callable[[], bool]) -> None:
        chance = random.Random(f"{self.report.seed} online")
        while paced():
            request, began = requests[chance.choice(list(requests))], time.monotonic()
            wrong = self.on.online(request)
            self._note(part, request.name, began, [wrong] if wrong else [])

    def _in_batches(self, part: Part, requests: Requests, paced: Callable[[], bool]) -> None:
        chance = random.Random(f"{self.report.seed} batches")
        with self.on.sdk(self.on.hostile) as client:
            while paced():
                # Each once: in a batch its name is its custom_id.
                drawn = [requests[name] for name in chance.sample(list(requests), 3)]
                began = time.monotonic()
                with suppress(openai.APIConnectionError, httpx.HTTPError):
                    for sent in send_as_batches(client, drawn):
                        for name, wrong in ends_of(client, sent, BATCH_S).items():
                            self._note(part, name, began, wrong)

    def _note(self, part: Part, name: str, began: float, wrong: list[str]) -> None:
        with self._noting:
            part.tenth.append(Span(name, began, time.monotonic()))
            if wrong:
                part.wrong_ends.setdefault(name, []).extend(wrong)


def used(before: Mapping[str, float], after: Mapping[str, float]) -> float:
    """Return the seconds of a core that all processes had in between."""
    return sum(after.values()) - sum(before.values())
