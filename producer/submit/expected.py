"""Estimates, without reading lines: a batch's tokens and time, and its space in Redis."""

from collections.abc import Sequence
from typing import Any

import orjson

from producer.submit.prompt_tokens import CHARACTERS_PER_TOKEN
from producer.time_left import Pace

#: Bytes in Redis, measured on 6.2: of a queued request without its message; of a result without its
#: answer's text (690 of vLLM's fields, 250 of its envelope and times, 240 of its key, Redis' own
#: and its id among the finished ones); of a token of that text, about.
REQUEST_BYTES, RESULT_BYTES, TOKEN_BYTES = 16, 1180, 4
#: Size of a list ÷ size of its messages (test_plan.py holds it to 10 %).
LIST_FACTOR = 1.03
#: Bytes of a batch's own keys.
BATCH_BYTES = 4096
#: Bytes of a line that are not its prompt: names of fields, custom_id, parameters.
_LINE_OVERHEAD = 100

Worker = dict[str, Any]


def expected(line_bytes: int, requests: int, workers: Sequence[Worker], pace: Pace | None) -> bytes:
    """Return a batch's expected load as JSON, for its hash in Redis.

    `line_bytes` is the size of all lines. The result has `prompt_tokens`; `completion_tokens`, null
    while no worker has answered; `seconds`, null while no worker has worked.
    """
    prompt = max(requests, (line_bytes - _LINE_OVERHEAD * requests) // CHARACTERS_PER_TOKEN)
    usual = mean_answer(workers)
    written = None if usual is None else round(usual * requests)
    seconds = None
    if pace is not None and written is not None:
        seconds = round(pace.seconds(prompt + written, requests), 1)
    return orjson.dumps({"prompt_tokens": prompt, "completion_tokens": written, "seconds": seconds})


def least_result_bytes(requests: int) -> int:
    """Return the least space in Redis of so many results, with empty answers of vLLM."""
    return BATCH_BYTES + RESULT_BYTES * requests


def mean_answer(workers: Sequence[Worker]) -> float | None:
    """Return the mean tokens of the workers' answers; None if none has answered yet."""
    known = list(filter(None, (number(worker.get("mean_answer")) for worker in workers)))
    return sum(known) / len(known) if known else None


def number(value: object) -> float:
    """Return a positive number of an announcement; 0 for anything else."""
    return float(value) if isinstance(value, int | float) and value > 0 else 0.0
