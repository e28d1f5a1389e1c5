"""`gs://`: obstore's client of Google's XML interface, against moto's S3 server.

The two speak alike in all that is used here: objects, ranges, conditions, lists, uploads in parts.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from kit.commands.bucket_checks import (
    check_bucket_that_is_not_there,
    check_command,
    check_objects,
    check_store,
)
from kit.servers.s3 import Gate, google_credentials, s3_server, unfinished

from contract.redis.batches import BatchStore

URL = "gs://warmq"


@pytest.fixture
def gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    with s3_server() as url, Gate(url, "") as gate:
        for name, value in google_credentials(gate.url, tmp_path).items():
            monkeypatch.setenv(name, value)
        yield gate


def test_objects_come_out_as_they_were_and_a_failure_leaves_nothing(gate: Gate) -> None:
    check_objects(URL)
    assert unfinished(gate.url) == 0
    check_bucket_that_is_not_there(URL, "set GOOGLE_SERVICE_ACCOUNT")


def test_the_command_reads_and_writes_there(gate: Gate, redis_url: str, store: BatchStore) -> None:
    check_command(URL, redis_url, store)


def test_a_gateway_keeps_its_files_there(gate: Gate) -> None:
    check_store(URL)
    assert unfinished(gate.url) == 0
