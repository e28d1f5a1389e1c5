"""A circuit breaker for each server: it tells the server's failures from a request's own.

A failure is a request's own only if the server answers other requests well at about the same time:
one that was sent later and is answered within SOON_S, or a control, which is the smallest request,
sent for this purpose. Failures in a row are the server's: it rests, longer each time, and gets one
request, the probe, at the end of each rest.
"""

import logging
import math
import time

from contract.openai.body import CHAT_URL, COMPLETION_URL
from worker.engine.openai.retries import MISSING, Condition, Unanswered

log = logging.getLogger(__name__)

#: Rest of a server that names no time; doubled after each failed probe.
FIRST_REST_S, LONGEST_REST_S = 1.0, 60.0
#: Shortest rest, if it names one (`Retry-After: 0`).
SHORTEST_REST_S = 0.1
#: The meaning of "at about the same time".
SOON_S = 5.0
#: Failures in a row that begin a rest; more for more requests in flight.
FEWEST_IN_A_ROW, MOST_IN_A_ROW = 3, 10
#: Failures that are a request's own, each while other requests were answered. At a server that
#: fails often, as many as occur in a row by chance once in ten million.
FEWEST_FAULTS, MOST_FAULTS, BY_CHANCE = 3, 16, 1e-7
#: Least weights of the latest try in the two failure rates, a fast and a slow one.
LATEST = (0.02, 0.002)


