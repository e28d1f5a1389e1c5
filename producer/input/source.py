"""Opens inputs: a file of lines, a table, or a folder of tables."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath, PurePosixPath

from producer.input.bucket import is_url, is_web, keys_under, place_of, redacted
from producer.input.iterable import IterableSource
from producer.input.options import BadOption
from producer.input.reader import Input, InputUnreadable
from producer.input.tables.source import TableSource, kind_of

#: A source of numbered lines. All sources have the same members:
#: - `name` for messages; `size` and `position` in one unit, `size` None if unknown;
#: - `chunks`, which may be called once, and `close`;
#: - `repeatable`: whether `reopen` can return the source from its start;
#: - `fingerprint`: a text that changes with the content, '' if unknown before reading.
Source = Input | TableSource | IterableSource

#: Endings of the files of a data set's folder; the first ending that is found is used.
_DATASET = (".parquet", ".arrow")
#: Number of a shard in the name of a Hugging Face data set's file: `train-00000-of-00004.parquet`;
#: the same with a hash after it, written by older releases of `datasets`; or `train/0000.parquet`,
#: written by the hub when it converts a data set.
_SHARD = re.compile(r"(-)\d+-of-\d+(?:-[0-9a-f]{16})?$|(?<![^/])\d{4,}$")
#: Glob characters that are literal in FILE: only `*` is a wildcard.
_LITERAL = re.compile(r"[\[?]")
_NUMBER = re.compile(r"([0-9]+)")
#: Most splits that an error message names.
_SHOWN = 3


def open_source(name: str, pairs: Mapping[str, str] | None = None) -> Source:
    """Open a file, folder, pattern (`*`) of tables, or object (s3://, gs://, az://, https://).

    `pairs` maps fields of requests to columns, or to templates over columns.

    Raises:
        InputUnreadable: nothing of that name can be read.
        BadOption: the mapping does not fit the columns, or the name is ambiguous.
        BadPlace: a URL names no bucket, or the bucket cannot be listed.
        ExtraMissing: a package for such files is not installed.
    """
    files = _table_objects(name) if is_url(name) else _table_files(name)
    if files:
        return TableSource(redacted(name), [place_of(file) for file in files], pairs or {})
    if pairs:
        raise BadOption(
            f"{redacted(name)} is not a table; columns can be mapped in parquet, Arrow and CSV "
            "files: leave the mapping out"
        )
    return Input(place_of(name))


def _table_files(name: str) -> Sequence[str]:
    """Return a table's files; none for a file of lines."""
    path = Path(name)
    if path.is_dir():
        found = [str(file) for file in path.rglob("*") if not _ignored(file.relative_to(path))]
        return _dataset(name, sorted(found, key=_by_number))
    if "*" in name and not path.exists():
        pattern = _LITERAL.sub(r"[\g<0>]", str(path.relative_to(path.anchor)))
        hidden = path.name.startswith(".")
        matches = Path(path.anchor).glob(pattern)
        return _one_kind(name, [str(file) for file in matches if hidden or file.name[0] != "."])
    return [name] if kind_of(name) else []


def _table_objects(url: str) -> Sequence[str]:
    """Return a table's objects; a URL that ends with `/` is a folder."""
    if "*" in url and not is_web(url):
        found = keys_under(url[: url.index("*")].rpartition("/")[0] + "/")
        pattern = re.compile(".*".join(map(re.escape, url.split("*"))), re.DOTALL)
        return _one_kind(url, list(filter(pattern.fullmatch, found)))
    if url.endswith("/") and not is_web(url):
        keys = sorted((key for key in keys_under(url) if key.startswith(url)), key=_by_number)
        return _dataset(url, [k for k in keys if not _ignored(PurePosixPath(k.removeprefix(url)))])
    return [url] if kind_of(url) else []


def _dataset(name: str, found: Sequence[str]) -> Sequence[str]:
    """Return the files of a data set's folder, which must have one split."""
    for kind in _DATASET:
        files = [file for file in found if file.endswith(kind)]
        splits = sorted({_split(file) for file in files}, key=_by_number)
        if len(splits) > 1:
            raise _several_splits(name, kind, files, splits)
        if files:
            return files
    raise InputUnreadable(
        f"cannot read {name}: it is a folder without {' or '.join(_DATASET)} files; name a file"
    )


def _several_splits(name: str, kind: str, files: Sequence[str], splits: Sequence[str]) -> BadOption:
    folders = {file.rpartition("/")[0] for file in files}
    below = "*" if len(folders) == 1 or is_url(name) else "**/*"
    folder = folders.pop() if len(folders) == 1 else name.rstrip("/")
    more = f" and {len(splits) - _SHOWN} more" if len(splits) > _SHOWN else ""
    named = ", ".join(map(repr, splits[:_SHOWN]))
    return BadOption(
        f"{name} has several splits: give one of them ({named}{more}); or "
        f"'{folder}/{below}{kind}' for all of them as one table"
    )


def _by_number(name: str) -> tuple[list[str | int], str]:
    """Return a sort key by which shard.2 comes before shard.10."""
    parts: list[str | int] = list(_NUMBER.split(name))
    parts[1::2] = map(int, parts[1::2])
    return parts, name


def _ignored(file: PurePath) -> bool:
    """Whether a file in a data set's folder does not belong to the data set."""
    # Hugging Face's `datasets` caches in cache-*.arrow; git and the hub have hidden folders.
    return file.name.startswith("cache-") or any(part.startswith(".") for part in file.parts)


def _split(file: str) -> str:
    """Return the pattern of all files of the split that has this file."""
    stem, dot, suffix = file.rpartition(".")
    return _SHARD.sub(r"\1*", stem) + dot + suffix


def _one_kind(name: str, found: Sequence[str]) -> Sequence[str]:
    kinds = {kind_of(file) for file in found}
    if not found:
        raise InputUnreadable(f"cannot read {name}: no file matches it")
    if kinds == {""} or len(kinds) > 1:
        raise BadOption(
            f"{name} matches files that are not tables of one kind; a pattern must match only "
            ".parquet, only .arrow or only .csv files"
        )
    return sorted(found, key=_by_number)
