"""What follows where a server did not answer: rests, controls, and whose fault it is."""

import asyncio
import time
from dataclasses import dataclass, field
from typing import NoReturn

from contract.errors import RequestFailed
from contract.openai.body import LIMITS, min_body
from worker.engine.openai.exchange import exchange
from worker.engine.openai.judge import FEWEST_FAULTS, SOON_S
from worker.engine.openai.retries import MISSING, Action, Unanswered
from worker.engine.openai.upstream import Upstream
from worker.engine.remote.fleet import Fleet

#: Between tries of one request while its server does not rest, doubled each time.
BACKOFF_S, LONGEST_BACKOFF_S = 0.5, 30.0
#: How long the answer to a control may take.
CONTROL_S = 60.0
#: A request that is told to wait so often, each time while others are answered, is its own fault.
TOLD_TO_WAIT = 30
#: The X-Request-Id of a control.
CONTROL_ID = "warmq-control"


@dataclass(slots=True)
class Tries:
    """How one request fared so far.

    `failed`: how often in a row it was not answered; `failed_at`: where, but for the times when it
    was told to wait; `faults`: how many of these are its own by what was answered meanwhile,
    `proved`: by controls alone; `told_to_wait`: how often it was told so while others were
    answered, `asked`: whether the latest time; `deaths` of servers with it inside; `avoid`: servers
    that did not answer it; `latest`: where it failed, with what, when it had been sent and when it
    failed, until that is judged.
    """

    who: str
    url: str
    failed: int = 0
    failed_at: list[Upstream] = field(default_factory=list)
    faults: int = 0
    proved: int = 0
    deaths: int = 0
    told_to_wait: int = 0
    asked: bool = False
    avoid: frozenset[Upstream] = frozenset()
    latest: tuple[Upstream, Unanswered, float, float] | None = None


