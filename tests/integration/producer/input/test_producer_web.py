"""Input behind https://: servers that cut connections, know no ranges, or name versions weakly."""

from __future__ import annotations

import pytest
from kit.commands.support import run_producer
from kit.servers.web_server import WebServer

from contract.redis.batches import BatchStore
from producer.input.reader import InputUnreadable
from producer.input.source import open_source

LINE = b'{"prompt": "%06d ' + b"x" * 900 + b'"}\n'
#: Three ranges of 8 MiB.
DATA = b"".join(LINE % number for number in range(20_000))


def read(web: WebServer) -> int:
    """Return how many lines are read of it."""
    source = open_source(f"{web.url}/in.jsonl")
    try:
        return sum(len(chunk.lines) for chunk in source.chunks(None, 10**6))
    finally:
        source.close()


def test_what_a_cut_connection_has_not_brought_is_asked_for_again() -> None:
    with WebServer(DATA) as web:
        assert read(web) == 20_000
        asked, web.cuts = len(web.asked), 3
        assert read(web) == 20_000
        assert (web.cuts, len(web.asked)) == (0, 2 * asked + 3)


def test_a_server_without_ranges_is_read_in_one_piece() -> None:
    with WebServer(DATA, ranges=False) as web:
        assert read(web) == 20_000


@pytest.mark.parametrize("ranges", [True, False])
def test_a_server_that_cuts_every_connection_ends_the_command_in_words(
    redis_url: str, store: BatchStore, ranges: bool
) -> None:
    with WebServer(DATA, ranges=ranges) as web:
        web.cuts = 10**6
        with pytest.raises(InputUnreadable, match=r"cannot read .*/in\.jsonl: "):
            read(web)
        done = run_producer("submit", f"{web.url}/in.jsonl", redis_url=redis_url)
    assert done.returncode == 2
    assert "cannot read" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_version_that_is_named_weakly_is_read_and_still_held_to() -> None:
    with WebServer(DATA, tag='W/"a"') as web:
        assert read(web) == 20_000
        source = open_source(f"{web.url}/in.jsonl")
        found = source.chunks(None, 10**6)
        next(found)
        web.tag = 'W/"b"'
        with pytest.raises(InputUnreadable, match="has changed while it was read"):
            list(found)
        source.close()
