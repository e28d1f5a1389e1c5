"""Reads durations as users write them: 90s, 2h, 1d12h."""

import re

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_DURATION = re.compile(r"(?:[0-9]+(?:\.[0-9]+)?[smhd])+")
_PART = re.compile(r"([0-9]+(?:\.[0-9]+)?)([smhd])")


def duration_s(text: str) -> float | None:
    """Return the seconds of a duration, None for any other text.

    The caller must limit the length of a text that it does not trust.
    """
    if not _DURATION.fullmatch(text):
        return None
    return sum(float(number) * _UNITS[unit] for number, unit in _PART.findall(text))
