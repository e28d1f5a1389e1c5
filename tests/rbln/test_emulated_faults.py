"""EMULATED: a step that fails, an engine that is killed, a step that hangs: no request is lost.

One worker meets them one after another, each in the middle of a batch.
"""

from __future__ import annotations

import subprocess
from typing import Any

import pytest
from kit.engines.emulated_batch import assert_settled, lines_of, prompts
from kit.engines.emulated_npu import Emulated

from contract import naming
from demo.stack import eventually

# The other forms' workers start meanwhile: nothing takes longer, and here a core is often idle.
pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("forms")]

#: What the worker holds at most: the compiled batch, and a look-ahead of 8.
HELD = 4 + 8


def let_it_rebuild(stack: Emulated) -> None:
    """Wait until the worker says that it rebuilds its engine; only then can it."""
    stack.logged("rebuilding the engine")
    stack.fault("hang")
    eventually(lambda: stack.state() == "degraded", 30, "the worker says that it rebuilds")
    stack.clear()


def assert_rebuilt_and_all_answered(
    stack: Emulated,
    name: str,
    producer: subprocess.Popen[str],
    asked: list[list[int]],
    expected: list[list[int]],
) -> None:
    """Assert what docs/explanation/delivery.md promises if an engine dies inside a worker."""
    assert stack.collect(name, producer).all_tokens() == expected
    eventually(lambda: stack.state() == "ready", 10, "rebuilt in place, by the same worker")
    writes = assert_settled(stack.store, stack.redis.folder, name, lines_of(asked))
    leased = [writes.leased[naming.request_id(name, f"r{n}")] for n in range(len(asked))]
    assert 1 <= sum(leased) - len(asked) <= HELD
    assert max(leased) == 2


def test_a_step_that_fails_kills_the_engine_and_costs_no_request(
    greedy: Any, left: Emulated
) -> None:
    asked = prompts(20, seed=7)
    producer = left.in_the_middle("failing", lines_of(asked))
    left.fault("raise", "SYS_TASK_ABORTED: emulated (code: 3)")
    let_it_rebuild(left)
    assert_rebuilt_and_all_answered(left, "failing", producer, asked, greedy(asked))
    assert "SYS_TASK_ABORTED: emulated (code: 3)" in left.log(), "the cause is told"


def test_a_killed_engine_costs_no_request(greedy: Any, left: Emulated) -> None:
    asked = prompts(20, seed=8)
    producer = left.in_the_middle("killed", lines_of(asked))
    left.engine_process().kill()
    let_it_rebuild(left)
    assert_rebuilt_and_all_answered(left, "killed", producer, asked, greedy(asked))


def test_a_step_that_hangs_is_noticed_asked_and_only_then_killed(
    greedy: Any, left: Emulated
) -> None:
    asked = prompts(20, seed=9)
    producer = left.in_the_middle("hanging", lines_of(asked))
    hung = left.engine_process()
    left.fault("hang")
    let_it_rebuild(left)
    assert not hung.is_running()
    assert_rebuilt_and_all_answered(left, "hanging", producer, asked, greedy(asked))
    story = ["the engine made no step for 6 s", "received signal=SIGTERM", "rebuilding the engine"]
    told = [left.log().find(words) for words in story]
    assert -1 not in told and told == sorted(told)
