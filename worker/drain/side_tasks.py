"""What runs beside the drain's loop; each of these survives Redis being away."""

from collections.abc import Coroutine
from typing import Any

from worker.drain.cancels import Cancels
from worker.drain.heartbeat import beat
from worker.drain.history import History
from worker.drain.lease_keeper import keep_leases
from worker.drain.loop import Drain
from worker.drain.progress import Progress
from worker.drain.running_text import RunningText
from worker.drain.sweeper import sweep
from worker.drain.watchdog import Watchdog


class SideTasks:
    """The side tasks of one drain."""

    def __init__(self, drain: Drain) -> None:
        self._drain = drain
        self.text = RunningText(drain)
        self.cancels = Cancels(drain, self.text)

    def tasks(self) -> list[Coroutine[Any, Any, None]]:
        """Return the coroutines to run."""
        # One that is part of a worker must not say that the worker's own loop turns.
        beating = [] if self._drain.part_of else [beat(self._drain)]
        return [
            *beating,
            keep_leases(self._drain),
            sweep(self._drain),
            Watchdog(self._drain).run(),
            Progress(self._drain).run(),
            History(self._drain).run(),
            self.cancels.run(),
            self.text.run(),
        ]
