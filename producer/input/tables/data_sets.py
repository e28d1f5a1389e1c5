"""Data sets of Hugging Face's datasets: rows without what Arrow has added to them.

A struct of theirs has the keys of all rows, with nulls, also within a row of Python's dicts. What
is JSON in a column of that type has its own keys, and keeps them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any


def is_data_set(given: object) -> bool:
    """Whether it is such a data set, in memory or streamed."""
    return hasattr(given, "features") and hasattr(given, "column_names")


class Unpadded:
    """The rows of a data set, in each of which keys without a value are left out at any depth."""

    def __init__(self, data_set: Any) -> None:
        self._data_set = data_set

    def __iter__(self) -> Iterator[Any]:
        features = self._data_set.features
        for row in self._data_set:
            yield _without(row, features) if isinstance(row, dict) else row


class SizedUnpadded(Unpadded):
    """The same of a data set that knows how many rows it has."""

    def __len__(self) -> int:
        return len(self._data_set)


def unpadded(data_set: Any) -> Iterable[Any]:
    """Return the rows of a data set without padding."""
    return (SizedUnpadded if hasattr(data_set, "__len__") else Unpadded)(data_set)


def _without(value: Any, feature: Any) -> Any:
    """Return a value without padding; where no features are known, all nulls of objects are."""
    if isinstance(value, dict) and (feature is None or isinstance(feature, Mapping)):
        inner = feature or {}
        return {k: _without(v, inner.get(k)) for k, v in value.items() if v is not None}
    if isinstance(value, list):
        kind = feature[0] if isinstance(feature, list) else getattr(feature, "feature", None)
        if feature is None or kind is not None:
            return [_without(one, kind) for one in value]
    return value