class Trial:
    """Judges the failures of all requests at the servers of one fleet."""

    def __init__(self, fleet: Fleet[Upstream]) -> None:
        self._fleet = fleet
        self._controls: dict[Upstream, asyncio.Task[None]] = {}
        self._closed = False

    async def close(self) -> None:
        """End the controls that are under way, and begin no more."""
        self._closed = True
        tasks = list(self._controls.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def action(self, upstream: Upstream, fault: Unanswered, tries: Tries) -> Action:
        """Look up what is done; a url that the server has answered is there, whatever it says.

        Of one that has answered nothing, nobody knows whether it is the server that was meant.
        """
        action, judge = fault.action(), upstream.judge
        if fault.what not in MISSING or action is Action.WAIT:
            return action
        lacks = fault.lacks_url and judge.served and tries.url not in judge.served
        return Action.REJECT if lacks or tries.url in judge.lacks else Action.DOUBT

    def answered(
        self, upstream: Upstream, tries: Tries, sent: float, fault: Unanswered | None = None
    ) -> None:
        """Note an answer; a refusal is one too, and an ingress' page of a url is none."""
        judge = upstream.judge
        if fault is not None and not (fault.refuses or fault.lacks_url):
            return
        rested = judge.resting
        judge.answers("" if fault is not None and fault.what in MISSING else tries.url, sent)
        for server in tries.failed_at:  # none of these was its own fault
            server.judge.counts(failed=True)
        judge.counts(failed=False)
        if rested and not judge.resting:
            upstream.ends_rests(well=False)
            self._fleet.hand_out()

    def failed(
        self, upstream: Upstream, fault: Unanswered, tries: Tries, sent: float, *, asked: bool
    ) -> None:
        """Note a failure; `asked`: the server asked for a rest, else it is to be judged."""
        judge = upstream.judge
        if not asked:
            tries.failed_at.append(upstream)
        rests = judge.fails(fault, tries.url, tries.who, sent, upstream.in_flight, asked=asked)
        tries.failed += 1
        tries.asked, tries.latest = asked, (upstream, fault, sent, judge.failed_at)
        if rests:
            upstream.lower_limit()
            self._control_when_due(upstream)

    def _control_when_due(self, upstream: Upstream) -> None:
        if upstream.judge.wants_control:
            delay_s = max(0.0, upstream.judge.rest_until - time.monotonic())
            asyncio.get_running_loop().call_later(delay_s, self._control_if_due, upstream)

    def _control_if_due(self, upstream: Upstream) -> None:
        judge = upstream.judge
        due = judge.wants_control and time.monotonic() >= judge.rest_until - 0.01
        if due and not self._closed:
            self._control(upstream)

    async def pause(self, tries: Tries) -> None:
        """Wait before a request is sent again, and see whether its server answers others meanwhile.

        Raises:
            RequestRejected, RequestFailed: it does, time and again, and not this one.
        """
        if tries.latest is None:
            return
        upstream, _, sent, failed_at = tries.latest
        judge = upstream.judge
        if judge.resting:
            return  # it waits for its turn with the others
        pause_s = min(BACKOFF_S * 2.0 ** (tries.failed - 1), LONGEST_BACKOFF_S)
        await asyncio.sleep(min(pause_s, SOON_S))
        told = judge.answers_others(sent, failed_at) or self._may_go_elsewhere(tries)
        if not (told or judge.resting):
            await asyncio.wait([self._control(upstream)])
        self.look(tries)
        await asyncio.sleep(max(0.0, pause_s - SOON_S))

    def _may_go_elsewhere(self, tries: Tries) -> bool:
        """Whether another server may answer it, before anybody asks whose fault it is."""
        now, others = time.monotonic(), set(self._fleet.servers) - tries.avoid
        return tries.failed < FEWEST_FAULTS and any(server.free(now) for server in others)

    def look(self, tries: Tries) -> None:
        """See whether others, or a control, were answered when this request was not.

        Raises:
            RequestRejected, RequestFailed: so it was, time and again.
        """
        if tries.latest is None:
            return
        upstream, fault, sent, failed_at = tries.latest
        judge = upstream.judge
        if judge.is_proved_after(failed_at):
            tries.proved += 1
        elif tries.asked:
            tries.told_to_wait += judge.has_answered_since(failed_at)
        elif judge.answers_others(sent, failed_at):
            tries.faults += 1
        else:
            return
        tries.latest = None  # charged once
        its_own = tries.faults + tries.proved >= judge.faults_needed
        if its_own or tries.told_to_wait >= TOLD_TO_WAIT:
            self._end(upstream, fault, tries)

    def _end(self, upstream: Upstream, fault: Unanswered, tries: Tries) -> NoReturn:
        judge = upstream.judge
        if fault.what in MISSING and tries.url not in judge.served:
            judge.lacks.add(tries.url)
            raise fault.rejection()
        if fault.refuses:
            raise fault.rejection()
        times = f"{tries.failed} times, while others are answered"
        raise RequestFailed(f"{upstream.name}: {fault.message} ({times})")

    def _control(self, upstream: Upstream) -> asyncio.Task[None]:
        """Send the smallest request there is; those who want to know meanwhile share its answer."""
        if upstream not in self._controls:
            self._controls[upstream] = asyncio.create_task(self._ask_smallest(upstream))
        return self._controls[upstream]

    async def _ask_smallest(self, upstream: Upstream) -> None:
        judge = upstream.judge
        if judge.wants_control:
            judge.sends()
        sent = time.monotonic()
        url = judge.control_url()
        body = min_body(url) | {"model": upstream.model}
        if url in LIMITS:
            body[LIMITS[url][0]] = 1
        says = ""
        try:
            async with asyncio.timeout(CONTROL_S):
                await exchange(upstream, url, body, CONTROL_ID, {})
        except Unanswered as fault:
            # Who refuses it for what it asks is well.
            if fault.what in MISSING or fault.action() is not Action.REJECT:
                says = fault.message
        except TimeoutError:
            says = f"no answer to the smallest request within {CONTROL_S:g} s"
        finally:
            del self._controls[upstream]
        if not judge.resting:
            judge.counts(failed=bool(says))
        if judge.proves(says, sent):
            upstream.lower_limit()
        elif not judge.resting:
            upstream.ends_rests(well=True)
        self._control_when_due(upstream)
        self._fleet.hand_out()
