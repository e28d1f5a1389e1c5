"""Opens inputs: files and objects with lines or tables, and folders of tables."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath

from contract.errors import WarmqError
from producer.input.bucket import is_url, is_web, place_of, redacted, urls_under
from producer.input.folders import parts_of_folder, parts_of_pattern
from producer.input.iterable import IterableSource
from producer.input.options import BadOption
from producer.input.reader import Input
from producer.input.tables.source import TablePart, TableSource, kind_of

#: A source of numbered lines. All sources have the same members:
#: - `name` for messages; `size` and `position` in one unit, `size` None if unknown;
#: - `chunks`, which may be called once, and `close`;
#: - `repeatable`: whether `reopen` can return the source from its start;
#: - `unused`: columns that are neither used nor kept;
#: - `output_columns`: the kept columns with their types, as a batch has them in Redis;
#: - `fingerprint`: a text that changes with the content, '' if unknown before reading.
Source = Input | TableSource | IterableSource

#: Glob characters that are literal in FILE: only `*` is a wildcard.
_LITERAL = re.compile(r"[\[?]")


def open_source(
    name: str,
    pairs: Mapping[str, str] | None = None,
    keep: Sequence[str] = (),
    *,
    delimiter: str = "",
) -> Source:
    """Open a file, folder, pattern (`*`) of tables, or object (s3://, gs://, az://, https://).

    `pairs` maps fields of requests to columns, templates over columns or constants; `keep` are
    columns for the output. `delimiter` separates the cells of CSV files, `tab` for a tab; ''
    means the usual one for the file's ending.

    Raises:
        InputUnreadable: nothing of that name can be read.
        BadOption: the mapping does not fit the columns, or the name is ambiguous.
        BadPlace: a URL names no bucket, or the bucket cannot be listed.
        ExtraMissing: a package for such files is not installed.
    """
    parts = _table_objects(name) if is_url(name) else _table_files(name)
    if delimiter:
        parts = _delimited(parts, delimiter)
    if parts:
        return TableSource(redacted(name), parts, pairs or {}, keep)
    mapped = bool(pairs or keep)
    if mapped and is_url(name):
        raise _not_a_table(name, keep)
    source = Input(place_of(name))
    try:
        source.check()  # here, because the caller creates a batch next
        if mapped:
            raise _not_a_table(name, keep)
    except WarmqError:
        source.close()
        raise
    return source


def _not_a_table(name: str, keep: Sequence[str]) -> BadOption:
    name = redacted(name)
    if keep:
        return BadOption(
            f"keep: {name} is not a table; keep takes columns of parquet, Arrow and CSV files: "
            "leave it out"
        )
    return BadOption(
        f"{name} is not a table; columns can be mapped in parquet, Arrow and CSV files: leave the "
        "mapping out"
    )


def _delimited(parts: Sequence[TablePart], delimiter: str) -> list[TablePart]:
    """Return the parts with a delimiter; raise BadOption if they are no CSV files."""
    mark = "\t" if delimiter in ("tab", "\\t") else delimiter
    if len(mark) != 1 or mark in '"\r\n\0':
        raise BadOption(f"delimiter: {delimiter!r}: give one character, such as ; or |, or tab")
    if not parts or any(part.kind not in (".csv", ".tsv") for part in parts):
        raise BadOption(
            "delimiter: only CSV files have one, and their names end with .csv or .tsv; leave it "
            "out, or rename the file"
        )
    return [replace(part, delimiter=mark) for part in parts]


def _table_files(name: str) -> Sequence[TablePart]:
    """Return a table's files; none for a file of lines."""
    path = Path(name)
    if path.is_dir():
        # Hive and Athena write empty files for empty parts.
        files = (file for file in path.rglob("*") if file.is_file())
        found = [str(file) for file in files if kind_of(file.name) or file.stat().st_size]
        return parts_of_folder(str(path), found, place_of)
    if "*" in name and not path.exists():
        pattern = _LITERAL.sub(r"[\g<0>]", str(path.relative_to(path.anchor)))
        hidden = path.name.startswith(".")
        matches = Path(path.anchor).glob(pattern)
        found = [str(f) for f in matches if (hidden or f.name[0] != ".") and not f.is_dir()]
        return parts_of_pattern(str(path), found, place_of)
    return _one_file(name)


def _table_objects(url: str) -> Sequence[TablePart]:
    """Return a table's objects; a URL that ends with `/` is a folder."""
    if "*" in url and not is_web(url):
        found = _objects_under(url[: url.index("*")].rpartition("/")[0] + "/")
        pattern = re.compile(".*".join(map(re.escape, url.split("*"))), re.DOTALL)
        return parts_of_pattern(url, list(filter(pattern.fullmatch, found)), place_of)
    if url.endswith("/") and not is_web(url):
        keys = (key for key in _objects_under(url) if key.startswith(url))
        return parts_of_folder(url, keys, place_of)
    return _one_file(url)


def _objects_under(url: str) -> list[str]:
    """Return the URLs of the objects in a folder, without the empty ones that stand for folders."""
    keys = [key for key in urls_under(url) if not key.endswith(("/", "_$folder$"))]
    folders = {parent for key in keys for parent in PurePosixPath(key).parents}
    return [key for key in keys if PurePosixPath(key) not in folders]


def _one_file(name: str) -> list[TablePart]:
    kind = kind_of(name)
    return [TablePart(place_of(name), kind)] if kind else []
