"""`producer run --stop-after-failures`: it stops, and the same command goes on."""

from __future__ import annotations

from pathlib import Path

import pytest
from kit.commands.runs import custom_ids, running
from kit.commands.support import batch_file, chat_line, finish, run_all, run_producer, write_lines
from kit.protocol.lessee import Lessee, client_of

from contract.errors import RequestFailed
from contract.redis.batches import BatchStore
from demo.stack import eventually

ERROR = RequestFailed("it broke", code="broken")


def test_a_run_stops_while_its_window_fails_and_goes_on_with_what_failed(
    redis_url: str, store: BatchStore, tmp_path: Path
) -> None:
    path, out = batch_file(tmp_path / "in.jsonl", 1200), tmp_path / "out.jsonl"
    command = (path, out, "--window", "500", "--stop-after-failures", "20")
    lessee = Lessee(client_of(store))
    with running(redis_url, *command) as process:
        leases = eventually(lambda: lessee.pop(100), 30)
        finish(lessee, leases[20:])
        finish(lessee, leases[:20], ERROR)
        assert process.wait(30) == 1
        assert process.stderr is not None
        assert "stopped: 20 of 100 requests failed" in process.stderr.read()
    assert out.read_text() == ""
    assert run_all(store) == 0  # the rest is cancelled
    with running(redis_url, *command) as process:
        eventually(lambda: (run_all(store), process.poll())[1] is not None, 60)
        assert process.returncode == 0
    assert custom_ids(out) == [f"r{n}" for n in range(1200)]


@pytest.mark.parametrize("limit", ["60", "5%"])
def test_failures_of_all_windows_count_together(
    redis_url: str, store: BatchStore, tmp_path: Path, limit: str
) -> None:
    """40 of 500 lines fail in each window: no window alone has 60, all have 8 %."""
    lines = (chat_line(f"r{n}", **({"colour": 1} if n % 500 < 40 else {})) for n in range(2500))
    path, out = write_lines(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    command = (path, out, "--window", "500", "--stop-after-failures", limit)
    with running(redis_url, *command) as process:
        eventually(lambda: (run_all(store), process.poll())[1] is not None, 60)
        assert process.stderr is not None
        told = process.stderr.read()
    assert process.returncode == 1
    assert "requests failed" in told
    assert len(custom_ids(out)) < 1500


@pytest.mark.parametrize("limit", [(), ("--stop-after-failures", "90%")])
def test_a_stopped_run_goes_on_with_another_limit(
    redis_url: str, store: BatchStore, tmp_path: Path, limit: tuple[str, ...]
) -> None:
    path, out = batch_file(tmp_path / "in.jsonl", 600), tmp_path / "out.jsonl"
    command = (path, out, "--window", "500")
    lessee = Lessee(client_of(store))
    with running(redis_url, *command, "--stop-after-failures", "2") as process:
        leases = eventually(lambda: lessee.pop(100), 30)
        finish(lessee, leases[:2], ERROR)
        finish(lessee, leases[2:])
        assert process.wait(30) == 1
        assert process.stderr is not None
        assert "with another limit" in process.stderr.read()
    with running(redis_url, *command, *limit) as process:
        leases = eventually(lambda: lessee.pop(100), 30)
        finish(lessee, leases[:2], ERROR)
        finish(lessee, leases[2:])
        eventually(lambda: (run_all(store), process.poll())[1] is not None, 60)
        assert process.returncode == 1
    assert len(custom_ids(out)) == 598


def test_the_reason_of_a_run_that_goes_on_names_what_it_does_not_count(
    redis_url: str, store: BatchStore, tmp_path: Path
) -> None:
    lines = (chat_line(f"r{n}", **({"colour": 1} if n in (3, 1200) else {})) for n in range(1500))
    path, out = write_lines(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    command, told = (path, out, "--window", "500", "--stop-after-failures", "1"), []
    for _ in range(3):
        with running(redis_url, *command) as process:
            eventually(lambda: (run_all(store), process.poll())[1] is not None, 60)
            assert process.stderr is not None
            told.append(process.stderr.read())
    assert "before this command are not counted" not in told[0] + told[1]
    assert "; 1 of 500 before this command are not counted" in told[2]


def test_a_run_without_failures_does_not_stop(
    redis_url: str, store: BatchStore, tmp_path: Path
) -> None:
    path, out = batch_file(tmp_path / "in.jsonl", 3), tmp_path / "out.jsonl"
    with running(redis_url, path, out, "--stop-after-failures", "1%") as process:
        eventually(lambda: (run_all(store), process.poll())[1] is not None, 60)
    assert process.returncode == 0


def test_a_wrong_limit_is_refused(redis_url: str, tmp_path: Path) -> None:
    path = batch_file(tmp_path / "in.jsonl", 3)
    done = run_producer("run", path, tmp_path / "out", "--stop-after-failures", "no",
                        redis_url=redis_url)  # fmt: skip
    assert done.returncode == 2
    assert "--stop-after-failures no" in done.stderr
