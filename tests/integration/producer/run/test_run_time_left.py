"""The time left of `producer run`: of its windows and of the lines that are not read yet."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import redis
from kit.commands.doctor_findings import announce
from kit.commands.runs import running, windows
from kit.commands.support import batch_file, chat_line, finish, run_producer, write_lines
from kit.protocol.lessee import QUEUE, Lessee, client_of

from contract.redis.batches import BatchStore
from contract.redis.scripts import source
from demo.stack import eventually

#: A minute in which a slot read and wrote 5 tokens a second, and a request had 5.
MINUTE = (600, 0, 1800, 1200, 0, 600, 600)


def etas(text: str) -> list[int]:
    """Return the estimates in a run's progress, in seconds."""
    found = [line.partition("ETA ")[2].partition(",")[0] for line in text.splitlines()]
    clocks = [[int(part) for part in one.split(":")] for one in found if one]
    return [3600 * hours + 60 * minutes + seconds for hours, minutes, seconds in clocks]


@pytest.mark.parametrize("ended", [0, 100])
def test_a_run_says_how_long_all_its_lines_take(
    redis_url: str, redis_client: redis.Redis, store: BatchStore, tmp_path: Path, ended: int
) -> None:
    redis_client.eval(source("ring"), 0, QUEUE, "w1", *MINUTE)
    path = batch_file(tmp_path / "in.jsonl", 4000)
    lessee = Lessee(client_of(store))
    with running(redis_url, path, tmp_path / "out.jsonl", "--window", "500") as process:
        if ended:
            finish(lessee, eventually(lambda: lessee.pop(ended), 30))
        eventually(lambda: len(windows(store)) == 2, 30)
        announce(store, slots=10)
        assert process.stderr is not None
        lines = iter(process.stderr.readline, "")
        said = next(found for line in lines if (found := etas(line)))
        shown = run_producer("status", store.newest_ids()[0], redis_url=redis_url).stdout
    # By 10 requests a second, of which 10 run at once
    assert said[0] == pytest.approx(400 - ended / 10, abs=15)
    (left,) = etas(shown.replace("left      about ", "ETA "))
    assert left == pytest.approx(400 - ended / 10, abs=15)
    (unread,) = re.findall(r"; about (\d+) more are not queued yet", shown)
    assert int(unread) == pytest.approx(3000, abs=100)


def test_a_run_without_a_worker_has_no_estimate(
    redis_url: str, redis_client: redis.Redis, tmp_path: Path
) -> None:
    redis_client.eval(source("ring"), 0, QUEUE, "w1", *MINUTE)
    path = batch_file(tmp_path / "in.jsonl", 600)
    with running(redis_url, path, tmp_path / "out.jsonl", "--window", "500") as process:
        assert process.stderr is not None
        lines = iter(process.stderr.readline, "")
        line = next(one for one in lines if "of the next" in one)
    assert "no worker serves" in line
    assert etas(line) == []


def test_a_run_of_three_models_says_how_long_one_worker_takes_for_all(
    redis_url: str, redis_client: redis.Redis, store: BatchStore, tmp_path: Path
) -> None:
    queues = {name: f"{QUEUE}.{name}" for name in ("alpha", "beta", "gamma")}
    for queue in queues.values():
        redis_client.eval(source("ring"), 0, queue, "w1", *MINUTE)
    announce(store, slots=10, queue=queues["beta"], models=queues)
    names = list(queues)
    lines = (chat_line(f"r{n}", f"question {n}", model=names[n % 3]) for n in range(3000))
    path = write_lines(tmp_path / "in.jsonl", lines)
    with running(redis_url, path, tmp_path / "out.jsonl", "--window", "500") as process:
        assert process.stderr is not None
        said = next(found for line in iter(process.stderr.readline, "") if (found := etas(line)))
        shown = run_producer("status", store.newest_ids()[0], redis_url=redis_url).stdout
    assert said[0] == pytest.approx(300, abs=15)
    assert "left      about 0:01:40" in shown  # of the 1,000 lines of both windows, in their list
