"""The files of a run: its output, its error file, and the journal that says what is in them."""

import os
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Self

import msgspec
import orjson

from contract import naming
from contract.errors import BatchConflict
from contract.results import ResultLine
from producer.input.files import AtomicFile, unwritable
from producer.run.append_file import AppendFile, check_regular, sort_by_line

#: Of the journal. One of another format is refused.
FORMAT = 2


@dataclass(frozen=True, slots=True)
class RunProgress:
    """What the journal holds: how much is in the output, and where in the input that ends.

    `fingerprint` is the input's, `errors_file` is relative to the output's folder. `line` is the
    last physical line whose result is there, `digest` that of the input up to it, `windows`
    counts the windows collected; `output` and `errors` are the files' sizes in bytes. `complete`
    says that the whole input is done. `plan` names the order in which a run takes the lines,
    where it is not the input's: then `line` counts in it, and the files are in it until the run is
    complete. `delivered` says that the results are where they were to go, if that is not the
    output: it is the digest of the options that they were made with. `place` is then what is said
    of what was delivered: an object's size and ETag, a file's size and the digest of its end.
    """

    name: str
    digest: str
    input: str
    fingerprint: str
    errors_file: str
    line: int = 0
    windows: int = 0
    output: int = 0
    errors: int = 0
    completed: int = 0
    failed: int = 0
    complete: bool = False
    plan: str = ""
    delivered: str = ""
    place: str = ""
    format: int = FORMAT


class _Format(msgspec.Struct):
    """What journals of all formats have."""

    name: str
    format: int = 1  # the first one did not say so


def window_id(name: str, window: int) -> str:
    """Return the batch id of a window, counted from 0, of the run of that name."""
    return f"{name}.{window}"


class Journal:
    """The state of a run, in a file beside its output.

    It stays when the run is complete, so that the same command knows that.
    """

    def __init__(self, output: Path) -> None:
        self.path = output.with_name(f"{output.name}.progress")
        self._output = output

    def read(self) -> RunProgress | None:
        """Return what an earlier run left, None if there was none."""
        check_regular(self.path)
        try:
            raw = self.path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise unwritable(self.path, error) from None
        try:
            found = msgspec.json.decode(raw, type=_Format)
            if found.format == FORMAT:
                return msgspec.json.decode(raw, type=RunProgress)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise BatchConflict(
                f"{self.path} is no journal of a run ({error}); move it away, or name "
                "another output"
            ) from None
        raise BatchConflict(
            f"{self.path} was written by another version of warmq (its format is {found.format}, "
            f"this version's is {FORMAT}); go on with that version, or {self.start_anew}"
        )

    def write(self, done: RunProgress, *, new: bool = False) -> None:
        """Replace it, on disk before this returns.

        Raises:
            BatchConflict: it is to be `new`, and another run has written one.
        """
        try:
            with AtomicFile(self.path, new=new) as file:
                file.write(orjson.dumps(asdict(done)))
        except BatchConflict:
            raise BatchConflict(f"another run has just written {self._output}") from None

    @property
    def start_anew(self) -> str:
        """The user's way out where a run cannot continue."""
        return f"remove {self._output}, its error file and {self.path.name} to start anew"


