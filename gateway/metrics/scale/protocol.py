"""What autoscalers are told over the wire."""

from msgspec import Struct


class Scale(Struct, frozen=True):
    """What a model's queue holds: requests `waiting` and `in_flight`, both together in `tokens`.

    A request is counted as `mean_tokens`: what those of the queue cost lately, prompt and answer;
    as one token at least.
    `workers` serve the queue now, with `slots` requests at once.
    """

    queue: str
    waiting: int
    in_flight: int
    requests: int
    mean_tokens: float
    tokens: int
    workers: int
    slots: int
