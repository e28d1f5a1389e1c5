"""Measures once a second what people feel at a server that they share with the worker.

guard.py decides how many requests may be in flight.
"""

import asyncio
import math
import time
from statistics import median
from typing import Any

from contract.openai.body import CHAT_URL, COMPLETION_URL, COUNTING
from worker.engine.openai.exchange import Json, smallest
from worker.engine.openai.guard import PROBES, QUIET_PROBES, Guard, Observed
from worker.engine.openai.metrics import Metrics, Seconds
from worker.engine.openai.retries import Unanswered
from worker.engine.openai.server_share import Lease, Report, ServerShare
from worker.engine.openai.upstream import Upstream
from worker.engine.remote.servers import Servers

#: vLLM's `priority` of our requests; people's is 0, and requests with lower numbers come first.
PRIORITY = 10
#: Seconds between two probes while no request of ours is in flight.
QUIET_PROBE_S = 10
#: Multiple of a late probe's time limit after which it is ended.
LATEST_PROBE = 10
#: Seconds after a probe's end in which the server may still show it.
STILL_SHOWN_S = 0.1
#: Mean times between tokens from one start of ours to the next. A step that reads a prompt takes
#: longer than the mean step. Measured with 1, 1.25 and 1.5 (docs/evidence/openai-servers.md).
PACE = 1.25
#: The X-Request-Id header of a probe.
PROBE_ID = "warmq-probe"


def priority(url: str, body: Json) -> Json:
    """Return the `priority` that puts a request behind people's; a higher one of its own stays."""
    return {} if url in COUNTING else {"priority": max(PRIORITY, body.get("priority") or 0)}


