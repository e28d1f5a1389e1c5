"""Collects a batch's results with a word on how far it is, and on what it waits for."""

from __future__ import annotations

import time

from contract.batch import Batch
from contract.redis.batches import BatchStore
from producer.cli.progress import Meter, Quiet, tell, unsealed
from producer.core.collect import Collected, Collector, write
from producer.core.standing import Standing


def collect(
    store: BatchStore, batch: Batch, order: str, output: str | None, errors: str | None,
    *, follow: bool = False, partial: bool = False,
) -> Collected:  # fmt: skip
    """Write a batch's results to files or stdout; return how many there were.

    Args:
        store: where the batch is.
        batch: as the caller has found it.
        order: input or completion.
        output: as `write` takes it.
        errors: as `write` takes it.
        follow: wait for results that are not there yet.
        partial: of an unfinished batch, take what is there.

    Raises:
        BatchChanged: where there is not one line for each request; no file appears then.
        OutputUnwritable: if a file cannot be written.
    """
    workers, quiet = Standing(store, batch.fields.get("queue", "")), Quiet()
    so_far = Collected()
    with Meter(batch.id, batch.number("total")) as meter:

        def text() -> str:
            return f"{so_far.completed + so_far.failed} results, {so_far.failed} failed"

        def report(collected: Collected, *, last: bool = False) -> None:
            nonlocal so_far
            so_far = collected
            if last or meter.due():
                meter.update(collected.completed + collected.failed, text())

        def wait(seconds: float) -> None:
            now = collector.batch
            quiet_s = quiet.look(now)
            if meter.due():
                waits = workers.text() if now.sealed else unsealed(now, quiet_s)
                meter.update(so_far.completed + so_far.failed, f"{text()}; waiting, {waits}")
            time.sleep(seconds)

        collector = Collector(store, batch, follow=follow, partial=partial, sleep=wait)
        collected = write(collector.lines(order), output, errors, report)
        report(collected, last=True)
    counted = f"{collected.completed} results, {collected.failed} failed"
    if partial:
        counted += f", of {collector.batch.number('total')} requests"
    where = f", see {collected.errors_file}" if collected.errors_file else ""
    tell(f"{batch.id}: {counted}{where}")
    return collected
