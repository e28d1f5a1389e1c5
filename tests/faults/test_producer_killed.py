"""Producers that are killed, or come twice, and a collection that is cut off."""

from __future__ import annotations

import random
import subprocess
from functools import partial
from pathlib import Path

from kit.commands.support import producer_command, producer_env, run_producer, write_lines
from kit.protocol.lessee import chat
from kit.stacks.stage import Stage, stage

from contract.redis.batches import BatchStore
from demo.stack import eventually

LINES = 6_000


def input_file(on: Stage, count: int = LINES) -> Path:
    """Write a file of several chunks and remember what it asks for."""
    bodies = {f"c{n}": chat(f"question {n}, and some more text to fill the line") for n in
              range(count)}  # fmt: skip
    on.bodies["b1"] = bodies
    return write_lines(
        on.folder / "in.jsonl",
        ({"custom_id": i, "url": "/v1/chat/completions", "method": "POST", "body": b}
         for i, b in bodies.items()),
    )  # fmt: skip


def submit(on: Stage, file: Path | str, *options: str) -> subprocess.Popen[bytes]:
    command = producer_command("submit", file, "--batch-id", "b1", *options)
    return subprocess.Popen(
        command, env=producer_env(on.server.url),
        stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
    )  # fmt: skip


def answered(on: Stage) -> None:
    """Let a worker answer everything, and judge."""
    worker = on.worker(simulated_slots=256, simulated_latency_s=0)
    on.finish()
    assert worker.stop() == 0
    on.settled()


def cursor(store: BatchStore) -> int:
    batch = store.batch("b1")
    return batch.number("cursor") if batch else 0


def test_submit_killed_at_random_bytes_is_resumed_with_every_request_once(tmp_path: Path) -> None:
    draw = random.Random(11)
    with stage(tmp_path) as on:
        file = input_file(on)
        data = file.read_bytes()
        for cut in sorted(draw.randrange(len(data)) for _ in range(6)):
            # It reads from a pipe that stays open: it cannot have more than was written
            killed = submit(on, "-")
            assert killed.stdin is not None
            killed.stdin.write(data[:cut])
            killed.stdin.flush()
            eventually(lambda: on.store.batch("b1"), 20, "the batch was created")
            killed.kill()
            killed.communicate()
        before = cursor(on.store)
        resumed = submit(on, file)
        _, told = resumed.communicate(timeout=50)
        assert resumed.returncode == 0, told.decode()
        assert 0 < before < LINES
        answered(on)


def test_a_planned_submit_killed_at_random_moments_is_resumed_with_every_request_once(
    tmp_path: Path,
) -> None:
    draw = random.Random(14)
    with stage(tmp_path) as on:
        file = input_file(on, 40_000)

        def queued_now() -> int:
            batch = on.store.batch("b1")
            return batch.number("cursor") + batch.number("planned") if batch else 0

        def further(wanted: int) -> bool:
            return queued_now() >= wanted

        for _ in range(5):
            wanted = min(80_000, queued_now() + draw.randrange(1, 20_000))
            killed = submit(on, file, "--order", "prefix")
            eventually(partial(further, wanted), 40, "it is further")
            killed.kill()
            killed.communicate()
        both = [submit(on, file, "--order", "prefix") for _ in range(2)]
        for one in both:
            _, told = one.communicate(timeout=50)
            assert one.returncode == 0, told.decode()
        answered(on)


def test_two_producers_at_once_queue_every_request_once(tmp_path: Path) -> None:
    with stage(tmp_path) as on:
        file = input_file(on)
        both = [submit(on, file) for _ in range(2)]
        for one in both:
            _, told = one.communicate(timeout=50)
            assert one.returncode == 0, told.decode()
        answered(on)


def test_results_killed_while_writing_leaves_the_old_file_whole(tmp_path: Path) -> None:
    with stage(tmp_path) as on:
        on.submit(2_000)
        worker = on.worker(simulated_slots=256, simulated_latency_s=0)
        on.finish()
        assert worker.stop() == 0
        folder = tmp_path / "out"
        folder.mkdir()
        out = folder / "out.jsonl"
        out.write_text("an earlier collection\n")
        # It follows a batch that does not end, and is killed when it has written something
        on.submit(50, "b2", seal=False)
        again = on.worker(simulated_slots=256, simulated_latency_s=0)
        writing = subprocess.Popen(
            producer_command("results", "b2", "--follow", "-o", out, "--force"),
            env=producer_env(on.server.url), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        eventually(lambda: any(p != out for p in folder.iterdir()), 20, "it writes beside")
        writing.kill()
        writing.wait()
        assert out.read_text() == "an earlier collection\n"
        done = run_producer("results", "b1", "-o", out, "--force", redis_url=on.server.url)
        assert done.returncode == 0, done.stderr
        assert len(out.read_bytes().splitlines()) == 2_000
        assert again.stop() == 0