class Sharing:
    """Adapts the limit of one server: `next_limit` is called once a second.

    Of several workers at the server, the leader measures it and publishes the limit of them all;
    each has a share of it. Without Redis each measures for itself, and keeps to its last share.
    """

    def __init__(
        self,
        upstream: Upstream,
        guard: Guard,
        share: ServerShare,
        fleet: Servers[Upstream],
        *,
        aborts: bool = False,
    ) -> None:
        """Set the server's limit to 0; `aborts`: a pause also ends the requests that run."""
        self._upstream, self.guard, self._servers = upstream, guard, fleet
        self.share, self._aborts = share, aborts
        self._renewing: asyncio.Task[None] | None = None
        self._seconds = Seconds()
        self._probe: asyncio.Task[None] | None = None
        #: The probes at the server, and the time at which the latest one ended.
        self._sent: set[asyncio.Task[bool]] = set()
        self._ended_at = -math.inf
        self._ttft_s: float | None = None
        #: Requests of all clients in the server, as far as it shows them.
        self._present: int | None = None
        self._quiet_s = 0
        #: Whether this worker measures the server, and the quiet steps that Redis knows of.
        self._leads = False
        self._kept = 0
        #: Urls that the server refuses for probes.
        self._refused: set[str] = set()
        #: The limit that was set here; a rest of the server may have lowered it since.
        self._given = upstream.limit = 0
        upstream.adapt, upstream.sharing = self.next_limit, self.shown

    def next_limit(self, metrics: Metrics | None, own: int) -> int:
        """Return the limit for the next second; `own` is the most requests of ours in flight."""
        if self._renewing is None:
            self._renewing = asyncio.create_task(self.share.run(self._report, self._renewed))
        lease = self.share.lease
        if lease is None or lease.leads:
            self._lead(metrics, own, lease)
            self.share.renew_soon()
            if self.guard.paused:
                self._abort()
        self._upstream.pace_s = self._pace_s()
        self._given = self._own_limit()
        return self._given

    def _pace_s(self) -> float:
        """Return the least seconds between two starts: all workers start one request in PACE steps.

        A step that reads several prompts takes longer, and gives people's answers their next token
        later. Each step gives a token, so the time between tokens is that of a step.
        """
        shown, lease = self.shown(), self.share.lease
        workers = lease.peers + 1 if lease is not None else 1
        step_s = 0.0 if shown.get("nobody_else") else (shown.get("itl_ms") or 0.0) / 1000
        return PACE * workers * step_s

    def shown(self) -> dict[str, Any]:
        """Return what people feel, and how much of the server is ours, for `inspect stats`."""
        lease = self.share.lease
        followed = lease is not None and not lease.leads
        measured = lease.shown if lease is not None and followed else self._measured()
        limit = lease.limit if lease is not None and followed else self.guard.limit
        peers, in_flight = (lease.peers, lease.peers_in_flight) if lease else (0, 0)
        return measured | {
            "limit": limit or 0,
            "in_flight": self._upstream.in_flight + in_flight,
            "workers": peers + 1,
            "tokens_today": self.share.tokens_today,
        }

    async def close(self) -> None:
        """End the probe and the renewals, and give the share back."""
        tasks: list[asyncio.Task[Any]] = [*self._sent]
        tasks += [task for task in (self._probe, self._renewing) if task is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        await self.share.leave()

    # -- the share ----------------------------------------------------------------

    def _report(self) -> Report:
        """Return what this worker reports at its next renewal."""
        upstream, lease = self._upstream, self.share.lease
        can_lead = upstream.up and not upstream.breaker.resting
        if lease is None or not lease.leads:
            return Report(can_lead, self._servers.waiting)
        guard, quiet = self.guard, None
        if guard.quiet_steps != self._kept:
            self._kept, quiet = guard.quiet_steps, guard.quiet
        return Report(can_lead, self._servers.waiting, guard.limit, self._measured(), quiet)

    def _measured(self) -> dict[str, Any]:
        return self.guard.shown() | {"paused": self.guard.paused, "in_server": self._present}

    def _abort(self) -> None:
        if self._aborts:
            self._upstream.return_requests()

    def _renewed(self) -> None:
        """Follow the new lease, or the lack of one."""
        lease = self.share.lease
        if lease is not None:
            if not lease.leads:
                self._leads = False
                if lease.shown.get("paused"):
                    self._abort()
            elif self.guard.learning:
                self._learn(lease)
        self._note_rest()
        limit, upstream = self._own_limit(), self._upstream
        upstream.pace_s = self._pace_s()
        rests = upstream.breaker.resting or time.monotonic() < upstream.rest_until
        if limit < upstream.limit or not rests:
            self._given = upstream.limit = limit
            self._servers.hand_out()

    def _learn(self, lease: Lease) -> None:
        self.guard.learn(*lease.quiet)
        self._kept = self.guard.quiet_steps

    def _own_limit(self) -> int:
        """Return this worker's part of the limit."""
        lease, latest = self.share.lease, self.share.latest
        if not self.share.tried:
            return 0  # other workers may have all that the server can do
        if lease is None:
            most = latest.share if latest is not None and latest.peers else self.guard.limit
            return min(most, self.guard.limit)
        if not lease.leads:
            return lease.share
        return min(lease.share, self.guard.limit) if lease.peers else self.guard.limit

    def _note_rest(self) -> None:
        """Lower the limit of all workers by the part by which a rest has lowered this one's."""
        lowered = self._upstream.limit
        if lowered < self._given:
            self.guard.limit = self.guard.limit * lowered // self._given
            self._given = lowered

    # -- measuring ----------------------------------------------------------------

    def _lead(self, metrics: Metrics | None, own: int, lease: Lease | None) -> None:
        """Measure the last second, and find the limit of all workers for the next one."""
        if not self._leads:
            self._take_over(lease)
        total = own + (lease.peers_in_flight if lease is not None else 0)
        probing = self._probe is not None and not self._probe.done()
        ended = time.monotonic() - self._ended_at < STILL_SHOWN_S
        most = total + len(self._sent) + ended
        if lease is not None and lease.peers:  # they may use their shares since they reported
            most = max(most, self.guard.limit + len(self._sent) + ended)
        shown = self._seconds.next(metrics, most, self.share.finished)
        self._present = shown.present
        ttft_s, self._ttft_s = self._ttft_s, None
        self._note_rest()
        limit = self.guard.step(
            Observed(total, ttft_s, shown.itl_s, shown.waiting, shown.other_clients)
        )
        busy = total > 0 or self.guard.learning or not limit
        self._quiet_s = 0 if busy else self._quiet_s + 1
        if not probing and (busy or self._quiet_s % QUIET_PROBE_S == 1):
            self._probe = asyncio.create_task(self._measure(PROBES if total else QUIET_PROBES))

    def _take_over(self, lease: Lease | None) -> None:
        """Begin to measure, from the values of the worker that measured until now."""
        self._leads, self._seconds, self._ttft_s = True, Seconds(), None
        latest = self.share.latest
        if latest is None:
            return
        self._learn(latest)
        limit = latest.share if lease is None else latest.limit
        if limit is not None:
            self.guard.take_over(limit)

    async def _measure(self, times: int) -> None:
        """Send probes, and note the median of their times; if most are much too late, pause."""
        tokens, times_s, late = self.guard.probe_tokens, list[float](), 0
        for _ in range(times if tokens == 1 else 1):
            if (answer_s := await self._send(tokens)) is not None:
                times_s.append(answer_s)
                late += answer_s >= self.guard.patience_s
            if late > times // 2:  # the median is late, whatever the remaining probes show
                break
        if tokens == 1 and times_s:
            self._ttft_s = median(times_s)
            if self._leads and not self.guard.alarm(self._ttft_s):
                self._given = self._upstream.limit = 0
                self.share.renew_soon()
                if self.guard.paused:
                    self._abort()

    async def _send(self, tokens: int) -> float | None:
        """Send one probe; return the seconds that it took, or None if it shows nothing."""
        urls = (CHAT_URL, COMPLETION_URL, *self._upstream.breaker.served)
        url = next((url for url in urls if url not in self._refused), None)
        if url is None:
            return None
        began, patience_s = time.monotonic(), self.guard.patience_s
        sent = asyncio.create_task(self._ask(url, tokens, LATEST_PROBE * patience_s))
        self._sent.add(sent)
        sent.add_done_callback(self._note_end)
        # A late probe goes on, and the time limit counts as its time. If it were ended here, the
        # server might have counted it as answered, which looks like a request of another client.
        await asyncio.wait([sent], timeout=patience_s)
        if sent.done() and not sent.result():
            return None
        return time.monotonic() - began

    def _note_end(self, sent: asyncio.Task[bool]) -> None:
        self._sent.discard(sent)
        self._ended_at = time.monotonic()

    async def _ask(self, url: str, tokens: int, timeout_s: float) -> bool:
        """Send a probe to this url; return whether it shows something."""
        try:
            async with asyncio.timeout(timeout_s):
                await smallest(self._upstream, url, PROBE_ID, tokens)
        except TimeoutError:
            return True
        except Unanswered as fault:
            if fault.refuses or fault.lacks_url:
                self._refused.add(url)
            return False
        return True
