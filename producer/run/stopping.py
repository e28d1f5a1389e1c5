"""Stops a run in which too many requests fail; the same command continues the run."""

from dataclasses import dataclass

from contract.batch import Batch
from contract.errors import WarmqError
from contract.redis.batches import BatchStore
from producer.run.journal import RunProgress
from producer.submit.submission import change_limit

#: A limit in percent is checked only when this many requests have ended.
FEWEST_JUDGED = 100


class RunStopped(WarmqError):
    """So many requests of a run have failed that it was stopped."""

    code = "stopped"


@dataclass(frozen=True, slots=True)
class FailureLimit:
    """The limit `stop_after` of a run's failures, '' for none.

    Failures from before this command do not count; `begun` is the progress at its start. Redis
    checks each window while it runs, with the counts of the earlier windows
    (contract/lua/failures.lua).
    """

    store: BatchStore
    stop_after: str
    begun: RunProgress

    def _since(self, done: RunProgress) -> tuple[int, int]:
        """Return how many requests ended and failed since this command began."""
        failed = done.failed - self.begun.failed
        return done.ended - self.begun.ended, failed

    def judged_from(self, done: RunProgress) -> dict[str, str]:
        """Return the field of a window's batch that counts the windows before it."""
        # Counts (total, rejected, ended, failed) that the script subtracts from the batch's.
        ended, failed = self._since(done)
        return {"judged_from": f"-{ended} 0 -{ended} -{failed}"} if ended else {}

    def reopen(self, batch: Batch) -> Batch:
        """Give a window this limit; run again what failed or was cancelled if it was stopped."""
        batch, _ = change_limit(self.store, batch, self.stop_after)
        if batch.stopped:
            self.store.retry(batch, ("failed", "cancelled"))
            batch = self.store.batch(batch.id) or batch
        return batch

    def check_window(self, batch_id: str) -> None:
        """Raise RunStopped if a window was stopped, once its requests have ended."""
        batch = self.store.batch(batch_id)
        if self.stop_after and batch is not None and batch.stopped:
            reason = self._complete(batch.fields["reason"])
            self.store.cancel(batch, reason)
            raise RunStopped(reason)

    def check(self, done: RunProgress) -> None:
        """Raise RunStopped if the requests of all windows together reach the limit."""
        ended, failed = self._since(done)
        limit = float(self.stop_after.rstrip("%") or "inf")
        is_share = self.stop_after.endswith("%")
        if is_share and ended < FEWEST_JUDGED:
            return
        if (100 * failed / ended if is_share else failed) >= limit:
            raise RunStopped(
                self._complete(
                    f"stopped: {failed} of {ended} requests failed (stop after failures: "
                    f"{self.stop_after})"
                )
            )

    def _complete(self, reason: str) -> str:
        """Return a reason with the requests that it does not count."""
        ended, failed = self.begun.ended, self.begun.failed
        earlier = f"; {failed} of {ended} before this command are not counted" if ended else ""
        return reason + earlier
