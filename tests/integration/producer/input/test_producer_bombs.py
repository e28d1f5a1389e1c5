"""Files that stand for more than they hold, on one's own machine: an error that names the line."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import pytest
from kit.commands.support import producer_command, producer_env, run_producer
from kit.hostile.bombs import MB, line, zstd_of

from contract.redis.batches import BatchStore
from demo.stack import eventually


@pytest.mark.parametrize("command", ["submit", "plan", "run"])
def test_a_bomb_is_refused_with_the_line_and_what_to_do(
    command: str, tmp_path: Path, redis_url: str
) -> None:
    path = tmp_path / "in.jsonl.zst"
    path.write_bytes(zstd_of(b"\n" * MB, 200))
    more = [tmp_path / "out.jsonl"] if command == "run" else []
    done = run_producer(command, path, *more, redis_url=redis_url)
    assert done.returncode == 2, done.stderr
    assert "after line 100001: " in done.stderr
    assert "take them out" in done.stderr


def test_ctrl_c_ends_the_reading_of_a_file_that_stands_for_a_gigabyte(
    tmp_path: Path, redis_url: str, store: BatchStore
) -> None:
    filler = b" " * (9 * MB)
    lines = (line(n).replace(b', "url"', filler + b', "url"') for n in range(110))
    path = tmp_path / "in.jsonl.zst"
    path.write_bytes(zstd_of(b"".join(lines), 1))
    command = producer_command("submit", path, "--batch-id", "b")
    with subprocess.Popen(
        command, env=producer_env(redis_url), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        eventually(lambda: store.batch("b"), 30, "the batch is there")
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=10)
        assert process.returncode == 130
