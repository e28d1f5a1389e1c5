"""One judge for each server: is it the server's fault, or a request's own, that no answer came?

A failure is a request's own fault only if the server answers others well at about the same time:
one that was sent later and is answered within SOON_S, or a control, the smallest request there is,
that is sent to find out. Failures that come in a row are the server's: it rests, longer each time,
and gets one request at the end of each rest, the probe.
"""

import logging
import math
import time

from contract.openai.body import CHAT_URL, COMPLETION_URL
from worker.engine.openai.retries import MISSING, Condition, Unanswered

log = logging.getLogger(__name__)

#: How long a server rests that names no time, doubled after each probe that fails.
FIRST_REST_S, LONGEST_REST_S = 1.0, 60.0
#: A server that names no time at all (`Retry-After: 0`) is not asked in a tight loop.
SHORTEST_REST_S = 0.1
#: What is meant by "at about the same time".
SOON_S = 5.0
#: Failures in a row after which a server rests; the more requests run in it, the more.
FEWEST_IN_A_ROW, MOST_IN_A_ROW = 3, 10
#: Failures of a request, each while others were answered, that make it the request's own fault; at
#: a server that fails so often anyhow, as many as come in a row by chance once in ten million.
FEWEST_FAULTS, MOST_FAULTS, BY_CHANCE = 3, 16, 1e-7
#: How much the latest try counts for how often the server fails, at least: of late, and by and by.
LATEST = (0.02, 0.002)


