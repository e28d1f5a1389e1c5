"""Gateways whose files are in different stores: it is noticed at the start."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import redis
from kit.commands.support import producer_command, producer_env
from kit.gateways.own_batch_runner import created, looked_at, uploaded

from gateway.file_store import FileStoreFailed
from gateway.files.files import MARK, check_same_store
from gateway.http.services import Services
from gateway.settings import GatewaySettings


@pytest.fixture
def opened(redis_url: str, tmp_path: Path) -> Iterator[dict[str, Services]]:
    """Return what gateways of one Redis work with, by the name of their folder."""
    with ExitStack() as stack:
        found = {}
        for name in ("one", "other"):
            settings = GatewaySettings(redis_url=redis_url, gateway_store=str(tmp_path / name))
            found[name] = Services.open(settings)
            stack.callback(found[name].close)
        yield found


def test_a_gateway_with_a_store_of_its_own_is_refused(
    opened: dict[str, Services], redis_client: redis.Redis, tmp_path: Path
) -> None:
    check_same_store(opened["one"])
    check_same_store(opened["one"])
    with pytest.raises(FileStoreFailed, match="not the store of the other gateways"):
        check_same_store(opened["other"])
    (mark,) = (tmp_path / "one").iterdir()
    assert mark.name.startswith(MARK)
    # The folder is moved, with its content.
    (tmp_path / "other" / mark.name).write_bytes(b"")
    check_same_store(opened["other"])
    # The old store is lost, and the operator says so.
    mark.unlink()
    redis_client.delete("warmq:gateway:store")
    check_same_store(opened["one"])


def test_serve_says_so_and_ends(
    opened: dict[str, Services], redis_url: str, tmp_path: Path
) -> None:
    check_same_store(opened["one"])
    env = producer_env(redis_url, WARMQ_GATEWAY_STORE=str(tmp_path / "other"))
    done = subprocess.run(
        producer_command("serve", "--port", "0"),
        env=env, capture_output=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode != 0
    assert b"not the store of the other gateways" in done.stderr


def test_a_batch_whose_file_is_in_another_store_waits_and_does_not_fail(
    opened: dict[str, Services],
) -> None:
    one, other = opened["one"], opened["other"]
    uploaded(one, [b"{}\n"])
    created(one)
    statuses = [looked_at(services).status for services in (other, one)]
    assert statuses == ["validating", "failed"]  # the line has no custom_id
