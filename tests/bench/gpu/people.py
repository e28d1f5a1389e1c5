"""People at a server with OpenAI's API: requests at random times, and what they feel."""

from __future__ import annotations

import asyncio
import random
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, ClassVar

import aiohttp
import orjson
from bench.common import report
from bench.gpu.workload import LETTERS

from contract.openai.body import COMPLETION_URL

#: Letters of a person's prompt, each of which is a token, and tokens of the answer.
PROMPT, TOKENS = 256, 64
#: Longest wait for the answers to the last requests, and for the server's metrics.
ANSWER_S, ASK_S = 20.0, 5.0
#: Seconds between two looks at server and worker.
LOOK_S = 1.0
#: First token, in milliseconds, within which people are also looked for after they have come back.
WITHIN_MS = (100.0, 200.0)
METRIC = re.compile(
    rb"^vllm:(num_requests_running|num_requests_waiting|generation_tokens_total)(?:\{.*\})? (\S+)$",
    re.MULTILINE,
)


@dataclass(slots=True)
class Felt:
    """One request: when it was sent, when its tokens came, and how many came each time."""

    sent: float
    came: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    error: str = ""
    #: When it was given up; 0 if it was not.
    left: float = 0.0

    @property
    def first_s(self) -> float:
        """Seconds to the first token; without one, the seconds until the request was given up."""
        return (self.came[0] if self.came else self.left) - self.sent

    @property
    def gaps_s(self) -> list[float]:
        """Seconds between one arrival of tokens and the next."""
        return [after - before for before, after in zip(self.came, self.came[1:], strict=False)]

    @property
    def answered(self) -> bool:
        """Whether the whole answer came."""
        return not self.error and sum(self.counts) == TOKENS


class People:
    """Sends requests, and keeps what was felt of each; `model` is the server's name for it."""

    def __init__(self, session: aiohttp.ClientSession, url: str, model: str) -> None:
        self.felt: list[Felt] = []
        self._session, self._url, self._model = session, url, model
        self._coming: asyncio.Task[None] | None = None
        self._requests: list[asyncio.Task[None]] = []

    def come(self, rate: float, seed: int) -> None:
        """Begin to send `rate` requests a second, as a Poisson process."""
        self._coming = asyncio.create_task(self._come(rate, random.Random(seed)))

    async def leave(self) -> None:
        """Send no more; wait for the answers, and give up what is not answered in time."""
        if self._coming is not None:
            self._coming.cancel()
            with suppress(asyncio.CancelledError):
                await self._coming
        if self._requests:
            _, late = await asyncio.wait(self._requests, timeout=ANSWER_S)
            for request in late:
                request.cancel()
            await asyncio.gather(*late, return_exceptions=True)

    def between(self, begin: float, end: float) -> list[Felt]:
        """Return the requests that were sent in this time."""
        return [one for one in self.felt if begin <= one.sent < end]

    def tokens(self, begin: float, end: float) -> int:
        """Return how many tokens people received in this time."""
        return sum(
            count
            for one in self.felt
            for at, count in zip(one.came, one.counts, strict=True)
            if begin <= at < end
        )

    async def _come(self, rate: float, rng: random.Random) -> None:
        at = time.monotonic()
        while True:
            at += rng.expovariate(rate)
            await asyncio.sleep(max(0.0, at - time.monotonic()))
            prompt = "".join(rng.choices(LETTERS, k=PROMPT))
            self._requests.append(asyncio.create_task(self._ask(prompt)))

    #: What each stream tells of its tokens: their number in every chunk.
    stream_options: ClassVar[dict[str, bool]] = {
        "include_usage": True, "continuous_usage_stats": True,
    }  # fmt: skip

    @staticmethod
    def note(one: Felt, event: dict[str, Any]) -> None:
        """Note a chunk of the answer; the last one, the usage of all, has no token."""
        if event["choices"] and (more := event["usage"]["completion_tokens"] - sum(one.counts)) > 0:
            one.came.append(time.monotonic())
            one.counts.append(more)

    async def _ask(self, prompt: str) -> None:
        body = {
            "model": self._model, "prompt": prompt, "max_tokens": TOKENS, "temperature": 0,
            "ignore_eos": True, "stream": True, "stream_options": self.stream_options,
        }  # fmt: skip
        one = Felt(time.monotonic())
        self.felt.append(one)
        try:
            async with self._session.post(self._url + COMPLETION_URL, json=body) as answer:
                if answer.status != 200:
                    one.error = f"{answer.status}: {(await answer.text())[:200]}"
                async for line in answer.content:
                    self.read_line(one, line)
        except (aiohttp.ClientError, OSError) as error:
            one.error = repr(error)
        except asyncio.CancelledError:
            one.error = "not answered in time"
            raise
        finally:
            one.left = time.monotonic()

    @classmethod
    def read_line(cls, one: Felt, line: bytes) -> None:
        """Note a line of the stream."""
        if not line.startswith(b"data: {"):
            return  # [DONE], or between two events
        event = orjson.loads(line[6:])
        if "error" in event:
            one.error = str(event["error"])[:200]
        else:
            cls.note(one, event)


