"""Estimates a batch's tokens, time and Redis memory without reading its lines."""

from collections.abc import Sequence
from typing import Any

import orjson

from producer.submit.prompt_tokens import CHARACTERS_PER_TOKEN
from producer.time_left import Pace

#: Bytes in Redis, measured on 6.2. REQUEST_BYTES: a queued request without its message.
#: RESULT_BYTES: a result without its answer's text (690 for vLLM's fields, 250 for the envelope and
#: times, 240 for the key, Redis's own data, and the id in the list of finished requests).
#: TOKEN_BYTES: one token of the answer's text, on average.
REQUEST_BYTES, RESULT_BYTES, TOKEN_BYTES = 16, 1180, 4
#: Size of a list in Redis divided by the size of its messages (test_plan.py checks it to 10 %).
LIST_FACTOR = 1.03
#: Bytes in Redis of a batch's own keys.
BATCH_BYTES = 4096
#: Assumed bytes of a line that are not its prompt: names of fields, custom_id, parameters.
_LINE_OVERHEAD = 100

Worker = dict[str, Any]


def expected(line_bytes: int, requests: int, workers: Sequence[Worker], pace: Pace | None) -> bytes:
    """Return a batch's expected load as JSON, for its hash in Redis.

    `line_bytes` is the size of all lines. The JSON has `prompt_tokens`, `completion_tokens` (null
    if no worker has answered a request yet) and `seconds` (null also if the pace is unknown).
    """
    prompt = max(requests, (line_bytes - _LINE_OVERHEAD * requests) // CHARACTERS_PER_TOKEN)
    usual = mean_answer(workers)
    written = None if usual is None else round(usual * requests)
    seconds = None
    if pace is not None and written is not None:
        seconds = round(pace.seconds(prompt + written, requests), 1)
    return orjson.dumps({"prompt_tokens": prompt, "completion_tokens": written, "seconds": seconds})


def least_result_bytes(requests: int) -> int:
    """Return the least bytes in Redis of `requests` results, which have empty answers."""
    return BATCH_BYTES + RESULT_BYTES * requests


def mean_answer(workers: Sequence[Worker]) -> float | None:
    """Return the mean tokens of the workers' answers; None if none has answered yet."""
    known = list(filter(None, (number(worker.get("mean_answer")) for worker in workers)))
    return sum(known) / len(known) if known else None


def number(value: object) -> float:
    """Return a value of an announcement if it is a positive number, otherwise 0."""
    return float(value) if isinstance(value, int | float) and value > 0 else 0.0
