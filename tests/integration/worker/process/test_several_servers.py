"""Two Redis servers with a worker each: docs/how-to/redis.md's recipe, as it stands there."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import orjson
import pytest
from celery import Celery
from kit.commands.pages import blocks
from kit.commands.support import batch_file, producer_env, run_producer
from kit.protocol.lessee import chat, client_of
from kit.stacks.celery_side import client_app, simulated
from kit.verdicts.settled import assert_batch_settled, leftovers

from contract import naming
from contract.redis import keys
from contract.redis.batches import BatchStore
from demo.stack import ROOT, RedisServer

pytestmark = pytest.mark.timeout(120)
COUNT = 1_001


@dataclass
class Site:
    """One Redis, what a producer sees of it, and a Celery client of it."""

    url: str
    store: BatchStore
    app: Celery


@pytest.fixture(scope="module")
def sites(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Site]]:
    with ExitStack() as stack:
        found = []
        for name in "ab":
            folder = tmp_path_factory.mktemp(name)
            server = stack.enter_context(RedisServer(folder / "redis", "--appendonly", "no"))
            stack.enter_context(simulated(server.url, folder / "worker.log", simulated_slots=16))
            store = BatchStore(stack.enter_context(server.client()), ttl_ms=600_000)
            app = stack.enter_context(client_app(server.url))
            found.append(Site(server.url, store, app))
        yield found


def recipe(sites: list[Site]) -> str:
    """Return the page's commands, with the test's servers for those on the page."""
    page = (ROOT / "docs/how-to/redis.md").read_text().partition("## Several Redis servers")[2]
    lines = next(blocks(page)).commands
    assert lines[0].startswith("servers=") and lines[-1].startswith("cat "), lines
    return "\n".join([f'servers="{" ".join(site.url for site in sites)}"', *lines[1:]])


def test_a_file_split_over_two_servers_is_answered_once_and_in_order(
    sites: list[Site], tmp_path: Path
) -> None:
    # Given a file
    batch_file(tmp_path / "prompts.jsonl", COUNT)
    # When the page's commands are run
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-euc", recipe(sites)], cwd=tmp_path,
        env=producer_env("redis://nowhere", PATH=path), capture_output=True, text=True, timeout=100,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    # Then all answers are there, in the file's order
    answers = (tmp_path / "answers.jsonl").read_bytes().splitlines()
    assert [orjson.loads(answer)["custom_id"] for answer in answers] == [
        f"r{n}" for n in range(COUNT)
    ]
    assert {path.read_text() for path in (tmp_path / "errors").iterdir()} == {""}
    # And each server has exactly its own part of them
    asked = {f"r{n}": chat(f"question {n}") for n in range(COUNT)}
    for n, site in enumerate(sites):
        lines = (tmp_path / f"part-0{n}.jsonl").read_bytes().splitlines()
        part = {orjson.loads(line)["custom_id"] for line in lines}
        assert_batch_settled(site.store, f"monday-0{n}", {name: asked.pop(name) for name in part})
        results = sum(
            1 for _ in client_of(site.store).scan_iter(naming.RESULT_PREFIX + "*", count=1000)
        )
        assert results == len(part)
        assert [batch.id for batch in site.store.batches()] == [f"monday-0{n}"]
        assert leftovers(site.store) == {}
    assert not asked
    # And who asks the wrong one is told which one that was
    wrong = run_producer("status", "monday-00", redis_url=sites[1].url)
    assert wrong.returncode == 2
    assert f"in {sites[1].url}" in wrong.stderr


def test_a_celery_client_has_its_answer_where_it_sent_the_request(sites: list[Site]) -> None:
    sent = [
        site.app.send_task("warmq.generate", args=[chat(f"question {n}")], queue="warmq")
        for n, site in enumerate(sites)
    ]
    for n, (site, answer) in enumerate(zip(sites, sent, strict=True)):
        assert answer.get(timeout=20)["object"] == "chat.completion"
        assert client_of(site.store).exists(keys.result_key(answer.id))
        assert not client_of(sites[1 - n].store).exists(keys.result_key(answer.id))
