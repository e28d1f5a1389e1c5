"""Decides whether a server or a request is at fault, by pauses and controls.

A control is the smallest request that a server can answer, sent only to test the server. After
several failures a server rests: it gets no requests for a time (breaker.py).
"""

import asyncio
import time
from dataclasses import dataclass, field
from typing import NoReturn

from contract.errors import RequestFailed
from worker.engine.openai.breaker import FEWEST_FAULTS, SOON_S
from worker.engine.openai.exchange import smallest
from worker.engine.openai.retries import MISSING, Action, Unanswered
from worker.engine.openai.upstream import Upstream
from worker.engine.remote.servers import Servers

#: Seconds of the first pause between two tries of a request, and of the longest; each pause is
#: twice as long as the one before. They apply only while the server does not rest.
BACKOFF_S, LONGEST_BACKOFF_S = 0.5, 30.0
#: Seconds in which a server has to answer a control.
CONTROL_S = 60.0
#: Number of waits after which a request is at fault, if its server answered other requests during
#: each of them.
MOST_WAITS = 30
#: The X-Request-Id header of a control.
CONTROL_ID = "warmq-control"


@dataclass(slots=True)
class Tries:
    """The tries of one request so far.

    - `who`: the request id; `url`: the path of the endpoint; `sequences`: `n` × prompts;
    - `failed`: failures in a row;
    - `failed_at`: servers of these failures, without those that asked the worker to wait;
    - `faults`: failures soon after which the server answered another request;
    - `proved`: failures soon after which the server answered a control;
    - `deaths`: number of servers that died while they ran this request;
    - `waits`: times that the server asked the worker to wait, and answered meanwhile;
    - `asked`: whether the server asked the worker to wait at the latest failure;
    - `avoid`: servers that did not answer this request;
    - `latest`: the latest failure as (server, fault, time of sending, time of failure), until
      `count_failure` has counted it.
    """

    who: str
    url: str
    sequences: int = 1
    failed: int = 0
    failed_at: list[Upstream] = field(default_factory=list)
    faults: int = 0
    proved: int = 0
    deaths: int = 0
    waits: int = 0
    asked: bool = False
    avoid: frozenset[Upstream] = frozenset()
    latest: tuple[Upstream, Unanswered, float, float] | None = None


