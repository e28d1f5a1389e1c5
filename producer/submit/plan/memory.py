"""What a batch will need in Redis, in bytes."""

from dataclasses import dataclass

from producer.submit.plan.content import FileContent

#: Bytes, measured on Redis 6.2: of a request beside its message; of a result beside its answer's
#: text (690 of vLLM's fields, 250 of its envelope and times, 240 of its key, Redis' own and its id
#: among the finished ones); and of a token of that text, about.
WAITING, RESULT, TOKEN = 16, 1180, 4
#: What a list takes more than its messages
#: (tests/integration/producer/submit/test_plan.py holds it to 10 %).
LIST = 1.03
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


def least_bytes(requests: int) -> int:
    """Return what so many results take in Redis at least, with answers of vLLM that say nothing."""
    return BATCH + RESULT * requests


def redis_bytes(content: FileContent) -> RedisBytes:
    """Return what Redis needs for a file that is submitted whole."""
    kept = BATCH + content.index_bytes + content.bad * RESULT // 2 + content.reject_bytes
    waiting = round(content.message_bytes * LIST) + WAITING * content.requests
    results = RESULT * content.requests + round(TOKEN * content.expected.written)
    return RedisBytes(kept + waiting, kept + results)
