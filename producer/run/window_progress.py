"""Describes what a run's window waits for."""

from collections.abc import Callable

from contract.batch import Batch
from contract.failures import failures_so_far
from contract.redis.batches import BatchStore
from producer.queue_workers import BatchWorkers, left_text
from producer.stalls import LeasesLost


class WindowProgress:
    """Reads what of a window has ended, what failed, the time left, workers and lost leases.

    `left_s` returns the seconds to the end of the run, `starting` is as in QueueWorkers.
    """

    def __init__(
        self, store: BatchStore, left_s: Callable[[], float | None], *, starting: bool
    ) -> None:
        self._store, self._left_s = store, left_s
        self._workers = BatchWorkers(store, starting=starting)
        self._leases = LeasesLost(store)

    def text(self, window: Batch) -> str:
        """Return a line about a window that was read earlier."""
        now = self._store.batch(window.id) or window  # if deleted, the collector raises
        ended = f"{now.terminal} of the next {now.number('total')} requests have ended"
        ended += f" ({failing})" if (failing := failures_so_far(now)) else ""
        eta = "" if (left := self._left_s()) is None else f"ETA {left_text(left)}"
        text = ", ".join(filter(None, (ended, eta, self._workers.text(now))))
        return "; ".join(filter(None, (text, self._leases.text(now))))
