"""What a batch will need in Redis, in bytes."""

from dataclasses import dataclass

from producer.core.plan.reading import FileContent

#: Measured by tests/integration/test_plan_memory.py on Redis 6.2: what a request takes beside its
#: message's own bytes (its place in the list, its id among the finished ones), what a result takes
#: beside its answer's text (its key, OpenAI's fields, times), and bytes of an answer's token.
WAITING, RESULT, TOKEN = 16, 1050, 4
#: What the list of messages takes more than its messages: nodes are filled to a part.
LIST = 1.05
#: A batch's own keys.
BATCH = 4096


@dataclass(frozen=True, slots=True)
class RedisBytes:
    """`waiting` before the first request runs, `finished` when the last has ended and no result is
    collected, `most` in between."""

    waiting: int
    finished: int

    @property
    def most(self) -> int:
        """What Redis must have room for."""
        return max(self.waiting, self.finished)


def redis_bytes(content: FileContent) -> RedisBytes:
    """Return what Redis needs for a file that is submitted whole."""
    kept = BATCH + content.index_bytes + content.bad * RESULT // 2 + content.reject_bytes
    waiting = round(content.message_bytes * LIST) + WAITING * content.requests
    results = RESULT * content.requests + round(TOKEN * content.expected.written)
    return RedisBytes(kept + waiting, kept + results)
