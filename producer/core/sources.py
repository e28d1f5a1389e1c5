"""Opens what a name stands for: a file of lines, a table, a folder of a data set."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath

from producer.core.places.place import FilePlace, Place
from producer.core.reader import Input, InputUnreadable
from producer.core.source import Source
from producer.core.submission import BadOption
from producer.core.tables.source import TableSource, kind_of

#: Of the files that a data set's folder is of; the first kind that is there counts.
_DATASET = (".parquet", ".arrow")
#: `train-00000-of-00004.parquet`, as data sets' files are named.
_SHARD = re.compile(r"-\d+-of-\d+$")


def open_source(name: str, pairs: Mapping[str, str] | None = None) -> Source:
    """Open what is to be submitted: JSON lines, parquet, Arrow, CSV, or a folder or pattern (`*`)
    of such tables.

    `pairs` maps the fields of requests to columns, or to templates over columns.

    Raises:
        InputUnreadable: there is nothing of that name, or it cannot be read.
        BadOption: the mapping does not fit the columns, or what the name means is not clear.
        ExtraMissing: a package is not installed that reads such files.
    """
    places = _places(name)
    if places is not None:
        return TableSource(name, places, pairs or {})
    if pairs:
        raise BadOption(
            f"{name} has lines of JSON, and columns are mapped in tables: parquet, Arrow or CSV"
        )
    return Input(name)


def _places(name: str) -> Sequence[Place] | None:
    """Return the files of a table; None for a file that has lines."""
    path = Path(name)
    if path.is_dir():
        return [FilePlace(found) for found in _dataset(name, sorted(path.rglob("*")))]
    if "*" in path.name and not path.exists():
        found = sorted(path.parent.glob(path.name))
        if not found:
            raise InputUnreadable(f"cannot read {name}: no file is named like that")
        return [FilePlace(each) for each in _one_kind(name, found)]
    return [FilePlace(name)] if kind_of(name) else None


def _dataset(name: str, found: Sequence[Path]) -> list[Path]:
    """Return the files of a data set's folder, which must have one split."""
    for kind in _DATASET:
        # datasets keeps what it has computed in cache-*.arrow beside the data.
        files = [f for f in found if f.suffix == kind and not f.name.startswith(("cache-", "."))]
        splits = sorted({_split(path) for path in files})
        if len(splits) > 1:
            raise BadOption(
                f"{name} has several parts: give one of them, as {', '.join(map(repr, splits))}"
            )
        if files:
            return files
    raise InputUnreadable(
        f"cannot read {name}: it is a folder without {' or '.join(_DATASET)} files; name a file"
    )


def _split(path: Path) -> str:
    """Return the pattern of the files that are of one split with this one."""
    stem = PurePosixPath(path).stem
    return str(path.with_name(_SHARD.sub("-*", stem) + path.suffix))


def _one_kind(name: str, found: Sequence[Path]) -> Sequence[Path]:
    kinds = {kind_of(path.name) for path in found}
    if kinds == {""} or len(kinds) > 1:
        raise BadOption(
            f"{name} stands for files of {len(kinds)} kinds; a pattern names tables of one kind: "
            ".parquet, .arrow or .csv"
        )
    return found