class Blame:
    """Decides for all requests of one engine whether they or their servers are at fault."""

    def __init__(self, fleet: Servers[Upstream]) -> None:
        self._servers = fleet
        self._controls: dict[Upstream, asyncio.Task[None]] = {}
        self._closed = False

    async def close(self) -> None:
        """Cancel the running controls, and start no more."""
        self._closed = True
        tasks = list(self._controls.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def action(self, upstream: Upstream, fault: Unanswered, tries: Tries) -> Action:
        """Return the action for a fault.

        A 404 or 405 rejects the request only if the server has answered other urls, but never this
        one. A server that has answered nothing yet may be the wrong one.
        """
        action, breaker = fault.action(), upstream.breaker
        if fault.what not in MISSING or action is Action.WAIT:
            return action
        lacks = fault.lacks_url and breaker.served and tries.url not in breaker.served
        return Action.REJECT if lacks or tries.url in breaker.lacks else Action.DOUBT

    def answered(
        self, upstream: Upstream, tries: Tries, sent_at: float, fault: Unanswered | None = None
    ) -> None:
        """Note an answer, or an error that the API itself sent, not an ingress."""
        breaker = upstream.breaker
        if fault is not None and not (fault.refuses or fault.lacks_url):
            return
        rested = breaker.resting
        missing = fault is not None and fault.what in MISSING
        breaker.answered("" if missing else tries.url, sent_at)
        for server in tries.failed_at:  # the request was not at fault for these failures
            server.breaker.count(failed=True)
        breaker.count(failed=False)
        if rested and not breaker.resting:
            upstream.end_rests(well=False)
            self._servers.hand_out()

    def failed(
        self, upstream: Upstream, fault: Unanswered, tries: Tries, sent_at: float, *, asked: bool
    ) -> None:
        """Note a failure. `asked`: the server asked for a pause; else `count_failure` decides."""
        breaker = upstream.breaker
        if not asked:
            tries.failed_at.append(upstream)
        rests = breaker.failed(
            fault, tries.url, tries.who, sent_at, upstream.in_flight, asked=asked
        )
        tries.failed += 1
        tries.asked, tries.latest = asked, (upstream, fault, sent_at, breaker.failed_at)
        if rests:
            upstream.lower_limit()
            self._control_when_due(upstream)

    def _control_when_due(self, upstream: Upstream) -> None:
        if upstream.breaker.wants_control:
            delay_s = max(0.0, upstream.breaker.rest_until - time.monotonic())
            asyncio.get_running_loop().call_later(delay_s, self._control_if_due, upstream)

    def _control_if_due(self, upstream: Upstream) -> None:
        breaker = upstream.breaker
        due = breaker.wants_control and time.monotonic() >= breaker.rest_until - 0.01
        if due and not self._closed:
            self._start_control(upstream)

    async def pause(self, tries: Tries) -> None:
        """Wait before the request is sent again, and count its latest failure."""
        if tries.latest is None:
            return
        upstream, _, sent_at, failed_at = tries.latest
        breaker = upstream.breaker
        if breaker.resting:
            return  # the request waits for a free server
        pause_s = min(BACKOFF_S * 2.0 ** (tries.failed - 1), LONGEST_BACKOFF_S)
        await asyncio.sleep(min(pause_s, SOON_S))
        needs_no_control = breaker.answers_later_requests(sent_at, failed_at) or self._may_move(
            tries
        )
        if not (needs_no_control or breaker.resting):
            await asyncio.wait([self._start_control(upstream)])
        self.count_failure(tries)
        await asyncio.sleep(max(0.0, pause_s - SOON_S))

    def _may_move(self, tries: Tries) -> bool:
        """Whether another server may answer the request, so that no control is needed yet."""
        now, candidates = time.monotonic(), set(self._servers.servers) - tries.avoid
        return tries.failed < FEWEST_FAULTS and any(server.free(now) for server in candidates)

    def count_failure(self, tries: Tries) -> None:
        """Count the latest failure against the request if its server answered meanwhile.

        Raises:
            RequestRejected, RequestFailed: the request is at fault.
        """
        if tries.latest is None:
            return
        upstream, fault, sent_at, failed_at = tries.latest
        breaker = upstream.breaker
        if breaker.is_proved_after(failed_at):
            tries.proved += 1
        elif tries.asked:
            tries.waits += breaker.has_answered_since(failed_at)
        elif breaker.answers_later_requests(sent_at, failed_at):
            tries.faults += 1
        else:
            return
        tries.latest = None  # each failure is counted once
        if tries.faults + tries.proved >= breaker.faults_needed or tries.waits >= MOST_WAITS:
            self._end_request(upstream, fault, tries)

    def _end_request(self, upstream: Upstream, fault: Unanswered, tries: Tries) -> NoReturn:
        breaker = upstream.breaker
        missing = fault.what in MISSING and tries.url not in breaker.served
        if missing:
            breaker.lacks.add(tries.url)
        if missing or fault.refuses:
            raise fault.rejection()
        times = f"{tries.failed} times, while other requests were answered"
        raise RequestFailed(f"{upstream.name}: {fault.message} ({times})")

    def _start_control(self, upstream: Upstream) -> asyncio.Task[None]:
        """Send a control; callers during its run get the same task."""
        if upstream not in self._controls:
            self._controls[upstream] = asyncio.create_task(self._send_smallest(upstream))
        return self._controls[upstream]

    async def _send_smallest(self, upstream: Upstream) -> None:
        breaker = upstream.breaker
        if breaker.wants_control:
            breaker.sent()
        sent_at = time.monotonic()
        reason = ""
        try:
            async with asyncio.timeout(CONTROL_S):
                await smallest(upstream, breaker.control_url(), CONTROL_ID)
        except Unanswered as fault:
            # A server that refuses the control itself is healthy.
            if fault.what in MISSING or fault.action() is not Action.REJECT:
                reason = fault.message
        except TimeoutError:
            reason = f"no answer to the smallest request within {CONTROL_S:g} s"
        finally:
            del self._controls[upstream]
        if not breaker.resting:
            breaker.count(failed=bool(reason))
        if breaker.control_ended(reason, sent_at):
            upstream.lower_limit()
        elif not breaker.resting:
            upstream.end_rests(well=True)
        self._control_when_due(upstream)
        self._servers.hand_out()
