"""JSON as servers write it where it is not JSON: halves of characters, -Infinity, raw newlines.

Read only if orjson refuses it: what is paid for is not thrown away for the way it is written.
"""

import json
import math
import re
from typing import Any

#: OpenAI's own words for the log probability of a token that is very unlikely.
LOWEST_LOGPROB = -9999.0
#: Halves of characters, but for those that stand for bytes which are no UTF-8 (surrogateescape).
_HALVES = re.compile("[\ud800-\udc7f\udd00-\udfff]")
_OPEN_END = re.compile("[\ud800-\udfff]+$")


def loads(data: bytes) -> Any:
    """Return the value; its texts may hold halves of characters, which `repaired` joins.

    Raises:
        ValueError: it cannot be read this way either.
    """
    text = data.decode(json.detect_encoding(data), "surrogateescape")
    try:
        return json.loads(
            text, strict=False, parse_int=_int, parse_float=_finite, parse_constant=_finite
        )
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def _finite(text: str) -> float | None:
    value = float(text)
    if math.isfinite(value):
        return value
    return LOWEST_LOGPROB if value < 0 else None


def _int(text: str) -> float | None:
    return int(text) if len(text) < 19 else _finite(text)


def repaired(value: Any) -> Any:
    """Return the same without halves of characters: two that belong together are one character."""
    if isinstance(value, str):
        return value if value.isascii() else _repaired(value)
    if isinstance(value, list):
        return [repaired(entry) for entry in value]
    if isinstance(value, dict):
        return {
            repaired(name) if isinstance(name, str) else name: repaired(entry)
            for name, entry in value.items()
        }
    return value


def begun(text: str) -> str:
    """Return a text that goes on later, without the character at its end that is not whole yet."""
    return repaired(_OPEN_END.sub("", text))  # type: ignore[no-any-return]


def _repaired(text: str) -> str:
    text = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "surrogatepass")
    return _HALVES.sub("\ufffd", text).encode("utf-8", "surrogateescape").decode(errors="replace")
