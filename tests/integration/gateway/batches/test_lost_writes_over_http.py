"""A batch over HTTP goes on when Redis has lost its last writes while the lines were queued."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from kit.commands.support import chat_line, finish
from kit.gateways.own_batch_runner import created, looked_at, opened, until_ended, uploaded
from kit.protocol.lessee import Lessee, client_of

from gateway.batches.runner import phases
from gateway.batches.runner.runner import BatchRunner
from producer.batch_watch import WritesLost


def test_lines_that_redis_has_lost_are_queued_again(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit, calls = phases.submit_part, list[None]()

    def submit_part(*args: Any) -> None:
        calls.append(None)
        if len(calls) == 1:
            raise WritesLost("batch_1", "batch batch_1 has only its lines up to 0")
        submit(*args)

    monkeypatch.setattr(phases, "submit_part", submit_part)
    with opened(redis_url, tmp_path, gateway_models="m") as services:
        uploaded(services, [chat_line(f"r{n}", model="m") for n in range(3)])
        created(services)
        runner = BatchRunner(services)
        assert looked_at(services, runner).status == "in_progress"
        lessee = Lessee(client_of(services.batches), queue="warmq.m")
        looked_at(services, runner)
        finish(lessee, lessee.pop())
        ended = until_ended(services, runner)
    assert (ended.status, ended.counts.completed) == ("completed", 3)