class Breaker:
    """The state of one server by its answers. Times are time.monotonic().

    `reason`: the server's words for its rest; `served`: urls that it has answered; `lacks`: urls
    that it does not have; `rest_until`: the earliest time of the next probe. `sent_at` is always
    when the request in question was sent.
    """

    def __init__(self, name: str) -> None:
        self.reason = ""
        self.served: set[str] = set()
        self.lacks: set[str] = set()
        self.rest_until = 0.0
        self._name = name
        self._resting = self._doubted = False
        self._rest_s = 0.0
        self._rests = 0
        #: When the present probe was sent.
        self._probe_sent = math.inf
        #: Request ids of the latest two failed probes.
        self._probes_of = ("", "")
        #: The latest failure: its url, and its status or condition.
        self._url = CHAT_URL
        self._what: int | Condition = 0
        #: Failures in a row: their number, their requests, and when the first of these was sent.
        self._row, self._row_of, self._row_since = 0, set[str](), math.inf
        #: Of the answered request that was sent last: when it was sent, and answered.
        self._good = (-math.inf, -math.inf)
        #: When the latest failure came, and when a control was last answered.
        self.failed_at = self._proved_at = -math.inf
        #: Failure rates among requests without fault, and the number of tries that they are from.
        self._failing, self._tried = [0.0 for _ in LATEST], 0

    @property
    def resting(self) -> bool:
        """Whether no probe has been answered since the rest began."""
        return self._resting

    def admits(self, now: float) -> bool:
        """Whether a request may be sent; during a rest only the probe, when it is due."""
        if not self._resting:
            return True
        due = now >= self.rest_until and self._probe_sent == math.inf
        return due and not self.wants_control

    def sent(self) -> None:
        """Note that a request, or a control that was wanted, is sent; during a rest, the probe."""
        if self._resting:
            self._probe_sent = time.monotonic()

    def left(self, sent_at: float) -> None:
        """Note that a request has left; after an undecided probe another may be sent."""
        if sent_at >= self._probe_sent:
            self._probe_sent = math.inf

    @property
    def wants_control(self) -> bool:
        """Whether the next probe is a control: the same request may have failed all probes."""
        if not self._resting:
            return False
        if self._doubted:
            return self._rests % 2 == 0
        return self._probes_of[0] == self._probes_of[1] != ""

    def answered(self, url: str, sent_at: float) -> None:
        """Note an answer; a refusal in words is one, too."""
        if sent_at >= self._good[0]:
            self._good = (sent_at, time.monotonic())
        if self._row and sent_at >= self._row_since:  # not one from before the trouble
            self._end_row()
        if self._resting and sent_at >= self._probe_sent:
            self._recover()
        if url and url not in self.served:
            self.served.add(url)
            self.lacks.discard(url)

    def count(self, *, failed: bool) -> None:
        """Count one try of a control, or of a request that was answered in the end."""
        self._tried += 1
        if not failed and not any(self._failing):
            return
        for n, latest in enumerate(LATEST):
            self._failing[n] += max(latest, 1 / self._tried) * (failed - self._failing[n])

    def failed(
        self, fault: Unanswered, url: str, who: str, sent_at: float, in_flight: int, *, asked: bool
    ) -> bool:
        """Note that the request `who` was not answered; return whether a rest begins.

        `asked`: the server asked for a rest; otherwise the fault may be its own or the request's.
        """
        self.failed_at, self._url, self._what = time.monotonic(), url, fault.what
        if asked:
            return self._rest(fault.message, who, sent_at, fault.wait_s)
        if self._resting:
            return self._rest(fault.message, who, sent_at, doubted=self._doubted)
        self._row += 1
        self._row_of.add(who)
        self._row_since = min(self._row_since, sent_at)
        enough = max(FEWEST_IN_A_ROW, min(MOST_IN_A_ROW, in_flight // 3))
        if self._row < enough or len(self._row_of) < 2:
            return False
        return self._rest(fault.message, who, sent_at, doubted=True)

    def _rest(
        self,
        reason: str,
        who: str,
        sent_at: float,
        wait_s: float | None = None,
        *,
        doubted: bool = False,
    ) -> bool:
        """Rest as long as asked, or longer each time; return whether a rest begins."""
        now = time.monotonic()
        if self._resting and sent_at < self._probe_sent:  # in flight when the rest began
            self.rest_until = max(self.rest_until, now + (wait_s or 0.0))
            return False
        if self._resting:
            self._rest_s = min(2 * self._rest_s, LONGEST_REST_S)
            self._rests += 1
        else:
            first_s = FIRST_REST_S if wait_s is None else max(wait_s, SHORTEST_REST_S)
            self._rest_s, self._rests = min(first_s, LONGEST_REST_S), 1
            log.warning("%s rests: %s", self._name, reason, extra={"action": "server_rests"})
        self._resting, self._doubted, self.reason = True, doubted, reason
        self._probe_sent = math.inf
        self._probes_of = (self._probes_of[1], who)
        self.rest_until = now + max(self._rest_s, wait_s or 0.0)
        return True

    def control_ended(self, reason: str, sent_at: float) -> bool:
        """Note the end of a control; `reason`: '' if answered. Return whether a rest begins."""
        if reason and not self._resting and time.monotonic() - self._good[1] <= SOON_S:
            return False  # it fails now and then
        if reason:
            return self._rest(reason, "", sent_at, doubted=True)
        self._proved_at = time.monotonic()
        if self._doubted:
            self._recover()
            return False
        self._probes_of = ("", "")
        return self._resting and self._rest(self.reason, "", sent_at)

    def _recover(self) -> None:
        if self._resting:
            log.info("%s answers again", self._name, extra={"action": "server_ready"})
        self._resting = self._doubted = False
        self._probe_sent, self._probes_of = math.inf, ("", "")
        self._end_row()
        self.reason, self.rest_until = "", 0.0

    def _end_row(self) -> None:
        self._row, self._row_since = 0, math.inf
        self._row_of.clear()

    def answers_later_requests(self, sent_at: float, failed_at: float) -> bool:
        """Whether a request sent after this one was answered soon after this one failed."""
        return self._good[0] >= sent_at and 0.0 < self._good[1] - failed_at <= SOON_S

    def has_answered_since(self, failed_at: float) -> bool:
        """Whether anything was answered since."""
        return self._good[1] > failed_at

    def is_proved_after(self, failed_at: float) -> bool:
        """Whether a control was answered soon after this failure, or next after it."""
        latest = self.failed_at == failed_at
        return failed_at < self._proved_at and (latest or self._proved_at <= failed_at + SOON_S)

    @property
    def faults_needed(self) -> int:
        """Failures, each while other requests are answered, that are a request's own fault."""
        failing = max(self._failing)
        if failing <= 0.0 or failing >= 1.0:
            return FEWEST_FAULTS if failing <= 0.0 else MOST_FAULTS
        needed = math.ceil(math.log(BY_CHANCE) / math.log(failing))
        return max(FEWEST_FAULTS, min(MOST_FAULTS, needed))

    def control_url(self) -> str:
        """Return the url of the latest failure; a served one if this server may not have that."""
        if self._url in self.served or self._what not in MISSING:
            return self._url
        elsewhere = CHAT_URL if self._url != CHAT_URL else COMPLETION_URL
        return next(iter(self.served), elsewhere)
