"""Gives the commands settings, store and input, and hints how to continue after an error."""

import contextlib
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import IntEnum
from functools import cached_property
from typing import Any

import click

from contract.batch import Batch
from contract.errors import BatchConflict, StoreUnavailable
from contract.redis.batches import BatchStore
from contract.runs import no_request_text
from contract.settings import Settings, load
from contract.traces import tracing
from producer.batch_watch import BatchChanged, find_batch
from producer.cli.options import parse_map
from producer.cli.progress import tell
from producer.input.files import WriteFailed
from producer.input.options import BadOption, check_column_conflicts, check_field_conflicts
from producer.input.reader import Input, InputUnreadable
from producer.input.source import Source, open_source
from producer.input.tables.kept import listed
from producer.outage import Outage

#: Hint after an interruption; {0} is the batch id.
WATCH_AGAIN = (
    "the batch goes on; `producer watch {0}` follows it again, `producer cancel {0}` ends it"
)


class Exit(IntEnum):
    """Exit statuses that commands return; a command that returns None has ALL_WELL."""

    ALL_WELL = 0
    SOME_FAILED = 1
    BAD_INPUT = 2
    UNREACHABLE = 3


class Context:
    """Settings and store of one command line, each created on its first use."""

    @cached_property
    def settings(self) -> Settings:
        """The settings. Raises SettingsError if one is wrong."""
        return load(Settings)

    #: Repeats calls while Redis is away; if it is None, they are repeated for a few seconds only.
    outage: Outage | None = None

    @cached_property
    def store(self) -> BatchStore:
        """The store. Raises StoreUnavailable if Redis does not answer."""
        url = self.settings.redis_url.get_secret_value()
        # Traces of this command are sent when it ends.
        click.get_current_context().with_resource(tracing(self.settings.traces, "warmq-producer"))
        ttl_ms = self.settings.result_ttl_ms
        return BatchStore.open(url, "warmq-producer", ttl_ms=ttl_ms, retry=self.outage)

    def wait_for_redis(self, seconds: float) -> None:
        """Let the store wait up to `seconds` for Redis; call this before the store's first use."""
        if not seconds:
            return
        self.outage = Outage(seconds, tell)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            handler = signal.getsignal(number)
            if callable(handler):
                signal.signal(number, self._stopping(self.outage, handler))

    @staticmethod
    def _stopping(outage: Outage, handler: Callable[[int, Any], Any]) -> Callable[[int, Any], Any]:
        """Return a handler of a signal that also ends waits of other threads for Redis."""

        def stop(number: int, frame: Any) -> Any:
            outage.stop()
            return handler(number, frame)

        return stop

    def batch(self, batch_id: str) -> Batch:
        """Return a batch. Raises BatchNotFound for an unknown id."""
        return find_batch(self.store, self.settings, batch_id, "; see `producer list`")

    def no_run(self, name: str, instead: str) -> Batch:
        """Return a batch. Raises BatchConflict with `instead` for a run."""
        batch = self.batch(name)
        if batch.is_run:
            raise BatchConflict(f"{name} is a run: {instead}")
        return batch

    def batch_of(self, name: str, custom_id: str) -> Batch:
        """Return the batch, or the window of a run, that has a request.

        Raises BatchNotFound for an unknown name, BatchConflict for an unknown custom_id.
        """
        batch = self.batch(name)
        for window in batch.windows:
            with contextlib.suppress(BatchConflict):
                self.store.find(window, custom_id)
                return window
        if batch.is_run:
            raise BatchConflict(no_request_text(batch, custom_id))
        return batch


pass_context = click.make_pass_decorator(Context, ensure=True)


def open_input(
    name: str,
    mapped: tuple[str, ...],
    overrides: Mapping[str, Any],
    keep: Sequence[str] = (),
    delimiter: str = "",
) -> Source:
    """Open FILE, `-` for stdin, with the values of --map, --set, --keep and --delimiter."""
    if name == "-" and not (mapped or keep or delimiter):
        # The unbuffered stream is read, because an outer buffer waits until an inner one is full.
        stdin = sys.stdin.buffer
        return Input(name, getattr(stdin, "raw", stdin))
    columns = parse_map(mapped)
    check_field_conflicts(overrides, columns, ("--set", "--map"))
    try:
        source = open_source(name, columns, keep, delimiter=delimiter)
    except BadOption as error:
        option = "--" if error.message.startswith(("keep: ", "delimiter: ")) else "--map: "
        error.message = option + error.message
        raise
    if source.unused:
        tell(f"{source.name}: columns not used: {listed(source.unused)}; --keep copies them to OUT")
    check_column_conflicts(overrides, source, "--set")
    return source


@contextlib.contextmanager
def hint(text: str, *, changed: str = "", fix_input: str = "") -> Iterator[None]:
    """Print `text`, the way to continue, after a signal; add it to an error's message.

    `changed` is added instead if the batch was changed meanwhile, `fix_input` if the input is
    damaged.
    """
    try:
        yield
    except (KeyboardInterrupt, SystemExit):  # signals raise these (main.py)
        with contextlib.suppress(OSError):  # the terminal may be closed
            tell(f"interrupted; {text}")
        raise
    except (StoreUnavailable, InputUnreadable, WriteFailed) as error:
        damaged = isinstance(error, InputUnreadable)
        error.message += f"\n{(damaged and fix_input) or text}"
        raise
    except BatchChanged as error:
        if changed:
            error.message, error.remedy = f"{error.message}; {changed}", None
        raise