# -- what was felt ------------------------------------------------------------------------


def in_ms(values: Sequence[float]) -> dict[str, float] | None:
    """Return p50, p99 and the greatest of some seconds, in milliseconds."""
    if not values:
        return None
    return {
        "p50": round(1000 * report.percentile(values, 0.5), 2),
        "p99": round(1000 * report.percentile(values, 0.99), 2),
        "max": round(1000 * max(values), 2),
    }


def feelings(felt: Sequence[Felt]) -> dict[str, Any]:
    """Return what people felt; every first token is kept, so that rounds can be pooled."""
    firsts = [one.first_s for one in felt]
    return {
        "requests": len(felt),
        "failed": sum(not one.answered for one in felt),
        "errors": sorted({one.error for one in felt if one.error})[:3],
        "first_ms": in_ms(firsts),
        "between_ms": in_ms([gap for one in felt for gap in one.gaps_s]),
        "every_first_ms": [round(1000 * first, 1) for first in firsts],
    }


def by_second(felt: Sequence[Felt], begin: float) -> list[dict[str, float]]:
    """Return what the requests of each second since `begin` felt until the first token."""
    seconds: dict[int, list[float]] = {}
    for one in felt:
        seconds.setdefault(int(one.sent - begin), []).append(one.first_s)
    return [
        {"s": second, "requests": len(firsts)} | (in_ms(firsts) or {})
        for second, firsts in sorted(seconds.items())
    ]


def recovered_s(felt: Sequence[Felt], begin: float, target_s: float) -> float | None:
    """Return the seconds since `begin` until the p99 of one second's requests is within a target.

    0: it was never missed; None: it was missed to the end.
    """
    missed = [one.sent for one in felt if one.first_s > target_s]
    if not missed:
        return 0.0
    end = max(one.sent for one in felt)
    tenth = int(10 * (min(missed) - begin)) + 1
    while (at := begin + tenth / 10) <= end:
        last = [one.first_s for one in felt if at - 1 <= one.sent < at]
        if last and report.percentile(last, 0.99) <= target_s:
            return tenth / 10
        tenth += 1
    return None


# -- what the server and the worker show ------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Look:
    """What the server shows at a time, and what the worker last announced, if anything."""

    at: float
    running: int
    waiting: int
    tokens: float
    worker: dict[str, Any]

    @property
    def shared(self) -> dict[str, Any]:
        """What the worker announces of a server that people use; empty without that setting."""
        found: dict[str, Any] = next(iter(self.worker.get("shared") or ()), {})
        return found


class Watch:
    """Looks at the server's metrics and at the worker's announcement every second."""

    def __init__(
        self, session: aiohttp.ClientSession, url: str,
        announced: Callable[[], list[dict[str, Any]]],
    ) -> None:  # fmt: skip
        self.looks: list[Look] = []
        self.unanswered = 0
        self._session, self._url, self._announced = session, url, announced

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            try:
                await self.look()
            except (TimeoutError, aiohttp.ClientError, OSError):
                self.unanswered += 1
            await asyncio.sleep(LOOK_S)

    async def look(self) -> Look:
        """Look now."""
        workers = await asyncio.to_thread(self._announced)
        async with asyncio.timeout(ASK_S), self._session.get(f"{self._url}/metrics") as answer:
            values = read(await answer.read())
        look = Look(
            time.monotonic(), int(values["num_requests_running"]),
            int(values["num_requests_waiting"]), values["generation_tokens_total"],
            workers[0] if workers else {},
        )  # fmt: skip
        self.looks.append(look)
        return look

    def over_time(self, begin: float) -> dict[str, Any]:
        """Return limit and requests in flight by seconds since `begin`, and the limit's reasons."""
        why: dict[str, int] = {}
        for look in self.looks:
            if reason := look.shared.get("why"):
                words = re.sub(r"[\d.]+", "N", reason)
                why[words] = why.get(words, 0) + 1
        return {
            "columns": ["s", "limit", "in_flight", "running", "waiting"],
            "rows": [
                [round(look.at - begin, 1), *(look.shared.get(name, look.worker.get(name))
                 for name in ("limit", "in_flight")), look.running, look.waiting]
                for look in self.looks
            ],
            "why": why,
            "unanswered": self.unanswered,
        }  # fmt: skip


