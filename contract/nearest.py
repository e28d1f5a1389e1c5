"""The known name that a misspelt one is closest to."""

from collections.abc import Iterable
from difflib import get_close_matches


def nearest(name: str, known: Iterable[str], alike: float = 0.6) -> str:
    """Return the closest known name that is at least so `alike` (difflib's ratio), '' if none is.

    Upper and lower case count as the same.
    """
    folded = {each.casefold(): each for each in known}
    near = get_close_matches(name.casefold(), folded, 1, alike)
    return folded[near[0]] if near else ""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return `; did you mean X?` with the closest known name, '' if none is close."""
    near = nearest(name, known)
    return f"; did you mean {near}?" if near else ""
