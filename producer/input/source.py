"""What a submit reads: lines with numbers, which most sources can give again from the start.

A file of lines is one (reader.py), and so is a Python iterable (items.py). Where a line is made
from something else, the chunks say how to tell what is wrong with it in its own terms (`told`).
`open_source` opens what a name stands for: a file of lines, a table, a folder of a data set; here
or in a bucket.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePath, PurePosixPath
from typing import Protocol, Self

from producer.input.bucket import is_url, is_web, keys_under, place_of, redacted
from producer.input.options import BadOption
from producer.input.reader import Input, InputUnreadable, RawChunk
from producer.input.tables.source import TableSource, kind_of


class Source(Protocol):
    """One input. Opening it reads nothing yet."""

    @property
    def name(self) -> str:
        """What messages call it."""

    @property
    def size(self) -> float | None:
        """How much there is, in the unit that `position` counts; None where nobody knows."""

    @property
    def position(self) -> float:
        """How much of `size` was read."""

    @property
    def repeatable(self) -> bool:
        """Whether it can be read again from its start."""

    def again(self) -> Self:
        """Return the same source from its start, where it is `repeatable`."""

    def fingerprint(self) -> str:
        """Return what another source hardly has; '' where it cannot be known before it is read."""

    def chunks(self, seed: str | None, max_line_bytes: int) -> Iterator[RawChunk]:
        """Yield its lines, as `reader.chunks` does; once only.

        Raises:
            InputUnreadable: it is damaged.
        """

    def close(self) -> None:
        """Give back what it holds."""


#: Of the files that a data set's folder is of; the first kind that is there counts.
_DATASET = (".parquet", ".arrow")
#: What numbers a shard in its name: `train-00000-of-00004.parquet`, with a hash behind it as older
#: releases of datasets pushed it; `train/0000.parquet`, as the hub converts data sets.
_SHARD = re.compile(r"(-)\d+-of-\d+(?:-[0-9a-f]{16})?$|(?<![^/])\d{4,}$")

#: Of a pattern's characters only `*` means something: names may have the others.
_ONLY_STARS = re.compile(r"[\[?]")
_NUMBER = re.compile(r"([0-9]+)")
#: Parts of a folder that a message names.
_SHOWN = 3


def open_source(name: str, pairs: Mapping[str, str] | None = None) -> Source:
    """Open what is to be submitted: JSON lines, parquet, Arrow, CSV, or a folder or pattern (`*`)
    of such tables; a file, or an object of a bucket (s3://, gs://, az://, https://).

    `pairs` maps the fields of requests to columns, or to templates over columns.

    Raises:
        InputUnreadable: there is nothing of that name, or it cannot be read.
        BadOption: the mapping does not fit the columns, or what the name means is not clear.
        BadPlace: a URL names no bucket, or one that cannot be listed.
        ExtraMissing: a package is not installed that reads such files.
    """
    files = _files_of_url(name) if is_url(name) else _files(name)
    if files:
        return TableSource(redacted(name), [place_of(file) for file in files], pairs or {})
    if pairs:
        raise BadOption(
            f"{redacted(name)} has lines of JSON, and columns are mapped in tables: parquet, Arrow "
            "or CSV"
        )
    return Input(place_of(name))


def _files(name: str) -> Sequence[str]:
    """Return the files of a table; none for a file that has lines."""
    path = Path(name)
    if path.is_dir():
        found = [str(found) for found in path.rglob("*") if not _beside(found.relative_to(path))]
        return _dataset(name, sorted(found, key=_by_number))
    if "*" in name and not path.exists():
        pattern = _ONLY_STARS.sub(r"[\g<0>]", str(path.relative_to(path.anchor)))
        hidden = path.name.startswith(".")
        named = Path(path.anchor).glob(pattern)
        return _one_kind(name, [str(n) for n in named if hidden or n.name[0] != "."])
    return [name] if kind_of(name) else []


def _files_of_url(url: str) -> Sequence[str]:
    """Return the same of a URL; what ends with `/` is a folder."""
    if "*" in url and not is_web(url):
        found = keys_under(url[: url.index("*")].rpartition("/")[0] + "/")
        named = re.compile(".*".join(map(re.escape, url.split("*"))), re.DOTALL)
        return _one_kind(url, list(filter(named.fullmatch, found)))
    if url.endswith("/") and not is_web(url):
        keys = sorted((key for key in keys_under(url) if key.startswith(url)), key=_by_number)
        return _dataset(url, [k for k in keys if not _beside(PurePosixPath(k.removeprefix(url)))])
    return [url] if kind_of(url) else []


def _dataset(name: str, found: Sequence[str]) -> Sequence[str]:
    """Return the files of a data set's folder, which must have one split."""
    for kind in _DATASET:
        files = [file for file in found if file.endswith(kind)]
        splits = sorted({_split(file) for file in files}, key=_by_number)
        if len(splits) > 1:
            raise BadOption(_several(name, kind, files, splits))
        if files:
            return files
    raise InputUnreadable(
        f"cannot read {name}: it is a folder without {' or '.join(_DATASET)} files; name a file"
    )


def _several(name: str, kind: str, files: Sequence[str], splits: Sequence[str]) -> str:
    """Return what to give for a folder whose files may be splits, or the parts of one table."""
    folders = {file.rpartition("/")[0] for file in files}
    below = "*" if len(folders) == 1 or is_url(name) else "**/*"
    folder = folders.pop() if len(folders) == 1 else name.rstrip("/")
    more = f" and {len(splits) - _SHOWN} more" if len(splits) > _SHOWN else ""
    named = ", ".join(map(repr, splits[:_SHOWN]))
    return (
        f"{name} has several parts: give one of them, as {named}{more}; or "
        f"'{folder}/{below}{kind}' for all of them as one table"
    )


def _by_number(name: str) -> tuple[list[str | int], str]:
    """Return what sorts part.2 before part.10."""
    parts: list[str | int] = list(_NUMBER.split(name))
    parts[1::2] = map(int, parts[1::2])
    return parts, name


def _beside(file: PurePath) -> bool:
    """Whether a file of the folder is none of the data set's, but beside it."""
    # datasets keeps what it has computed in cache-*.arrow; git and the hub have hidden folders.
    return file.name.startswith("cache-") or any(part.startswith(".") for part in file.parts)


def _split(file: str) -> str:
    """Return the pattern of the files that are of one split with this one."""
    stem, dot, suffix = file.rpartition(".")
    return _SHARD.sub(r"\1*", stem) + dot + suffix


def _one_kind(name: str, found: Sequence[str]) -> Sequence[str]:
    kinds = {kind_of(file) for file in found}
    if not found:
        raise InputUnreadable(f"cannot read {name}: no file is named like that")
    if kinds == {""} or len(kinds) > 1:
        raise BadOption(
            f"{name} stands for files of {len(kinds)} kinds; a pattern names tables of one kind: "
            ".parquet, .arrow or .csv"
        )
    return sorted(found, key=_by_number)
