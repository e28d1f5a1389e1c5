"""EMULATED: two compiled folders in one worker, on one card that only one engine can hold."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kit.engines.emulated_batch import assert_settled, lines_of, prompts
from kit.engines.emulated_npu import Emulated

from demo.stack import RedisServer

pytestmark = pytest.mark.timeout(600)

#: The compiled batch of each model: the rows of its decode steps tell which model ran. No other
#: worker of this Redis has these names; queues of other workers are named after the artefacts.
ROWS = {"wide": 4, "narrow": 2}
ARTEFACTS = {"wide": "plain", "narrow": "flash"}


@pytest.fixture
def swapping(
    machine: tuple[RedisServer, Path], artefacts: dict[str, Path], tmp_path: Path
) -> Iterator[Emulated]:
    """A worker of both models, and a card."""
    entries = {name: {"path": str(artefacts[ARTEFACTS[name]]), "min_stay": "1s"} for name in ROWS}
    stack = Emulated(*machine, tmp_path, models=json.dumps(entries), rbln_devices="6")
    yield stack
    stack.close()


def test_each_batch_is_answered_by_its_compiled_folder(swapping: Emulated, greedy: Any) -> None:
    asked, stack, engines = prompts(12, seed=21), swapping, []
    stack.begin()
    for turn, model in enumerate(("wide", "narrow", "wide")):
        name, since = f"{model}-{turn}", len(stack.steps())
        run = stack.collect(name, stack.submit(name, lines_of(asked), model), 240)
        assert run.all_tokens() == greedy(asked)
        assert {rows for rows, _ in stack.decodes(since)} == {ROWS[model]}
        engines.append(stack.engine_process())
        assert int((stack.cards / "6").read_text()) == engines[-1].pid
    assert [engine.is_running() for engine in engines] == [False, False, True]
    assert stack.log().count("swapping from model") == 2
    for turn, model in enumerate(("wide", "narrow", "wide")):
        assert_settled(stack.store, stack.redis.folder, f"{model}-{turn}", lines_of(asked))
    assert stack.worker is not None
    assert stack.worker.stop(90) == 0