class RunFiles:
    """Opens the files of a run, and adds windows to them. Files of other origin are refused.

    `begin` is the journal's content if there is none yet.

    Entering raises:
        BatchConflict: the files are not those of this run, or another process is writing them.
        OutputUnwritable: they cannot be written.
    """

    def __init__(self, output: Path, errors: Path, begin: RunProgress) -> None:
        check_regular(output)
        check_regular(errors)
        self._output, self._errors = (Path(os.path.realpath(path)) for path in (output, errors))
        beside = os.path.relpath(self._errors, self._output.parent)
        self._begin = replace(begin, errors_file=_text(beside), input=_text(begin.input))
        self._stack = ExitStack()
        self.journal = Journal(self._output)
        self.done = self._begin

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self._open(stack)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        with self._stack:
            if self.done.complete:  # and opened for nothing, as where other options are refused
                self.finish()

    def _open(self, stack: ExitStack) -> None:
        found = kept = self.journal.read()
        if kept is not None and kept.complete and not self._output.exists():
            kept = None  # its output was taken away, so this is another run
        if kept is None:
            _check_none(self._output, "", may_be_empty=True)
            _check_none(self._errors, " error file", may_be_empty=False)
        else:
            self._check_same(kept)
            for path, size in ((self._output, kept.output), (self._errors, kept.errors)):
                if size and not path.exists():
                    raise self._refused(
                        f"results are missing: there is no {path} any more; put it back as it was"
                    )
        # Locks do not reach other machines on some network folders; whose name is new does.
        new = kept is None and not self._output.exists()
        self._out = stack.enter_context(AppendFile(self._output, new=new))
        if self.journal.read() != found:
            raise BatchConflict(f"another run has just written {self._output}")
        if kept is None:
            self.journal.write(self._begin, new=found is None)
        self.done = done = kept or self._begin
        self._bad = stack.enter_context(AppendFile(self._errors))
        try:
            for file, size in ((self._out, done.output), (self._bad, done.errors)):
                file.continue_at(size, self._is_next)
        except BatchConflict as error:
            raise self._refused(f"{error.message}; put it back as it was") from None

    def _check_same(self, kept: RunProgress) -> None:
        """Refuse to go on with another input or another error file."""
        if kept.errors_file != self._begin.errors_file:
            where = os.path.normpath(self._output.parent / kept.errors_file)
            raise BatchConflict(
                f"the failed requests of the run that wrote {self._output} are in {where}",
                remedy="name_error_file",
                errors_file=where,
                start_anew=self.journal.start_anew,
            )
        if kept.fingerprint != self._begin.fingerprint:
            raise self._refused(
                f"{self._output} is of a run of another input, or its input ({kept.input}) has "
                "changed: give the same one"
            )

    def _refused(self, problem: str) -> BatchConflict:
        return BatchConflict(f"{problem}, or {self.journal.start_anew}")

    def _is_next(self, line: bytes) -> bool:
        """Whether a line is a result of the window that comes after those in the journal."""
        return is_result_of(line, window_id(self.done.name, self.done.windows))

    def add(self, line: ResultLine) -> None:
        """Append a result to its file."""
        (self._bad if line.failed else self._out).write(line.json + b"\n")

    def commit(self, done: RunProgress) -> None:
        """Bring what was added to disk, and then record it in the journal."""
        output, errors = self._out.sync(), self._bad.sync()
        done = replace(done, output=output, errors=errors)
        self.journal.write(done)
        self.done = done

    def settle_plan(self, name: str) -> None:
        """Note the order of the lines before the first of them is queued."""
        self.done = replace(self.done, plan=name)
        self.journal.write(self.done)

    def finish(self) -> None:
        """Note that the run is complete; remove an error file without a line.

        Lines that were taken in another order are put back into the input's.
        """
        if self.done.plan and not self.done.complete:
            # Stopped in between, it is done once more: the sizes stay what the journal says.
            for path in (self._output, self._errors):
                sort_by_line(path)
        if not self.done.errors:
            self._errors.unlink(missing_ok=True)
        if not self.done.complete:
            self.journal.write(replace(self.done, complete=True))


def _check_none(path: Path, kind: str, *, may_be_empty: bool) -> None:
    """Refuse a file that no run has left."""
    if path.exists() and not (may_be_empty and path.stat().st_size == 0):
        raise BatchConflict(f"{path} exists; remove it, or name another{kind}")


def _text(name: str) -> str:
    return os.fsencode(name).decode(errors="backslashreplace")


_BEGINS = b'{"id":"batch_req_'


def is_result_of(line: bytes, batch_id: str) -> bool:
    """Whether a line of a file is a result of the batch, or the beginning of any result."""
    if not line.endswith(b"\n"):
        return line[: len(_BEGINS)] == _BEGINS[: len(line)]
    try:
        result = orjson.loads(line)
        number = (result["error"] or result["warmq"])["line"]
        custom_id, own_id = str(result["custom_id"]), result["id"].removeprefix("batch_req_")
    except (orjson.JSONDecodeError, LookupError, TypeError, AttributeError):
        return False
    return own_id in (
        naming.request_id(batch_id, custom_id),
        naming.line_request_id(batch_id, number),
    )