class Judge:
    """What one server's answers tell of it. Times are time.monotonic().

    `says`: the server's words for why it rests; `served`: urls that it has answered; `lacks`: urls
    that it was found not to have; `rest_until`: when the next probe may be sent.
    """

    def __init__(self, name: str) -> None:
        self.says = ""
        self.served: set[str] = set()
        self.lacks: set[str] = set()
        self.rest_until = 0.0
        self._name = name
        self._resting = self._doubted = False
        self._rest_s = 0.0
        #: When the probe was sent that is under way.
        self._probe_sent = math.inf
        self._rests = 0
        #: Of the latest failure: the url, and what came.
        self._url = CHAT_URL
        self._what: int | Condition = 0
        #: Failures in a row: how many, of whom, and when the first of these requests was sent.
        self._row, self._row_of, self._row_since = 0, set[str](), math.inf
        self._probe_of = ("", "")
        #: Of the answered request that was sent last: when it was sent, and answered.
        self._good = (-math.inf, -math.inf)
        #: When the latest failure came, and when a control was last answered.
        self.failed_at = self._proved_at = -math.inf
        #: How often it fails those who are not at fault, and of how many tries that is known.
        self._failing, self._tried = [0.0 for _ in LATEST], 0

    @property
    def resting(self) -> bool:
        """Whether it rests, or is on probation after a rest: no probe has been answered."""
        return self._resting

    def admits(self, now: float) -> bool:
        """Whether a request may be sent; while it rests only the probe, if that is its turn."""
        if not self._resting:
            return True
        due = now >= self.rest_until and self._probe_sent == math.inf
        return due and not self.wants_control

    def sends(self) -> None:
        """Note that a request is sent, or a control that was wanted: while it rests, the probe."""
        if self._resting:
            self._probe_sent = time.monotonic()

    def leaves(self, sent: float) -> None:
        """Note that a request has left; if it was a probe that told nothing, another may be sent.

        `sent` is when the request was sent, here and below.
        """
        if sent >= self._probe_sent:
            self._probe_sent = math.inf

    @property
    def wants_control(self) -> bool:
        """Whether the next probe is a control: a request of its own may be why a probe failed."""
        if not self._resting:
            return False
        if self._doubted:
            return self._rests % 2 == 0
        return self._probe_of[0] == self._probe_of[1] != ""

    def answers(self, url: str, sent: float) -> None:
        """Note an answer, or a refusal that is one."""
        if sent >= self._good[0]:
            self._good = (sent, time.monotonic())
        if self._row and sent >= self._row_since:  # not one from before the trouble
            self._row, self._row_since = 0, math.inf
            self._row_of.clear()
        if self._resting and sent >= self._probe_sent:
            self._recovers()
        if url and url not in self.served:
            self.served.add(url)
            self.lacks.discard(url)

    def counts(self, *, failed: bool) -> None:
        """Note how one try ended of a control, or of a request that was answered in the end."""
        self._tried += 1
        if not failed and not any(self._failing):
            return
        for n, latest in enumerate(LATEST):
            self._failing[n] += max(latest, 1 / self._tried) * (failed - self._failing[n])

    def fails(
        self, fault: Unanswered, url: str, who: str, sent: float, in_flight: int, *, asked: bool
    ) -> bool:
        """Note that `who` was not answered; whether a rest begins.

        `asked`: the server said that it has to rest, else it may be the server's fault or that of
        `who`; `in_flight`: how many requests run in the server.
        """
        self.failed_at, self._url, self._what = time.monotonic(), url, fault.what
        if asked:
            return self._rest(fault.message, who, sent, fault.wait_s)
        if self._resting:
            return self._rest(fault.message, who, sent, doubted=self._doubted)
        self._row += 1
        self._row_of.add(who)
        self._row_since = min(self._row_since, sent)
        enough = max(FEWEST_IN_A_ROW, min(MOST_IN_A_ROW, in_flight // 3))
        if self._row < enough or len(self._row_of) < 2:
            return False
        return self._rest(fault.message, who, sent, doubted=True)

    def _rest(
        self,
        says: str,
        who: str,
        sent: float,
        wait_s: float | None = None,
        *,
        doubted: bool = False,
    ) -> bool:
        """Let it rest for as long as it asked, or longer each time; whether a rest begins."""
        now = time.monotonic()
        if self._resting and sent < self._probe_sent:  # it ran when the rest began
            self.rest_until = max(self.rest_until, now + (wait_s or 0.0))
            return False
        if self._resting:
            self._rest_s = min(2 * self._rest_s, LONGEST_REST_S)
            self._rests += 1
        else:
            first_s = FIRST_REST_S if wait_s is None else max(wait_s, SHORTEST_REST_S)
            self._rest_s, self._rests = min(first_s, LONGEST_REST_S), 1
            log.warning("%s rests: %s", self._name, says, extra={"action": "server_rests"})
        self._resting, self._doubted, self.says = True, doubted, says
        self._probe_sent = math.inf
        self._probe_of = (self._probe_of[1], who)
        self.rest_until = now + max(self._rest_s, wait_s or 0.0)
        return True

    def proves(self, says: str, sent: float) -> bool:
        """Note how a control ended: `says` is what came instead of an answer; whether it rests."""
        if says and not self._resting and time.monotonic() - self._good[1] <= SOON_S:
            return False  # it fails now and then
        if says:
            return self._rest(says, "", sent, doubted=True)
        self._proved_at = time.monotonic()
        if self._doubted:
            self._recovers()
            return False
        self._probe_of = ("", "")
        return self._resting and self._rest(self.says, "", sent)

    def _recovers(self) -> None:
        if self._resting:
            log.info("%s answers again", self._name, extra={"action": "server_ready"})
        self._resting = self._doubted = False
        self._probe_sent = math.inf
        self._row, self._row_since, self._probe_of = 0, math.inf, ("", "")
        self._row_of.clear()
        self.says, self.rest_until = "", 0.0

    def answers_others(self, sent: float, failed_at: float) -> bool:
        """Whether a request that was sent after this one was answered soon after this failed."""
        return self._good[0] >= sent and 0.0 < self._good[1] - failed_at <= SOON_S

    def has_answered_since(self, failed_at: float) -> bool:
        """Whether anything was answered since."""
        return self._good[1] > failed_at

    def is_proved_after(self, failed_at: float) -> bool:
        """Whether a control was answered soon after this failure, or next after it."""
        latest = self.failed_at == failed_at
        return failed_at < self._proved_at and (latest or self._proved_at <= failed_at + SOON_S)

    @property
    def faults_needed(self) -> int:
        """How many failures in a row, each while others are answered, are a request's own fault."""
        failing = max(self._failing)
        if failing <= 0.0 or failing >= 1.0:
            return FEWEST_FAULTS if failing <= 0.0 else MOST_FAULTS
        needed = math.ceil(math.log(BY_CHANCE) / math.log(failing))
        return max(FEWEST_FAULTS, min(MOST_FAULTS, needed))

    def control_url(self) -> str:
        """Return where a control goes: where it failed, or if it may not have that, elsewhere."""
        if self._url in self.served or self._what not in MISSING:
            return self._url
        elsewhere = CHAT_URL if self._url != CHAT_URL else COMPLETION_URL
        return next(iter(self.served), elsewhere)
