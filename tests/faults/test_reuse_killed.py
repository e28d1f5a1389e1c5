"""`--reuse` while producers and workers are killed and Redis loses results: none is wrong."""

from __future__ import annotations

import random
import subprocess
from pathlib import Path
from typing import Any

from kit.commands.support import producer_command, producer_env, write_lines
from kit.protocol.lessee import chat, client_of
from kit.stacks.stage import Stage, stage

from contract.redis import keys
from contract.redis.known import KnownAnswers
from demo.stack import eventually

LINES, CHANGED = 6_000, 600


def file_of(on: Stage, batch_id: str, changed: int = 0) -> Path:
    """Write a file of greedy questions, the first ones with other texts, and remember them."""
    bodies: dict[str, dict[str, Any]] = {
        f"c{n}": chat(f"question {n}{' again' * (n < changed)}", temperature=0)
        for n in range(LINES)
    }
    on.bodies[batch_id] = bodies
    lines = (
        {"custom_id": name, "url": "/v1/chat/completions", "method": "POST", "body": body}
        for name, body in bodies.items()
    )
    return write_lines(on.folder / f"{batch_id}.jsonl", lines)


def submit(on: Stage, file: Path | str, batch_id: str) -> subprocess.Popen[bytes]:
    command = producer_command("submit", "--reuse", file, "--batch-id", batch_id)
    return subprocess.Popen(
        command, env=producer_env(on.server.url), stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
    )  # fmt: skip


def test_kills_and_evictions_while_answers_are_reused(tmp_path: Path) -> None:
    draw = random.Random(38)
    with stage(tmp_path) as on:
        # Given a file that a worker has computed, and noted
        options: dict[str, Any] = {"simulated_slots": 256, "simulated_latency_s": 0.01}
        worker = on.worker(known_answers=100_000, **options)
        done = submit(on, file_of(on, "b0"), "b0")
        assert done.communicate(timeout=60)[1] and done.returncode == 0
        on.finish("b0")
        offers = KnownAnswers.using(on.store)
        assert offers.offer("warmq") is not None
        before = on.computed().starts.total()
        # When submits of a tenth of other lines are killed at random bytes, results are lost, and
        # the worker is killed
        file = file_of(on, "b1", CHANGED)
        data, ids, lost = file.read_bytes(), on.ids("b0"), set[str]()
        for cut in sorted(draw.randrange(len(data)) for _ in range(5)):
            killed = submit(on, "-", "b1")
            assert killed.stdin is not None
            killed.stdin.write(data[:cut])
            killed.stdin.flush()
            eventually(lambda: on.store.batch("b1"), 20, "the batch was created")
            killed.kill()
            killed.communicate()
            some = draw.sample(ids, 50)
            lost |= set(some)
            client_of(on.store).delete(*map(keys.result_key, some))
        on.kill(worker)
        worker = on.worker(known_answers=100_000, **options)
        eventually(lambda: offers.offer("warmq"), 30, "the new worker offers answers")
        resumed = submit(on, file, "b1")
        _, told = resumed.communicate(timeout=60)
        assert resumed.returncode == 0, told.decode()
        on.finish("b1")
        # Then each line has exactly one answer, the right one, and most were not computed
        batch = on.store.batch("b1")
        assert batch is not None
        computed = on.computed().starts.total() - before
        assert LINES - CHANGED - len(lost) <= batch.number("cached") <= LINES - CHANGED
        assert computed >= LINES - batch.number("cached")
        assert worker.stop() == 0
        on.settled("b1")
