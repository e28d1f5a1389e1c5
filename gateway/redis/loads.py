"""What a queue holds, for whoever decides how many workers it gets."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from contract import naming
from contract.redis import keys
from contract.redis.announcements import is_alive, read_announcements
from contract.redis.reads import Reads

#: Tokens that a request is taken for as long as none of its queue has ended.
UNKNOWN_TOKENS = 256.0


@dataclass(frozen=True, slots=True)
class Load:
    """Requests of one queue: `waiting` in its lists, suspects included, `in_flight` leased.

    `mean_tokens` is what a request of the queue cost lately, prompt and answer; `slots` is how many
    its living workers run at once.
    """

    waiting: int
    in_flight: int
    mean_tokens: float
    workers: int
    slots: int

    @property
    def tokens(self) -> int:
        """What waits and what runs, in tokens; a request is at least one.

        The mean is 0 where a server reports no usage, and no queue that has work may be told as 0:
        its last workers would be stopped.
        """
        return round((self.waiting + self.in_flight) * max(1.0, self.mean_tokens))


class Loads(Reads):
    """Loads of one Redis. Each call raises StoreUnavailable where it cannot be used."""

    def load(self, queue: str) -> Load:
        """Return what a queue holds now, all zeros for one that nobody has used."""
        return self.loads([queue])[queue]

    def loads(self, queues: Iterable[str]) -> dict[str, Load]:
        """Return the same of several queues, by their names: one round trip."""
        names = list(queues)
        pipe = self._client.pipeline(transaction=False)
        pipe.hgetall(keys.WORKERS).time()
        for queue in names:
            pipe.hgetall(naming.turns_key(queue))
            for name in (*naming.priority_lists(queue), keys.suspects_list(queue)):
                pipe.llen(name)
        raw, (now_s, _), *replies = pipe.execute()
        alive = [each for each in read_announcements(raw, now_s) if is_alive(each)]
        width = 2 + len(naming.PRIORITY_STEPS)
        return {
            queue: _load(
                replies[n * width],
                replies[n * width + 1 : (n + 1) * width],
                [each for each in alive if each["queue"] == queue],
            )
            for n, queue in enumerate(names)
        }


def _load(
    counters: Mapping[bytes, bytes], lengths: Iterable[int], workers: Sequence[Mapping[str, Any]]
) -> Load:
    # Those of a fleet that was killed stay until one of its successors sweeps them: so they call
    # for one.
    in_flight = sum(int(n) for name, n in counters.items() if name.startswith(b"in_flight:"))
    return Load(
        waiting=max(0, int(counters.get(b"waiting", 0))) + sum(lengths),
        in_flight=max(0, in_flight),
        mean_tokens=float(counters.get(b"mean", UNKNOWN_TOKENS)),
        workers=len(workers),
        slots=sum(each.get("limit", 0) for each in workers),
    )
