"""Decides how many requests may be in flight at a server that people use. No I/O, no clock.

`step` is called once a second with what the last second showed. The limit grows by a little, is
cut by a factor when people feel our requests (a target is missed), and is 0 when they feel them
badly (one value is above BADLY times the target, or two in a row are above BADLY_TWICE times).
Running requests are not ended. The limit is doubled only if the values measured at the present
limit are far below their targets, or if a limit as high was good before.

What people feel is measured as two times:

- Between tokens: the mean of the server's histogram over all clients. Each step of vLLM gives one
  token to each running request, so people's requests and ours have the same steps.
- To the first token: a probe, one request for one token with people's priority. The server's
  histogram cannot be used: it has no label for the client, most of its first tokens are ours, and
  its buckets are wider than the effect that must be found.

A quiet value is what the server shows while no request of ours is in flight (signals.py). If no
other client has used the server for NOBODY seconds, our limit is the number of requests that it can
start.
"""

from collections import deque
from dataclasses import dataclass
from typing import Any

from worker.engine.openai.metrics import CEILING, FILLED
from worker.engine.openai.signals import FEWEST, Signal

#: Default targets, as factors of the quiet values.
TTFT_FACTOR, ITL_FACTOR = 3.0, 2.5
#: Multiple of a target from which one value, or each of two in a row, misses it badly. The p99 of a
#: first token is two to three times its median even if nothing is wrong.
BADLY, BADLY_TWICE = 3.0, 2.0
#: Part of a target below which the limit may grow.
HEADROOM = 0.9
#: Part of a target below which the limit may be doubled: what our requests add to the quiet value
#: (a third of the target) then doubles, and the target is met still.
FAR = 0.6
#: Steps at a limit that all its requests use before it may be doubled. The first of them was
#: measured partly below that limit.
HELD = 2
#: Looks in a row at which requests must wait in the server before the limit is lowered for them:
#: with people, and without. Requests that come during a step wait until it ends.
WAITS, WAITS_ALONE = 2, 3
#: Smallest and largest factor of a cut.
DEEPEST_CUT, SMALLEST_CUT = 0.5, 0.95
#: Near the limit that people felt the last time (from this factor to its inverse) the limit grows
#: by one.
NEAR = 0.75
#: Limit at the start and after an idle time, until the requests' effect is known.
FIRST = 8
#: Steps after a cut in which the limit neither grows nor is cut: the effect of a cut comes later.
SETTLE = 3
#: Steps between two tries to start more requests than the server could start before.
TRY_MORE = 10
#: Steps without requests of other clients after which the server counts as ours alone.
NOBODY = 10
#: Steps in a row that do not show other clients' use, after which the server counts as used.
UNKNOWN = 2
#: Most steps in which the guard learns the quiet values; the limit is 0 meanwhile.
LEARN = 6
#: Probes in a second with requests of ours, and in a quiet one. Probes are sent one after the
#: other, and their median is one value.
PROBES, QUIET_PROBES = 3, 9
#: Steps without any measurement after which the limit shrinks, and the factor for each step.
BLIND, BLIND_CUT = 3, 0.8
#: Tokens of a probe that fills the histogram of times between tokens, if nobody else does.
MANY_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Observed:
    """What the last second showed; None: unknown.

    `in_flight` are our requests. `ttft_s` is the probe's time, `itl_s` the mean time between
    tokens, `waiting` the number of requests that wait in the server. `other_clients`: whether
    any have used it.
    """

    in_flight: int
    ttft_s: float | None = None
    itl_s: float | None = None
    waiting: int | None = None
    other_clients: bool | None = None