def read(metrics: bytes) -> dict[str, float]:
    """Return the sums of the server's metrics that are needed here, by name."""
    found = dict.fromkeys(
        ("num_requests_running", "num_requests_waiting", "generation_tokens_total"), 0.0
    )
    for name, value in METRIC.findall(metrics):
        found[name.decode()] += float(value)
    return found


def returned(felt: Sequence[Felt], before: Look) -> dict[str, Any]:
    """Return what people felt who came back all at once, and when the targets held again."""
    targets = {f"{limit:g} ms": limit for limit in WITHIN_MS}
    if target := before.shared.get("ttft_ms_target"):
        targets["target"] = float(target)
    return {
        "limit_before": before.shared.get("limit"),
        "target_ms": before.shared.get("ttft_ms_target"),
        "within_s": {
            name: recovered_s(felt, before.at, limit / 1000) for name, limit in targets.items()
        },
        "by_second": by_second(felt, before.at),
        **feelings(felt),
    }


# -- figures ------------------------------------------------------------------------------


def reached(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return each row's figures over the rounds, and ratios of rows of one round."""
    found: dict[str, Any] = {}
    measured = {(row["round"], row["row"]): row for row in rows if "error" not in row}
    values = {key: figures(row) for key, row in measured.items()}
    for name in dict.fromkeys(row for _, row in values):
        mine = [value for (_, row), value in values.items() if row == name]
        for figure in dict.fromkeys(figure for one in mine for figure in one):
            found[f"{name}: {figure}"] = report.spread([o[figure] for o in mine if figure in o], 2)
    pairs = [("people", "alone"), ("no-policy", "alone"), ("today", "alone"), ("people", "today"),
             ("no-policy", "today"), ("night", "night-today")]  # fmt: skip
    for over, base in pairs:
        rounds = [(values[turn, over], values[turn, base]) for turn, row in values
                  if row == over and (turn, base) in values]  # fmt: skip
        for figure in ("first p50 ms", "first p99 ms", "between p50 ms", "between p99 ms",
                       "batch tokens/s"):  # fmt: skip
            ratios = [a[figure] / b[figure] for a, b in rounds if a.get(figure) and b.get(figure)]
            if ratios:
                found[f"{over} to {base}: {figure}"] = report.spread(ratios, 3)
    return found


def pooled(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, float] | None]:
    """Return what people felt until the first token in all rounds of each row together."""
    firsts: dict[str, list[float]] = {}
    for row in rows:
        if "error" not in row:
            found = [first / 1000 for first in row["people"]["every_first_ms"]]
            firsts.setdefault(row["row"], []).extend(found)
    return {name: in_ms(found) for name, found in firsts.items()}


def figures(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the figures of a row by name."""
    found: dict[str, float] = {}
    for kind, felt in (("", row["people"]), ("return ", row.get("return"))):
        for name in ("first", "between") if felt else ():
            for part, value in (felt[f"{name}_ms"] or {}).items():
                found[f"{kind}{name} {part} ms"] = value
    if "requests_left" in row:
        found["batch tokens/s"] = row["batch_tokens_per_s"]
        found["running"] = row["running"]
    for name, seconds in row["return"]["within_s"].items() if "return" in row else ():
        if seconds is not None:
            found[f"return within {name}, s"] = seconds
    return found


def show(rows: Sequence[dict[str, Any]]) -> None:
    """Print the rows and the ratios."""
    head = ("first p50 ms", "first p99 ms", "between p50 ms", "between p99 ms", "batch tokens/s",
            "running")  # fmt: skip
    lines = [
        (f"{row['row']} {row['round']}", *(str(found.get(name, "")) for name in head))
        for row in rows if "error" not in row and (found := figures(row))
    ]  # fmt: skip
    report.table("rows", ("row, round", *head), lines)
    ratios = [(name, report.shown(one)) for name, one in reached(rows).items()
              if " to " in name or "return" in name]  # fmt: skip
    report.table(
        "ratios, and people who come back", ("figure", "median (least to greatest)"), ratios
    )
