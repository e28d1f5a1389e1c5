"""What a submit expects of its batch from what it knows without looking into the lines again."""

import orjson

from producer.submit.plan.content import Asked, FileContent
from producer.submit.plan.duration import Worker, duration, mean_answer
from producer.submit.plan.tokens import CHARACTERS

#: Bytes of a line that are not its prompt: names of fields, custom_id, parameters.
BESIDE = 100


def expected(line_bytes: int, requests: int, workers: list[Worker]) -> bytes:
    """Return it as JSON, as the batch's hash keeps it.

    Args:
        line_bytes: of all lines that were queued.
        requests: how many they are.
        workers: the announcements of the workers that will take them.

    Returns:
        `prompt_tokens`, from the bytes; `completion_tokens`, as the workers' answers are on
        average, null where none has ended; `seconds`, null where no worker has measured.
    """
    prompt = max(requests, (line_bytes - BESIDE * requests) // CHARACTERS)
    content = FileContent(requests=requests, prompt_tokens=prompt, estimated=requests)
    usual = mean_answer(workers)
    if usual is not None and requests:
        content.choices = requests
        content.expected = Asked(usual * requests, usual * (prompt + requests * usual / 2))
    time = duration(content, workers) if usual is not None else None
    return orjson.dumps({
        "prompt_tokens": prompt,
        "completion_tokens": None if usual is None else round(usual * requests),
        "seconds": None if time is None else round(time.seconds, 1),
    })  # fmt: skip
