"""Finds the files of the table in a folder, in the order of the numbers in their names."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import PurePosixPath

from producer.input.bucket import is_url
from producer.input.options import BadOption
from producer.input.reader import InputUnreadable, Place
from producer.input.tables.hive import keys_of
from producer.input.tables.source import TablePart, kind_of

#: Name of the folder with a table's log -> the table's format, and how to read such a table. Its
#: files may have deleted rows.
_LOGS = {
    "_delta_log": ("Delta", "deltalake.DeltaTable(FOLDER).to_pyarrow_table()"),
    "metadata": ("Iceberg", "pyiceberg's table.scan().to_arrow()"),
    ".hoodie": ("Hudi", "Spark"),
}
#: Number of a shard in the name of a Hugging Face data set's file, `train-00000-of-00004.parquet`;
#: older releases of `datasets` write a hash after it. The name before it is the split's.
_SHARD = re.compile(r"(-)\d+-of-\d+(?:-[0-9a-f]{16})?$")
#: A UUID, a hash or a number, by which writers distinguish the files of one table.
_PART = re.compile(
    r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}|(?<![0-9a-z])[0-9a-f]{8,}(?![0-9a-z])|[0-9]+",
    re.IGNORECASE,
)
#: Stars with only separators between them.
_STARS = re.compile(r"\*(?:[-_.]?\*)+")
_NUMBER = re.compile(r"([0-9]+)")
#: Most splits that an error message names.
_SHOWN = 3
#: First bytes of a parquet file.
_PARQUET = b"PAR1"

OpenPlace = Callable[[str], Place]


def by_number(name: str) -> tuple[list[str | int], str]:
    """Return the sort key of a name; with it, shard.2 comes before shard.10."""
    parts: list[str | int] = list(_NUMBER.split(name))
    parts[1::2] = map(int, parts[1::2])
    return parts, name


def parts_of_folder(name: str, below: Iterable[str], place_of: OpenPlace) -> list[TablePart]:
    """Return the parts of the table in a folder; `below` are the names of all files in it."""
    base = f"{name.rstrip('/')}/"
    files = sorted(below, key=by_number)
    _refuse_logs(name, [file.removeprefix(base) for file in files])
    files = [file for file in files if not _ignored(PurePosixPath(file.removeprefix(base)))]
    kinds = sorted({kind_of(file) for file in files} - {""})
    if len(kinds) > 1:
        patterns = ", ".join(repr(f"{base}{_any_below(name)}{kind}") for kind in kinds)
        raise BadOption(f"{name} has files of {len(kinds)} kinds: give one of {patterns}")
    if kinds:
        files = [file for file in files if kind_of(file)]
        _refuse_splits(name, base, files, kinds[0])
    else:
        files, kinds = _without_ending(name, files, place_of), [".parquet"]
    return [TablePart(place_of(file), kinds[0], keys_of(file, base)) for file in files]


def parts_of_pattern(name: str, matches: Sequence[str], place_of: OpenPlace) -> list[TablePart]:
    """Return the parts of the table whose files match the pattern `name`."""
    if not matches:
        raise InputUnreadable(f"cannot read {name}: no file matches it")
    files, kinds = sorted(matches, key=by_number), {kind_of(file) for file in matches}
    if kinds == {""} and _is_parquet(place_of, files):
        kinds = {".parquet"}  # Hive and Athena write parquet files without an ending
    if kinds == {""} or len(kinds) > 1:
        raise BadOption(
            f"{name} matches files that are not tables of one kind; a pattern must match only "
            ".parquet, only .arrow or only .csv files"
        )
    base = name[: name.index("*")].rpartition("/")[0] + "/"
    return [TablePart(place_of(file), kinds.copy().pop(), keys_of(file, base)) for file in files]


def _refuse_logs(name: str, files: Sequence[str]) -> None:
    """Refuse a table whose log decides which files and rows count."""
    for folder, (kind, reader) in _LOGS.items():
        inside = [file for file in files if f"/{folder}/" in f"/{file}"]
        if inside and (kind != "Iceberg" or any(".metadata.json" in file for file in inside)):
            raise InputUnreadable(
                f"cannot read {name}: it is a table of {kind}, and its files have rows that were "
                f"deleted; write it as parquet, or submit {reader} by the Python client"
            )


def _ignored(file: PurePosixPath) -> bool:
    """Whether a file in a folder does not belong to the table."""
    # Hugging Face's `datasets` caches in cache-*.arrow; git and the hub have hidden folders. Spark
    # and Hive ignore names that begin with `_`, but `_year=2026` is a column.
    *folders, base = file.parts
    in_ignored_folder = any(part.startswith("_") and "=" not in part for part in folders)
    return (
        in_ignored_folder
        or base.startswith("cache-")
        or (base.startswith("_") and not kind_of(base))
        or any(part.startswith(".") for part in file.parts)
    )


def _without_ending(name: str, files: Sequence[str], place_of: OpenPlace) -> list[str]:
    """Return the files of Hive and Athena, whose names have no ending."""
    plain = [file for file in files if "." not in file.rpartition("/")[2]]
    if _is_parquet(place_of, plain):
        return plain
    lines = next((file for file in files if file.endswith((".json", ".jsonl", ".ndjson"))), "")
    more = f"; join files of lines: cat '{name}'/*.json* > lines.jsonl" if lines else ""
    raise InputUnreadable(
        f"cannot read {name}: it is a folder without .parquet, .arrow or .csv files; name a file"
        f"{more}"
    )


def _is_parquet(place_of: OpenPlace, files: Sequence[str]) -> bool:
    """Whether the first file is parquet; each is checked when it is read."""
    if not files:
        return False
    file = place_of(files[0]).open(in_order=False)
    try:
        return bool(file.read(len(_PARQUET)) == _PARQUET)
    finally:
        file.close()


def _refuse_splits(name: str, base: str, files: Sequence[str], kind: str) -> None:
    """Refuse a folder with several splits (train, test) or with tables of several names."""
    splits = sorted({_split(file.removeprefix(base)) for file in files}, key=by_number)
    if len(splits) < 2:
        return
    folders = {split.rpartition("/")[0] for split in splits}
    folder = folders.pop() if len(folders) == 1 else ""
    below = f"{folder}/*" if folder and "*" not in folder else _any_below(name)
    more = f" and {len(splits) - _SHOWN} more" if len(splits) > _SHOWN else ""
    named = ", ".join(repr(base + split) for split in splits[:_SHOWN])
    if "/" not in "".join(splits):
        below = "*"
    raise BadOption(
        f"{name} has several splits: give one of them ({named}{more}); or '{base}{below}{kind}' "
        "for all of them as one table"
    )


def _any_below(name: str) -> str:
    """Return the pattern of all names below a folder."""
    return "*" if is_url(name) else "**/*"


def _split(file: str) -> str:
    """Return the pattern of all files of the table or split that has this file."""
    folder, slash, base = file.rpartition("/")
    stem, dot, suffix = base.rpartition(".")
    if _SHARD.search(stem):
        return folder + slash + _SHARD.sub(r"\1*", stem) + dot + suffix
    folders = ["*" if "=" in part or part.isdigit() else part for part in folder.split("/")]
    return "/".join(folders) + slash + _STARS.sub("*", _PART.sub("*", stem)) + dot + suffix
