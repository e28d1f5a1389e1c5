"""A circuit breaker: distinguishes failures of a server from failures that a request causes.

A request is at fault only if the server answers something else within SOON_S of the failure:
another request that was sent later, or a control (the smallest request, sent to test the server).
Failures of several requests in a row are the server's. The server then rests: it gets no requests
for a time. At the end of the rest it gets one request, the probe; each failed probe makes the next
rest longer.
"""

import logging
import math
import time

from contract.openai.body import CHAT_URL, COMPLETION_URL
from worker.engine.openai.retries import MISSING, Condition, Unanswered

log = logging.getLogger(__name__)

#: Seconds of the first rest and of the longest, if the server does not ask for a time. Each failed
#: probe doubles the rest.
FIRST_REST_S, LONGEST_REST_S = 1.0, 60.0
#: Seconds of the shortest rest, for a server that asks for less (`Retry-After: 0`).
SHORTEST_REST_S = 0.1
#: Seconds after a failure within which another answer shows that the server works.
SOON_S = 5.0
#: Smallest and largest number of failures in a row after which a server rests. The number grows
#: with the number of requests in flight.
FEWEST_IN_A_ROW, MOST_IN_A_ROW = 3, 10
#: Smallest and largest number of failures after which a request is at fault, if other requests were
#: answered soon after each of them. The number is larger at a server that fails often: as many
#: failures as happen in a row by chance with probability BY_CHANCE, one in ten million.
FEWEST_FAULTS, MOST_FAULTS, BY_CHANCE = 3, 16, 1e-7
#: Smallest weight of a new try in the fast and in the slow moving average of failures.
LATEST = (0.02, 0.002)


class Breaker:
    """The state of one server, learned from its answers. Times are time.monotonic().

    `reason` is the error text with which the rest began, `served` the urls that the server has
    answered, and `lacks` the urls that it does not have. `rest_until` is the earliest time of the
    next probe.
    An argument `sent_at` is the time at which the request in question was sent.
    """

    def __init__(self, name: str) -> None:
        self.reason = ""
        self.served: set[str] = set()
        self.lacks: set[str] = set()
        self.rest_until = 0.0
        self._name = name
        #: `_doubted`: requests, and not the server, may have caused the rest.
        self._resting = self._doubted = False
        #: The length of the present rest in seconds, and the number of rests in a row.
        self._rest_s, self._rests = 0.0, 0
        #: Time at which the present probe was sent; inf without a probe in flight.
        self._probe_sent = math.inf
        #: Request ids of the latest two failed probes.
        self._probes_of = ("", "")
        #: The url of the latest failure (`_url`), and its HTTP status or condition (`_what`).
        self._url = CHAT_URL
        self._what: int | Condition = 0
        #: Failures in a row: their number, their request ids, and the earliest time of sending.
        self._row, self._row_of, self._row_since = 0, set[str](), math.inf
        #: The times of sending and of the answer of the answered request that was sent latest.
        self._good = (-math.inf, -math.inf)
        #: Time of the latest failure, and time of the latest answer to a control.
        self.failed_at = self._proved_at = -math.inf
        #: Of controls, and of requests that were answered in the end: two moving averages of the
        #: part of tries that failed (`_failing`), and the number of these tries (`_tried`).
        self._failing, self._tried = [0.0 for _ in LATEST], 0

    @property
    def resting(self) -> bool:
        """Whether the server rests: no probe has been answered since the rest began."""
        return self._resting

    def admits(self, now: float) -> bool:
        """Whether a request may be sent. During a rest this is only the probe, when it is due."""
        if not self._resting:
            return True
        due = now >= self.rest_until and self._probe_sent == math.inf
        return due and not self.wants_control

    def sent(self) -> None:
        """Note that a request is sent. During a rest it is the probe."""
        if self._resting:
            self._probe_sent = time.monotonic()

    def left(self, sent_at: float) -> None:
        """Note that a request is no longer in flight. If it was the probe, another may follow."""
        if sent_at >= self._probe_sent:
            self._probe_sent = math.inf

    @property
    def wants_control(self) -> bool:
        """Whether the next probe is a control: one bad request may have failed all probes."""
        if not self._resting:
            return False
        if self._doubted:
            return self._rests % 2 == 0
        return self._probes_of[0] == self._probes_of[1] != ""

    def answered(self, url: str, sent_at: float) -> None:
        """Note an answer. An error that the API sent for this request counts as an answer."""
        if sent_at >= self._good[0]:
            self._good = (sent_at, time.monotonic())
        if self._row and sent_at >= self._row_since:  # an earlier request proves nothing
            self._end_row()
        if self._resting and sent_at >= self._probe_sent:
            self._recover()
        if url and url not in self.served:
            self.served.add(url)
            self.lacks.discard(url)

    def count(self, *, failed: bool) -> None:
        """Count one try: of a control, or of a request that was answered in the end."""
        self._tried += 1
        if not failed and not any(self._failing):
            return
        for index, latest in enumerate(LATEST):
            self._failing[index] += max(latest, 1 / self._tried) * (failed - self._failing[index])

    def failed(
        self, fault: Unanswered, url: str, who: str, sent_at: float, in_flight: int, *, asked: bool
    ) -> bool:
        """Note that the request with the id `who` was not answered; return whether a rest begins.

        `asked`: the server asked for a pause. Otherwise the server or the request may be at fault.
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
        """Begin a rest, or a longer one after a failed probe; return whether a rest begins.

        The rest lasts at least `wait_s` seconds, if the server asked for a time.
        """
        now = time.monotonic()
        if self._resting and sent_at < self._probe_sent:  # sent before the rest began
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
        """Note the end of a control; `reason` is its error or ''. Returns whether a rest begins."""
        if reason and not self._resting and time.monotonic() - self._good[1] <= SOON_S:
            return False  # the server fails sometimes, but has just answered
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
        """Whether a request sent after this one was answered within SOON_S of this failure."""
        return self._good[0] >= sent_at and 0.0 < self._good[1] - failed_at <= SOON_S

    def has_answered_since(self, failed_at: float) -> bool:
        """Whether the server has answered any request since this failure."""
        return self._good[1] > failed_at

    def is_proved_after(self, failed_at: float) -> bool:
        """Whether a control was answered within SOON_S of this failure, or before the next one."""
        latest = self.failed_at == failed_at
        return failed_at < self._proved_at and (latest or self._proved_at <= failed_at + SOON_S)

    @property
    def faults_needed(self) -> int:
        """The number of failures after which a request is at fault: see FEWEST_FAULTS."""
        failing = max(self._failing)
        if failing <= 0.0 or failing >= 1.0:
            return FEWEST_FAULTS if failing <= 0.0 else MOST_FAULTS
        needed = math.ceil(math.log(BY_CHANCE) / math.log(failing))
        return max(FEWEST_FAULTS, min(MOST_FAULTS, needed))

    def control_url(self) -> str:
        """Return the url for a control: the latest failure's, or one that the server has."""
        if self._url in self.served or self._what not in MISSING:
            return self._url
        elsewhere = CHAT_URL if self._url != CHAT_URL else COMPLETION_URL
        return next(iter(self.served), elsewhere)
