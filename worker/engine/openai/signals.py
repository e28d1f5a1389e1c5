"""What people feel of a server: a time with its latest values, its quiet value and its target."""

from collections import deque
from statistics import median

#: Number of latest values that count, and the fewest that show more than chance.
LATEST, FEWEST = 7, 5
#: In each quiet step, the quiet value moves by this part of the way to a lower, or a higher, value.
#: It rises slowly, so that a rush hour does not become the measure.
FALLS, RISES = 0.1, 0.02
#: Quiet steps for which a value from before counts.
LEARNED = 50


class Signal:
    """One time that people feel: its latest values, its quiet value and its target, in seconds.

    The quiet value is known after `enough` of `quiet_steps`.
    """

    def __init__(self, name: str, target_s: float | None, factor: float, enough: int) -> None:
        self.name, self.enough = name, enough
        self.quiet_s: float | None = None
        self._user_target_s, self._factor = target_s, factor
        self._recent: deque[float] = deque(maxlen=LATEST)
        self.quiet_steps = 0
        self._had_values = False

    def note(self, value: float | None, *, quiet: bool) -> None:
        """Note a step's value. A step without one makes the latest values count less."""
        if value is None or value <= 0:
            if self._recent:
                self._recent.popleft()
            return
        self._recent.append(value)
        self._had_values = True
        if quiet:
            self.quiet_steps += 1
            before_s = value if self.quiet_s is None else self.quiet_s
            part = max(FALLS if value < before_s else RISES, 1 / self.quiet_steps)
            self.quiet_s = before_s + part * (value - before_s)

    def learn(self, quiet_s: float | None) -> None:
        """Take over a quiet value that was measured before, unless this one has its own."""
        if quiet_s is not None and self.quiet_steps < self.enough:
            self.quiet_s, self.quiet_steps = quiet_s, LEARNED

    def forget(self) -> None:
        """Forget the latest values: they were measured under another limit."""
        self._recent.clear()

    @property
    def has_target(self) -> bool:
        """Whether the target is the user's, or follows from enough quiet steps."""
        return self._user_target_s is not None or self.quiet_steps >= self.enough

    @property
    def went_silent(self) -> bool:
        """Whether there were values before, but none count now."""
        return self._had_values and not self._recent

    @property
    def target_s(self) -> float | None:
        """The target: the user's, or a factor of the quiet value; None until that is known."""
        if self._user_target_s is not None:
            return self._user_target_s
        return None if self.quiet_s is None else self._factor * self.quiet_s

    @property
    def felt_s(self) -> float | None:
        """The median of the latest values, which one outlier does not change."""
        return median(self._recent) if len(self._recent) >= FEWEST else None

    @property
    def felt_ratio(self) -> float:
        """The median as a multiple of the target."""
        return self._ratio(self.felt_s)

    @property
    def latest_s(self) -> float | None:
        """The latest value."""
        return self._recent[-1] if self._recent else None

    @property
    def latest_ratio(self) -> float:
        """The latest value as a multiple of the target."""
        return self._ratio(self.latest_s)

    def is_below(self, part: float) -> bool:
        """Whether the latest value and the median are below this part of the target.

        A time that was never measured is. A median of too few values is not known yet.
        """
        if not self._had_values:
            return True
        return self.felt_s is not None and max(self.felt_ratio, self.latest_ratio) < part

    @property
    def last_two_ratio(self) -> float:
        """The lower one of the latest two values as a multiple of the target."""
        return self._ratio(min(list(self._recent)[-2:])) if len(self._recent) > 1 else 0.0

    def _ratio(self, seconds: float | None) -> float:
        target_s = self.target_s
        return seconds / target_s if seconds is not None and target_s else 0.0

    def shown(self, felt_s: float | None) -> str:
        """Return a value and the target in words."""
        felt_ms, target_ms = 1000 * (felt_s or 0.0), 1000 * (self.target_s or 0.0)
        return f"{self.name} after {felt_ms:.1f} ms, target {target_ms:.1f} ms"
