"""Decides whether a server or a request is to blame for failures: by rests, pauses and controls."""

import asyncio
import time
from dataclasses import dataclass, field
from typing import NoReturn

from contract.errors import RequestFailed
from contract.openai.body import LIMITS, min_body
from worker.engine.openai.breaker import FEWEST_FAULTS, SOON_S
from worker.engine.openai.exchange import exchange
from worker.engine.openai.retries import MISSING, Action, Unanswered
from worker.engine.openai.upstream import Upstream
from worker.engine.remote.fleet import Fleet

#: Pause between tries of one request while its server does not rest, doubled each time.
BACKOFF_S, LONGEST_BACKOFF_S = 0.5, 30.0
#: Timeout of a control.
CONTROL_S = 60.0
#: A request is to blame if it had to wait so often, each time while the server answered.
MOST_WAITS = 30
#: The X-Request-Id of a control.
CONTROL_ID = "warmq-control"


@dataclass(slots=True)
class Tries:
    """The tries of one request so far.

    `failed`: failures in a row; `failed_at`: their servers, except for those that asked to wait;
    `faults`: its own ones, as other requests were answered; `proved`: as a control was answered;
    `waits`: times it had to wait while its server answered; `asked`: the latest one was so;
    `deaths`: of servers that ran it; `avoid`: servers that did not answer it; `latest`: the latest
    failure (server, fault, times of sending and failure) until it is judged.
    """

    who: str
    url: str
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
    """Judges the failures of all requests at the servers of one fleet."""

    def __init__(self, fleet: Fleet[Upstream]) -> None:
        self._fleet = fleet
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
        """Return the action for a fault; a url that the server has answered is not missing.

        A server that has answered nothing yet may be the wrong server.
        """
        action, breaker = fault.action(), upstream.breaker
        if fault.what not in MISSING or action is Action.WAIT:
            return action
        lacks = fault.lacks_url and breaker.served and tries.url not in breaker.served
        return Action.REJECT if lacks or tries.url in breaker.lacks else Action.DOUBT

    def answered(
        self, upstream: Upstream, tries: Tries, sent_at: float, fault: Unanswered | None = None
    ) -> None:
        """Note an answer, or a refusal in words; an ingress' error page is neither."""
        breaker = upstream.breaker
        if fault is not None and not (fault.refuses or fault.lacks_url):
            return
        rested = breaker.resting
        missing = fault is not None and fault.what in MISSING
        breaker.answered("" if missing else tries.url, sent_at)
        for server in tries.failed_at:  # none of these was the request's own fault
            server.breaker.count(failed=True)
        breaker.count(failed=False)
        if rested and not breaker.resting:
            upstream.end_rests(well=False)
            self._fleet.hand_out()

    def failed(
        self, upstream: Upstream, fault: Unanswered, tries: Tries, sent_at: float, *, asked: bool
    ) -> None:
        """Note a failure; `asked`: the server asked for a rest, otherwise it is to be judged."""
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
            self._control(upstream)

    async def pause(self, tries: Tries) -> None:
        """Wait before a request is sent again, and `judge` its latest failure."""
        if tries.latest is None:
            return
        upstream, _, sent_at, failed_at = tries.latest
        breaker = upstream.breaker
        if breaker.resting:
            return  # the request waits for a free server
        pause_s = min(BACKOFF_S * 2.0 ** (tries.failed - 1), LONGEST_BACKOFF_S)
        await asyncio.sleep(min(pause_s, SOON_S))
        known = breaker.answers_later_requests(sent_at, failed_at) or self._may_move(tries)
        if not (known or breaker.resting):
            await asyncio.wait([self._control(upstream)])
        self.judge(tries)
        await asyncio.sleep(max(0.0, pause_s - SOON_S))

    def _may_move(self, tries: Tries) -> bool:
        """Whether another server may answer it, before a control decides on the blame."""
        now, rest = time.monotonic(), set(self._fleet.servers) - tries.avoid
        return tries.failed < FEWEST_FAULTS and any(server.free(now) for server in rest)

    def judge(self, tries: Tries) -> None:
        """Count the latest failure against its request if its server answered meanwhile.

        Raises:
            RequestRejected, RequestFailed: the request is to blame.
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
        tries.latest = None  # counted once
        if tries.faults + tries.proved >= breaker.faults_needed or tries.waits >= MOST_WAITS:
            self._end(upstream, fault, tries)

    def _end(self, upstream: Upstream, fault: Unanswered, tries: Tries) -> NoReturn:
        breaker = upstream.breaker
        missing = fault.what in MISSING and tries.url not in breaker.served
        if missing:
            breaker.lacks.add(tries.url)
        if missing or fault.refuses:
            raise fault.rejection()
        times = f"{tries.failed} times, while other requests were answered"
        raise RequestFailed(f"{upstream.name}: {fault.message} ({times})")

    def _control(self, upstream: Upstream) -> asyncio.Task[None]:
        """Send the smallest request; concurrent callers get the same task."""
        if upstream not in self._controls:
            self._controls[upstream] = asyncio.create_task(self._send_smallest(upstream))
        return self._controls[upstream]

    async def _send_smallest(self, upstream: Upstream) -> None:
        breaker = upstream.breaker
        if breaker.wants_control:
            breaker.sent()
        sent_at = time.monotonic()
        url = breaker.control_url()
        body = min_body(url) | {"model": upstream.model}
        if url in LIMITS:
            body[LIMITS[url][0]] = 1
        reason = ""
        try:
            async with asyncio.timeout(CONTROL_S):
                await exchange(upstream, url, body, CONTROL_ID, {})
        except Unanswered as fault:
            # A server that refuses the control itself is well.
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
        self._fleet.hand_out()
