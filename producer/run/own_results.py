"""Recognises the results of a batch in a file."""

import orjson

from contract import naming

_BEGINS = b'{"id":"batch_req_'


def is_result_of(line: bytes, batch_id: str) -> bool:
    """Whether a line of a file is a result of the batch, or the beginning of any result."""
    if not line.endswith(b"\n"):
        return line[: len(_BEGINS)] == _BEGINS[: len(line)]
    try:
        result = orjson.loads(line)
        number = (result["error"] or result["warmq"])["line"]
        custom_id, own_id = str(result["custom_id"]), result["id"].removeprefix("batch_req_")
    except (orjson.JSONDecodeError, LookupError, TypeError, AttributeError):
        return False
    return own_id in (
        naming.request_id(batch_id, custom_id),
        naming.line_request_id(batch_id, number),
    )
