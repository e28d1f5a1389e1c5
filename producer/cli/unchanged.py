"""Describes the ended requests that a retry leaves as they are."""

from collections.abc import Collection, Iterator

from contract.batch import Batch
from contract.failures import failures_of, wrong_count, wrong_text
from contract.redis.batches import BatchStore
from producer.redis import EndedRequests

#: The error code of failed requests whose messages are dead letters.
_DEAD = "poison"


def unchanged_texts(
    store: BatchStore, batch: Batch, outcomes: Collection[str], count: int
) -> Iterator[str]:
    """Yield a text about each kind of ended requests after a retry of `outcomes`.

    `batch` is the batch after the retry, which queued `count` requests. `outcomes` has `failed`.
    """
    codes = failures_of([batch])
    can_run, gone = EndedRequests.using(store).counts(batch, outcomes)
    dead = sum(one.count for one in codes if one.code == _DEAD)
    failed = can_run["failed"] + gone["failed"]
    # Redis has no message of a line that was refused before it ran, for its model for example.
    refused = max(0, batch.number("failed") - wrong_count(codes) - dead - failed)
    if missing := gone.total() + refused:
        one, several = "stays as it ended", "stay as they ended"
        yield (
            f"{_counted(missing, one, several)}: Redis has no message of "
            f"{'it' if missing == 1 else 'them'}; submit what is missing as a new batch"
        )
    if again := can_run.total():
        kind = "have ended again already" if count else "have ended meanwhile"
        one = kind.replace("have", "has")
        them = "it" if again == 1 else "them"
        yield f"{_counted(again, one, kind)}: the same command queues {them} once more"
    for name in ("cancelled", "expired"):
        if name not in outcomes and (number := batch.number(name)):
            them = "it" if number == 1 else "them"
            texts = (f"is {name}", f"are {name}")
            yield f"{_counted(number, *texts)}: --include {name} retries {them}"
    if dead:
        texts = ("is a dead letter", "are dead letters")
        yield f"{_counted(dead, *texts)} ({_DEAD}): see `producer dead list`"
    if text := wrong_text(codes):
        yield f"{text}, and submit the correction as a new batch"


def _counted(number: int, one: str, several: str) -> str:
    return f"{number:,} request {one}" if number == 1 else f"{number:,} requests {several}"
