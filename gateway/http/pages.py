"""Pages of lists, as both SDKs ask for them."""

from gateway.http.errors import invalid


def page_limit(text: str | None, default: int, most: int) -> int:
    """Return how many objects a page is to have; `text` is the query's.

    Raises:
        ApiError: for what is no number from 1 to `most`.
    """
    if text is None:
        return default
    try:
        limit = int(text) if len(text) < 20 else most + 1
    except ValueError:
        told = f"limit is {text[:40]!r}; give a whole number from 1 to {most}"
        raise invalid(told, "limit", "invalid_type") from None
    if limit > most:
        told = f"limit is {text[:40]}; give at most {most}"
        raise invalid(told, "limit", "integer_above_max_value")
    if limit < 1:
        raise invalid(f"limit is {limit}; give at least 1", "limit", "integer_below_min_value")
    return limit
