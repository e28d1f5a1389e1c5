"""Looks at output files before anything is queued or collected: may they be written?"""

import os
import stat
from collections.abc import Collection
from pathlib import Path

from producer.collect.outputs import beside as beside_of
from producer.collect.outputs import check_output, exists, may_go
from producer.input.files import OutputUnwritable, check_writable
from producer.input.places.bucket import is_url, shown


def check_outputs(
    output: str | None,
    errors: str | None,
    file: str | None = None,
    journal: Path | None = None,
    *,
    forced: bool = False,
) -> None:
    """Raise OutputUnwritable where a file cannot be written, or where two of these are one file.

    `output` and `errors` are as in collect.write; `file` is the input, where `-` is stdin. Files
    are one also through links and streams. Terminals and other character devices may have many
    names: nothing in them can be lost. `forced` says that what is there is replaced, whatever it
    is.
    """
    output = output or "-"
    if not (Path(output).name or is_url(output)):
        check_writable(Path(output))  # `.` and `/` have no name that the error file's could have
    beside = None if output == "-" else beside_of(output)
    known: dict[object, str] = {}
    for purpose, name, standard in (
        ("the input", file, 0), ("the output", output, 1),
        ("the error file", errors or beside, 1), ("the journal", journal, 1),
    ):  # fmt: skip
        place = _place(name, standard) if name is not None else None
        if place in known:
            raise OutputUnwritable(
                f"{known[place]} and {purpose} are the same file, {shown(str(name))}; name another"
            )
        if place is not None:
            known[place] = purpose
        if name not in (None, "-", file):
            check_output(str(name)) if purpose != "the journal" else check_writable(Path(name))
    if forced and beside is not None and not errors:
        exists(
            beside
        )  # asked again when results come: a bucket that does not tell is found out now


def check_replaced(
    output: str | None, errors: str | None, batch_id: str, written: Collection[str] = ()
) -> None:
    """Raise OutputUnwritable where something would be lost: a file or object with content that is
    not what was `written` of the batch's results, by its marks.

    `output` and `errors` are as in collect.write.
    """
    beside = beside_of(output) if output and output != "-" else None
    for name in (output, errors or beside):
        if name and name != "-" and _is_kept(name) and not may_go(name, written):
            what = f", and as it is now it is not an earlier collection of batch {batch_id}"
            raise OutputUnwritable(
                f"{name} exists{what * bool(batch_id)}; name another file, or replace it with "
                f"--force{', which loses what was added or changed since' * bool(written)}"
            )


def _is_kept(name: str) -> bool:
    """Whether there is a file or an object whose content would be lost."""
    return exists(name) if is_url(name) else Path(name).is_file()


def _place(name: str | Path, standard: int) -> object:
    """Return what is equal for two names of one file; None for what many may share."""
    if is_url(str(name)):
        return str(name)
    try:
        state = os.fstat(standard) if name == "-" else Path(name).stat()
    except OSError:
        return os.path.realpath(name)  # not there yet
    if stat.S_ISCHR(state.st_mode) or (name == "-" and not stat.S_ISREG(state.st_mode)):
        return None
    return state.st_dev, state.st_ino
