"""Ten tenants at the real engine for a long time, one of them hostile; what the nine notice.

First the nine are alone, then the tenth sends a hostile request after the other, drawn from the
list by a seed, online and as lines of batches. Both parts are measured in the same way.
"""

from __future__ import annotations

import json
import random
import threading
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import httpx
import openai
import orjson
from attacked import Attacked
from hostile_batches import ends_of, send_as_batches
from hostile_request import Hostile, chat
from hostile_requests import REQUESTS
from run_batch_lines import NAME

from contract.openai.body import CHAT_URL

HONEST = 9
#: An honest client sends its next request so long after the last answer: think time, in seconds.
PAUSE_S = (0.2, 1.0)
LINES = 8
#: p99 of the honest ones may be so many times that without the hostile one.
TIMES = 3.0
#: Nobody waits longer for a batch.
BATCH_S = 300.0


@dataclass
class Part:
    """What the honest tenants saw in one part."""

    seconds: list[float] = field(default_factory=list)
    refused: Counter[str] = field(default_factory=Counter)
    batch_lines: int = 0
    lost: int = 0
    doubled: int = 0

    def figures(self) -> dict[str, Any]:
        """Return counts, and the spread of the answers' times."""
        ordered = sorted(self.seconds) or [0.0]
        at = {f"p{p}_s": round(ordered[min(len(ordered) - 1, len(ordered) * p // 100)], 3)
              for p in (50, 99)}  # fmt: skip
        return at | {
            "chats": len(self.seconds), "refused": dict(self.refused), "lost": self.lost,
            "batch_lines": self.batch_lines, "doubled": self.doubled,
        }  # fmt: skip


@dataclass
class SoakReport:
    """What a soak did and found."""

    seed: int
    minutes: float
    alone: Part = field(default_factory=Part)
    beside: Part = field(default_factory=Part)
    hostile: Counter[str] = field(default_factory=Counter)
    #: How hostile requests ended that should have ended otherwise, by their names.
    wrong_ends: dict[str, list[str]] = field(default_factory=dict)
    workers_ended: int = 0
    silent_s: float = 0.0
    grown_mib: int = 0

    def text(self) -> str:
        """Return it as JSON for people."""
        told = vars(self) | {"alone": self.alone.figures(), "beside": self.beside.figures()}
        told["hostile"] = self.hostile.total()
        return json.dumps(told, indent=2)

    def broken(self) -> dict[str, object]:
        """Return the bars that broke."""
        alone, beside = self.alone.figures(), self.beside.figures()
        found: dict[str, object] = {}
        if beside["p99_s"] > TIMES * alone["p99_s"]:
            found["p99"] = f"{beside['p99_s']} s, alone {alone['p99_s']} s"
        for name, part in (("alone", alone), ("beside", beside)):
            found |= {f"{what}, {name}": part[what] for what in ("lost", "doubled", "refused")
                      if part[what]}  # fmt: skip
        if self.wrong_ends:
            found["own ends"] = self.wrong_ends
        if not self.hostile:
            found["hostile"] = "nothing was sent"
        return found


class Soak:
    """Runs the two parts on one stack."""

    def __init__(self, on: Attacked, seed: int, minutes: float) -> None:
        self.on, self.report = on, SoakReport(seed, minutes)
        self._random = random.Random(seed)
        self._failed: list[BaseException] = []

    def run(self, alone_s: float, beside_s: float) -> SoakReport:
        """Run both; raise what a client raised that is no finding."""
        for hostile in REQUESTS.values():
            hostile.content(NAME)  # now, since in the second part it would take the others' time
        self._part(self.report.alone, alone_s, ())
        self.on.watch.clear()
        attacks = (self._online, self._in_batches)
        self._part(self.report.beside, beside_s, attacks)
        watch = self.on.watch
        self.report.workers_ended = len(watch.ended)
        self.report.silent_s = round(watch.silent_s, 2)
        self.report.grown_mib = (watch.peak_bytes - self.on.base_bytes) // 2**20
        return self.report

    def _part(self, part: Part, seconds: float, attacks: Any) -> None:
        until, lock = time.monotonic() + seconds, threading.Lock()
        works = [lambda n=n: self._honest(n, part, until, lock) for n in range(HONEST)]
        works += [lambda attack=attack: attack(until) for attack in attacks]
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

    def _honest(self, number: int, part: Part, until: float, lock: threading.Lock) -> None:
        """Ask chats; every third tenant sends small batches, too."""
        chance = random.Random(f"{self.report.seed} {number}")
        key = self.on.key(f"honest-{number}")
        if number % 3:
            while time.monotonic() < until:
                self._chat(key, part, lock)
                time.sleep(chance.uniform(*PAUSE_S))  # think time, not a synchronisation
            return
        with self.on.sdk(key) as client:
            while time.monotonic() < until:
                ids = [f"{number}-{n}" for n in range(LINES)]
                found = self._batch(client, ids)
                with lock:
                    part.batch_lines += len(ids)
                    part.lost += sum(1 for i in ids if not found[i])
                    part.doubled += sum(1 for i in ids if found[i] > 1)
                self._chat(key, part, lock)

    def _chat(self, key: str, part: Part, lock: threading.Lock) -> None:
        status, seconds = self.on.small_chat(key)
        with lock:
            part.seconds.append(seconds)
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

    # -- the hostile one ----------------------------------------------------------------

    def _drawn(self) -> Hostile:
        return REQUESTS[self._random.choice(list(REQUESTS))]

    def _online(self, until: float) -> None:
        while time.monotonic() < until:
            hostile = self._drawn()
            wrong = self.on.online(hostile)
            self._note(hostile.name, [wrong] if wrong else [])

    def _in_batches(self, until: float) -> None:
        key = self.on.hostile
        with self.on.sdk(key) as client:
            while time.monotonic() < until:
                # Each once: in a batch its name is its custom_id.
                drawn = [REQUESTS[name] for name in self._random.sample(list(REQUESTS), 3)]
                with suppress(openai.APIConnectionError, httpx.HTTPError):
                    for sent in send_as_batches(client, drawn):
                        for name, wrong in ends_of(client, sent, BATCH_S).items():
                            self._note(name, wrong)

    def _note(self, name: str, wrong: list[str]) -> None:
        self.report.hostile[name] += 1
        if wrong:
            self.report.wrong_ends.setdefault(name, []).extend(wrong)
