"""Runs failed lines of a complete run again.

The run's error file names these lines. Their new results are appended to the run's files; at the
end the old results are removed from the error file, and the files are sorted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

import msgspec

from contract.failures import is_wrong
from contract.results import OUTCOMES, line_number
from producer.input.files import AtomicFile, unwritable
from producer.input.reader import RawChunk

#: The outcomes of lines that can run again: `failed`, and those of stopped lines.
STOPPED = OUTCOMES[2:]
UNANSWERED = ("failed", *STOPPED)


class _Error(msgspec.Struct):
    code: str = ""
    line: int = 0


class _Line(msgspec.Struct):
    error: _Error = msgspec.field(default_factory=_Error)


_decode = msgspec.json.Decoder(_Line).decode


def failed_lines(
    errors: Path, size: int, outcomes: Collection[str], kept: Counter[str] | None = None
) -> dict[int, str]:
    """Return the lines that run again, with their outcomes: those with `outcomes`, unless wrong.

    Only the first `size` bytes of the error file are read. `kept` counts the error codes of the
    failed lines that do not run again.
    """
    found = dict[int, str]()
    if not size:
        return found
    try:
        with errors.open("rb") as file:
            for raw in file:
                size -= len(raw)
                if size < 0:
                    break
                error = _decode(raw).error
                outcome = error.code if error.code in STOPPED else "failed"
                if outcome in outcomes and not is_wrong(error.code):
                    found[error.line] = outcome
                elif kept is not None and outcome == "failed":
                    kept[error.code] += 1
    except OSError as error:
        raise unwritable(errors, error) from None
    return found


def selected(raws: Iterable[RawChunk], numbers: Collection[int]) -> Iterator[RawChunk]:
    """Yield the chunks of a file with only the lines of these numbers."""
    for raw in raws:
        raw.lines = [line for line in raw.lines if line[0] in numbers]
        if raw.lines:
            raw.size = sum(len(line) for _, line in raw.lines)
            raw.too_long = {n: size for n, size in raw.too_long.items() if n in numbers}
            yield raw


def write_without(errors: Path, size: int, numbers: Collection[int], merged: Path) -> int:
    """Write an error file again, as `merged`; return its size in bytes.

    The lines of these numbers are left out of the first `size` bytes.
    """
    written = 0
    try:
        with errors.open("rb") as file, AtomicFile(merged) as target:
            for raw in file:
                size -= len(raw)
                if size >= 0 and line_number(raw) in numbers:
                    continue
                target.write(raw)
                written += len(raw)
    except OSError as error:
        raise unwritable(merged, error) from None
    return written