class Guard:
    """The limit of our requests in flight at one server (`limit`), and the reason (`why`)."""

    def __init__(
        self, ceiling: int = CEILING, ttft_s: float | None = None, itl_s: float | None = None
    ) -> None:
        self.limit = 0
        self.why = "measures the server without this worker's requests"
        self.ttft = Signal("first token", ttft_s, TTFT_FACTOR, 3)
        self.itl = Signal("next token", itl_s, ITL_FACTOR, 1)
        self.ceiling = ceiling
        #: Limit that was good before: up to it the limit is doubled.
        self._fast_to = min(FIRST, ceiling)
        #: Our requests at the latest step, and the steps in which they used the present limit.
        self._own = self._held = 0
        #: The requests that waited in the server at the latest steps.
        self._waited: deque[int] = deque(maxlen=WAITS_ALONE)
        #: Most requests that the server could start, and the steps in which the limit was as high.
        self._roof, self._at_roof = ceiling, 0
        #: Steps until the limit may change after a cut; steps that have learned quiet values.
        self._settle = self._steps = 0
        #: Steps in a row without a measurement, without requests of ours, without other clients.
        self._blind = self._unused = self._alone = 0
        #: Steps in a row that did not show whether there are other clients.
        self._unknown = 0
        #: The limit that people felt the last time.
        self._felt_at = 0
        #: Whether nobody else was there at the last step.
        self._was_alone = False
        self._paused = False
        self._had_waiting = False

    @property
    def learning(self) -> bool:
        """Whether the limit is 0 because the quiet values are not known yet."""
        return self._steps < LEARN and not (self.ttft.has_target and self.itl.has_target)

    @property
    def paused(self) -> bool:
        """Whether the limit is 0 because people feel our requests badly."""
        return self._paused

    @property
    def quiet(self) -> tuple[float | None, float | None]:
        """The known quiet values of the first and of the next token, in seconds."""
        first, between = (
            signal.quiet_s if signal.quiet_steps >= signal.enough else None
            for signal in (self.ttft, self.itl)
        )
        return first, between

    @property
    def quiet_steps(self) -> int:
        """Number of the values from which the quiet values are made."""
        return self.ttft.quiet_steps + self.itl.quiet_steps

    def learn(self, ttft_s: float | None, itl_s: float | None) -> None:
        """Take over quiet values that were measured before, unless they are known."""
        self.ttft.learn(ttft_s)
        self.itl.learn(itl_s)

    def take_over(self, limit: int) -> None:
        """Go on from the limit of another worker, which has measured the server until now."""
        self.limit, self._settle = min(limit, self.ceiling), FEWEST
        self._fast_to = max(self.limit, min(FIRST, self.ceiling))
        self._steps = LEARN if limit else self._steps
        self._paused = not limit and not self.learning
        self.why = "another worker has measured until now"
        self.ttft.forget()
        self.itl.forget()

    @property
    def probe_tokens(self) -> int:
        """Tokens that the next probe asks for; only a probe for one token measures `ttft_s`."""
        needs_many = self.learning and self.ttft.has_target and not self.itl.has_target
        return MANY_TOKENS if needs_many else 1

    @property
    def patience_s(self) -> float:
        """Seconds after which a probe has missed the target badly."""
        return BADLY * (self.ttft.target_s or 2.5)

    def step(self, observed: Observed) -> int:
        """Return the limit for the next second."""
        self._note(observed)
        if self._steps == 0 or self.learning:
            self._steps += 1
            if self.learning:
                return self.limit
        self._steps = LEARN
        self._settle = max(0, self._settle - 1)
        before = self.limit
        self._decide(observed)
        self._was_alone = self._alone >= NOBODY
        self.limit = max(0, min(self.limit, self.ceiling))
        if self.limit != before:
            self._held = 0
        return self.limit

    def alarm(self, ttft_s: float) -> int:
        """Pause at once if this probe missed the target badly; return the limit."""
        target_s = self.ttft.target_s
        if target_s and ttft_s > BADLY * target_s and self._alone < NOBODY and not self.learning:
            self._pause(self.ttft.shown(ttft_s))
        return self.limit

    def shown(self) -> dict[str, Any]:
        """Return the reason of the limit, what people feel and the targets, for `inspect stats`."""
        shown: dict[str, Any] = {"why": self.why, "nobody_else": self._alone >= NOBODY}
        for name, signal in (("ttft_ms", self.ttft), ("itl_ms", self.itl)):
            seconds = (signal.latest_s, signal.target_s)
            shown[name], shown[f"{name}_target"] = (s and round(1000 * s, 1) for s in seconds)
        return shown

    def _note(self, observed: Observed) -> None:
        # The histogram's last second has no tokens of ours only if two steps found no request.
        quiet = observed.in_flight == 0 and self._unused > 0
        self._unused = self._unused + 1 if observed.in_flight == 0 else 0
        self.ttft.note(observed.ttft_s, quiet=observed.in_flight == 0)
        self.itl.note(observed.itl_s, quiet=quiet)
        self._unknown = self._unknown + 1 if observed.other_clients is None else 0
        if observed.other_clients or self._unknown >= UNKNOWN:
            self._alone = 0
        elif observed.other_clients is False:
            self._alone += 1
        self._had_waiting |= observed.waiting is not None
        measured = observed.ttft_s is not None or observed.waiting is not None
        self._blind = 0 if measured or not observed.in_flight else self._blind + 1
        self._own = observed.in_flight
        self._waited.append(observed.waiting or 0)
        if not self._blind and self._own >= FILLED * self.limit:
            self._held += 1

    def _decide(self, observed: Observed) -> None:
        own, nobody = observed.in_flight, self._alone >= NOBODY
        waiting = self._waiting(nobody=nobody)
        worst = max((self.ttft, self.itl), key=lambda signal: signal.felt_ratio)
        ratio = 0.0 if nobody else worst.felt_ratio
        if not nobody and (missed := self._missed_badly()):
            self._pause(missed.shown(missed.latest_s))
        elif self._paused:
            if ratio <= 1 and not observed.waiting:
                self._resume(own)
        elif ratio > 1:
            if not self._settle:
                self._cut(own, ratio**-0.5, worst.shown(worst.felt_s))
        elif waiting:
            self._make_room(own, waiting, nobody=nobody)
        elif self._blind >= BLIND:
            self._cut(own, BLIND_CUT, "nothing can be measured")
        elif own == 0:
            self._begin()
        elif self._may_grow(observed, ratio):
            self._grow(nobody=nobody)

    def _missed_badly(self) -> Signal | None:
        """Return a signal that misses its target badly now."""
        for signal in (self.ttft, self.itl):
            if signal.latest_ratio > BADLY or signal.last_two_ratio > BADLY_TWICE:
                return signal
        return None

    def _waiting(self, *, nobody: bool) -> int:
        """Return how many requests wait in the server for longer than one step of it."""
        latest = self._waited[-1]
        if not nobody and latest > self._own / 2:
            return latest  # more than can have come during a step
        looks = WAITS_ALONE if nobody else WAITS
        return min(list(self._waited)[-looks:]) if len(self._waited) >= looks else 0

    def _begin(self) -> None:
        """Allow few requests after an idle time, because people would feel many at once."""
        if not self.limit or self.limit > FIRST:
            self.limit = min(FIRST, self.ceiling)
            self.why = "begins with few requests"

    def _pause(self, why: str) -> None:
        if not self._paused:
            # What people feel of a limit that was reached without them is not known.
            felt = min(self.limit, self._own)
            self._felt_at = 0 if self._was_alone else felt
            self._fast_to = FIRST if self._was_alone else max(1, felt * 3 // 4)
        self._paused, self.limit = True, 0
        self.why = f"paused: {why}"

    def _resume(self, own: int) -> None:
        self._paused, self._settle = False, SETTLE
        self.limit = max(1, min(self._fast_to, max(own, FIRST)))
        self.why = "resumes after a pause"

    def _cut(self, own: int, factor: float, why: str) -> None:
        used = min(self.limit, max(own, 1))
        self._felt_at = used
        self.limit = max(1, int(used * max(DEEPEST_CUT, min(SMALLEST_CUT, factor))))
        self._fast_to, self._settle = self.limit, SETTLE
        self.why = why
        self.ttft.forget()
        self.itl.forget()

    def _make_room(self, own: int, waiting: int, *, nobody: bool) -> None:
        """Lower the limit by the requests that wait in the server: none of ours must wait there."""
        left = min(self.limit, own) - waiting
        if left < 1 and not nobody:
            self._pause(f"{waiting} requests wait in the server")
            return
        self.limit = max(1, left)
        self._fast_to = self._roof = self.limit
        self._at_roof = 0
        self._waited.clear()  # those above the new limit end first
        self.why = "as many as the server can start"

    def _may_grow(self, observed: Observed, ratio: float) -> bool:
        if observed.in_flight < FILLED * self.limit:
            return False  # a higher limit would not send more
        if self._had_waiting and observed.waiting is None:
            self.why = "the server's metrics are missing"
            return False
        if self.ttft.went_silent:
            return False
        return ratio < HEADROOM and not self._settle and not observed.waiting

    def _far_below(self) -> bool:
        """Whether both times are far below their targets."""
        return self.ttft.is_below(FAR) and self.itl.is_below(FAR)

    def _grow(self, *, nobody: bool) -> None:
        if self.limit >= self._roof:
            self._at_roof += 1
            if self._at_roof < TRY_MORE:
                return
            self._at_roof = 0
            self._roof += max(1, self._roof // 32)
        near = not nobody and NEAR * self._felt_at < self.limit < self._felt_at / NEAR
        more = 1 if near else min(8, max(1, self.limit // 16))
        fast_to = self._fast_to
        if nobody or (self._far_below() and not near):
            below = self.limit < self._felt_at and not nobody
            fast_to = max(fast_to, int(NEAR * self._felt_at)) if below else self.ceiling
        if self.limit < fast_to:
            if self._held < HELD and self.limit >= FIRST:
                return  # the effect of the present limit is not known yet
            more = max(1, min(self.limit, fast_to - self.limit))
        self.limit = min(self.ceiling, self._roof, self.limit + more)
        self.why = "nobody else is there" if nobody else "all values are well below their targets"
