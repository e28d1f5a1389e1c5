"""Describes the ended requests that a retry leaves as they are."""

from collections.abc import Collection, Iterator

from contract.batch import Batch
from contract.failures import failures_text
from contract.redis.batches import BatchStore
from producer.redis import EndedRequests


def unchanged_texts(
    store: BatchStore, batch: Batch, outcomes: Collection[str], count: int
) -> Iterator[str]:
    """Yield a text about each kind of ended requests after a retry of `outcomes`.

    `batch` is the batch after the retry, which queued `count` requests.
    """
    again, gone = EndedRequests.using(store).counts(batch, outcomes)
    if gone:
        one, several = "stays as it ended: its message is", "stay as they ended: their messages are"
        yield f"{_counted(gone, one, several)} gone; submit what is missing as a new batch"
    if again:
        kind = "have ended again already" if count else "have ended meanwhile"
        one = kind.replace("have", "has")
        them = "it" if again == 1 else "them"
        yield f"{_counted(again, one, kind)}: the same command queues {them} once more"
    for name in ("cancelled", "expired"):
        if name not in outcomes and (number := batch.number(name)):
            them = "it" if number == 1 else "them"
            texts = (f"is {name}", f"are {name}")
            yield f"{_counted(number, *texts)}: --include {name} retries {them}"
    if wrong := _wrong_lines(batch):
        one, several = "is wrong itself, so that it", "are wrong themselves, so that they"
        yield (
            f"{_counted(wrong, one, several, 'failed line')} would fail again "
            f"({failures_text(batch)}): correct {'it' if wrong == 1 else 'them'}, and submit the "
            "correction as a new batch"
        )


def _wrong_lines(batch: Batch) -> int:
    """Return the number of lines that were refused when they were submitted."""
    if "valid" not in batch.fields:  # a producer of 0.1.0 submitted the batch
        return 0
    return min(batch.number("failed"), batch.number("total") - batch.number("valid"))


def _counted(number: int, one: str, several: str, noun: str = "request") -> str:
    return f"{number:,} {noun} {one}" if number == 1 else f"{number:,} {noun}s {several}"
