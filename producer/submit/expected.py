"""What a submit expects of its batch, and what Redis takes for it; no line is looked into."""

from collections.abc import Sequence
from typing import Any

import orjson

from producer.submit.prompt_tokens import CHARACTERS
from producer.time_left import Pace

#: Bytes, measured on Redis 6.2: of a request beside its message; of a result beside its answer's
#: text (690 of vLLM's fields, 250 of its envelope and times, 240 of its key, Redis' own and its id
#: among the finished ones); and of a token of that text, about.
WAITING, RESULT, TOKEN = 16, 1180, 4
#: What a list takes more than its messages
#: (tests/integration/producer/submit/test_plan.py holds it to 10 %).
LIST = 1.03
#: A batch's own keys.
BATCH = 4096
#: Bytes of a line that are not its prompt: names of fields, custom_id, parameters.
BESIDE = 100

Worker = dict[str, Any]


def expected(line_bytes: int, requests: int, workers: Sequence[Worker], pace: Pace | None) -> bytes:
    """Return what a submit expects of its batch without looking into the lines again, as JSON, as
    the batch's hash keeps it.

    Args:
        line_bytes: of all lines that were queued.
        requests: how many they are.
        workers: the announcements of the workers that will take them.
        pace: at what rate they work.

    Returns:
        `prompt_tokens`, from the bytes; `completion_tokens`, as the workers' answers are on
        average, null where none has ended; `seconds`, null where no worker has worked.
    """
    prompt = max(requests, (line_bytes - BESIDE * requests) // CHARACTERS)
    usual = mean_answer(workers)
    written = None if usual is None else round(usual * requests)
    seconds = None
    if pace is not None and written is not None:
        seconds = round(pace.seconds(prompt + written, requests), 1)
    return orjson.dumps({"prompt_tokens": prompt, "completion_tokens": written, "seconds": seconds})


def least_result_bytes(requests: int) -> int:
    """Return what so many results take in Redis at least, with answers of vLLM that say nothing."""
    return BATCH + RESULT * requests


def mean_answer(workers: Sequence[Worker]) -> float | None:
    """Return the tokens of the workers' answers on average; None if none has answered yet."""
    known = [number(worker.get("mean_answer")) for worker in workers]
    return sum(known) / len(known) if (known := [k for k in known if k]) else None


def number(value: object) -> float:
    """Return a number that a worker announced; 0 for anything else."""
    return float(value) if isinstance(value, int | float) and value > 0 else 0.0
