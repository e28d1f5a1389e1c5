"""A run whose results go to a bucket, or into a table: neither can grow.

The run gathers its lines in a file that can, with its journal. When it is complete they are brought
to their place, where they appear at once, and the file goes. The journal stays, so that the same
command knows that all is done.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from contract.errors import BatchConflict
from contract.results import ResultLine
from producer.collect.outputs import ResultFile, exists, is_parquet
from producer.input.bucket import is_url, place_of
from producer.input.files import unwritable
from producer.input.reader import Place
from producer.input.source import Source
from producer.run.journal import Journal, RunProgress


def cannot_grow(output: str, errors: str) -> bool:
    """Whether a run into these two cannot add to them window by window."""
    return any(is_url(name) or is_parquet(name) for name in (output, errors))


@dataclass(frozen=True, slots=True)
class Export:
    """One run's results on their way to `output` and `errors`."""

    output: str
    errors: str

    @property
    def gathered(self) -> tuple[Path, Path]:
        """The files of lines: beside the output, or in the working folder for a bucket."""
        path = Path(self.output)
        if is_url(self.output):
            digest = hashlib.sha256(self.output.encode()).hexdigest()[:8]
            path = Path(f"{self.output.rpartition('/')[2]}.{digest}")
        return path.with_name(f"{path.name}.lines"), path.with_name(f"{path.name}.errors.lines")

    @property
    def journal(self) -> Journal:
        """The run's journal."""
        return Journal(self.gathered[0])

    def done_before(self, source: Source, seed: str) -> RunProgress | None:
        """Return what an earlier run of this input has delivered; None if there is work to do.

        Raises:
            BatchConflict: what is in the place is of another run, or of none.
            OutputUnwritable: its bucket does not tell what is there.
        """
        done = self.journal.read()
        if done is None:
            for name in (self.output, self.errors):
                if exists(name):
                    raise BatchConflict(f"{name} exists; remove it, or name another")
            return None
        if not done.delivered:
            return None  # it was stopped before it could say so
        if not exists(self.output):  # it was taken away: a new run
            if exists(self.errors):
                raise BatchConflict(f"{self.errors} exists; remove it, or name another error file")
            return None
        same = source.fingerprint()  # '' of a pipe: who knows what comes through
        if not same or done.fingerprint != same or done.delivered != seed:
            raise BatchConflict(
                f"{self.output} is of a run of another input or with other options: give the same "
                f"ones, name another output, or remove {self.output} and {self.journal.path} to "
                "start anew"
            )
        if done.place and self._place.fingerprint() != done.place:
            raise BatchConflict(
                f"{self.output} is not what this run has delivered: somebody else has written it "
                f"since; name another output, or remove {self.journal.path} and it to start anew"
            )
        self._remove_gathered()  # it may have been stopped before it did
        return done

    def deliver(self, seed: str) -> None:
        """Bring the gathered lines of a complete run to their places.

        Raises:
            OutputUnwritable: nothing has appeared then, and the same run delivers it again.
            BatchConflict: another run has written there meanwhile.
        """
        done, (good, bad) = self.journal.read(), self.gathered
        if done is None:
            raise BatchConflict(f"{self.journal.path} was taken away while the run wrote it")
        with ExitStack() as files:
            output = files.enter_context(ResultFile(self.output, done.output, owner=done.name))
            for line in _lines(good, failed=False):
                output.add(line)
            if done.failed:
                errors = files.enter_context(ResultFile(self.errors, done.errors, owner=done.name))
                for line in _lines(bad, failed=True):
                    errors.add(line)
                errors.sync()
            output.sync()  # both, before the first one appears; the errors do first
        place = output.fingerprint or self._place.fingerprint()
        self.journal.write(replace(done, delivered=seed, place=place))
        self._remove_gathered()

    @property
    def _place(self) -> Place:
        return place_of(self.output)

    def _remove_gathered(self) -> None:
        for path in self.gathered:
            path.unlink(missing_ok=True)


def _lines(path: Path, *, failed: bool) -> Iterator[ResultLine]:
    try:
        with path.open("rb") as file:
            for line in file:
                yield ResultLine(line.rstrip(b"\n"), failed)
    except OSError as error:
        raise unwritable(path, error) from None
