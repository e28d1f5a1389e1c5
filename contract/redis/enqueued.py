"""Converts the arguments and replies of the scripts that queue messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from contract import naming


class Enqueued(NamedTuple):
    """The reply of ENQUEUE, ENQUEUE_PLANNED or SEAL.

    `answer` is ok, gone, sealed, moved, full, unknown, at or plan. With `moved` and `sealed`,
    `cursor` and `digest` are the batch's; with `at`, `cursor` is the position in the plan. `text`
    is the reason of `full`, or the batch's plan with `plan`; with `unknown` it has the ids of the
    requests whose known answers are gone; with `ok` it is `stopped` if too many requests of the
    batch failed before, so that these ones end as cancelled.
    """

    answer: str
    cursor: int = 0
    digest: str = ""
    text: str = ""

    @classmethod
    def of(cls, reply: list[bytes]) -> Enqueued:
        """Return a script's reply as Enqueued."""
        answer = reply[0].decode()
        if answer == "moved" or (answer == "sealed" and len(reply) > 1):
            return cls(answer, int(reply[1]), reply[2].decode())
        if answer == "at":
            return cls(answer, int(reply[1] or 0))
        return cls(answer, text=reply[1].decode() if len(reply) > 1 else "")


def by_list(list_key: str, messages: Sequence[bytes], queues: Sequence[str]) -> tuple[str, bytes]:
    """Return the keys of messages' lists and the messages, as ENQUEUE takes them."""
    if not queues:
        return list_key, b"\n".join(messages)
    lists: dict[str, list[bytes]] = {}
    for queue, message in zip(queues, messages, strict=True):
        lists.setdefault(naming.list_in(queue, list_key), []).append(message)
    return "\n".join(lists), b"\n\n".join(map(b"\n".join, lists.values()))
