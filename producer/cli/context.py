"""What every command starts from: the settings, the store, a batch that must exist."""

import contextlib
import sys
from collections.abc import Iterator, Mapping
from enum import IntEnum
from functools import cached_property
from types import MappingProxyType
from typing import Any

import click

from contract.batch import Batch
from contract.errors import StoreUnavailable
from contract.redis.batches import BatchStore
from contract.settings import Settings, load
from contract.traces import tracing
from producer.batch_watch import BatchChanged, find_batch
from producer.cli.options import parse_map
from producer.cli.progress import tell
from producer.input.files import WriteFailed
from producer.input.options import BadOption, check_column_conflicts, check_field_conflicts
from producer.input.reader import Input, InputUnreadable
from producer.input.source import Source, open_source

WATCH_AGAIN = "the batch goes on; `producer watch {}` follows it again"


class Exit(IntEnum):
    """What a command returns as its exit status; None is ALL_WELL."""

    ALL_WELL = 0
    SOME_FAILED = 1
    BAD_INPUT = 2
    UNREACHABLE = 3


class Context:
    """Settings and store of one command line, each read when it is first asked for."""

    @cached_property
    def settings(self) -> Settings:
        """The settings; SettingsError says what is wrong with them."""
        return load(Settings)

    @cached_property
    def store(self) -> BatchStore:
        """The store; StoreUnavailable if Redis does not answer."""
        url = self.settings.redis_url.get_secret_value()
        # What the command does for a batch is traced, and sent when the command ends.
        click.get_current_context().with_resource(tracing(self.settings.traces, "warmq-producer"))
        return BatchStore.open(url, "warmq-producer", ttl_ms=self.settings.result_ttl_ms)

    def batch(self, batch_id: str) -> Batch:
        """Return a batch.

        Raises:
            BatchConflict: there is none of that name.
        """
        return find_batch(self.store, self.settings, batch_id, "; see `producer list`")


_NOTHING: Mapping[str, Any] = MappingProxyType({})


def open_input(
    name: str, mapped: tuple[str, ...] = (), given: Mapping[str, Any] = _NOTHING
) -> Source:
    """Open what is to be submitted; `-` is standard input. `mapped` are the values of `--map`,
    `given` the fields of `--set`.

    Raises:
        InputUnreadable: it cannot be opened.
        BadOption: the columns are not those that `--map` names, or a field has two sources.
    """
    if name == "-" and not mapped:
        # Unbuffered: a buffer over a buffer would wait for a full one.
        stdin = sys.stdin.buffer
        return Input(name, getattr(stdin, "raw", stdin))
    pairs = parse_map(mapped)
    check_field_conflicts(given, pairs, ("--set", "--map"))
    try:
        source = open_source(name, pairs)
    except BadOption as error:
        error.message = f"--map: {error.message}"
        raise
    check_column_conflicts(given, source, "--set")
    return source


pass_context = click.make_pass_decorator(Context, ensure=True)


@contextlib.contextmanager
def hint(text: str, *, changed: str = "", mended: str = "") -> Iterator[None]:
    """Say how to go on if the work inside is cut short; `changed` where a batch was changed,
    `mended` where the input is damaged."""
    try:
        yield
    except KeyboardInterrupt:
        tell(f"interrupted; {text}")
        raise
    except (StoreUnavailable, InputUnreadable, WriteFailed) as error:
        damaged = isinstance(error, InputUnreadable)
        error.message += f"\n{(damaged and mended) or text}"
        raise
    except BatchChanged as error:
        if changed:
            error.message, error.remedy = f"{error.message}; {changed}", None
        raise
