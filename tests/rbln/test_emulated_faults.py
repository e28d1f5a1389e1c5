"""EMULATED: a device that fails, hangs, dies or cannot be had; every request ends as promised."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from emulated_npu import Emulated, Run, emulated, lines_of, prompts

from demo.stack import eventually

pytestmark = pytest.mark.timeout(240)

#: With this the batch lasts long enough to be hit in the middle.
SLOW_STEP_S = "0.02"


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Emulated]:
    """An emulated stack without a worker."""
    with emulated(tmp_path) as made:
        yield made


def in_the_middle(stack: Emulated, lines: list[dict[str, Any]]) -> Any:
    """Submit a batch and return its producer once the device decodes."""
    stack.fault("slow", SLOW_STEP_S)
    begun = len(stack.steps())  # warm-up
    producer = stack.submit("b", lines)
    eventually(lambda: len(stack.steps()) > begun + 12, 30, "decoding")
    return producer


def assert_all_ended_well(run: Run, expected: list[list[int]]) -> None:
    assert not run.errors
    assert [run.tokens(f"r{n}") for n in range(len(expected))] == expected


def test_a_step_that_fails_kills_the_engine_and_costs_no_request(
    stack: Emulated, artefacts: dict[str, Path], greedy: Any
) -> None:
    asked = prompts(12, seed=7)
    stack.start(artefacts["plain"])
    stack.ready()
    producer = in_the_middle(stack, lines_of(asked))
    stack.fault("raise", "SYS_TASK_ABORTED: emulated (code: 3)")
    stack.logged("rebuilding the engine")
    stack.clear("raise")
    assert_all_ended_well(stack.collect("b", producer), greedy(asked))
    assert "SYS_TASK_ABORTED: emulated (code: 3)" in stack.log(), "the cause is told"


def test_a_killed_engine_costs_no_request(
    stack: Emulated, artefacts: dict[str, Path], greedy: Any
) -> None:
    asked = prompts(12, seed=8)
    stack.start(artefacts["plain"])
    stack.ready()
    producer = in_the_middle(stack, lines_of(asked))
    stack.engine_process().kill()
    assert_all_ended_well(stack.collect("b", producer), greedy(asked))
    assert "rebuilding the engine" in stack.log()


def test_a_step_that_hangs_is_noticed_asked_and_only_then_killed(
    stack: Emulated, artefacts: dict[str, Path], greedy: Any
) -> None:
    asked = prompts(8, seed=9)
    stack.start(artefacts["plain"], rbln_timeout_s=2, stall_timeout_s=4, kill_grace_s=3)
    stack.ready()
    producer = in_the_middle(stack, lines_of(asked))
    stack.fault("hang")
    stack.logged("rebuilding the engine")
    stack.clear("hang")
    assert_all_ended_well(stack.collect("b", producer), greedy(asked))


def test_a_device_that_cannot_be_had_ends_the_worker_and_keeps_the_queue(
    stack: Emulated, artefacts: dict[str, Path]
) -> None:
    stack.fault("refuse-load", "SYS_EBUSY: Lack of device memory. (code: -16)")
    worker = stack.start(artefacts["plain"])
    producer = stack.submit("b", lines_of(prompts(4)))
    assert worker.process is not None
    assert worker.process.wait(120) == 1
    assert "Lack of device memory" in stack.log()
    assert sum(stack.store.queue_lengths("warmq").values()) == 4
    # The device is free again: another worker takes what waits.
    stack.clear("refuse-load")
    stack.start(artefacts["plain"])
    run = stack.collect("b", producer)
    assert len(run.answers) == 4 and not run.errors


def test_an_idle_worker_that_is_killed_takes_its_engine_along(
    stack: Emulated, artefacts: dict[str, Path]
) -> None:
    worker = stack.start(artefacts["plain"], kill_grace_s=5)
    stack.ready()
    engine = stack.engine_process()
    assert worker.process is not None
    worker.process.kill()
    worker.process.wait()
    # SIGTERM, not SIGKILL: the engine says that it was asked, and leaves its device in order.
    eventually(lambda: not engine.is_running(), 30, "the engine has ended")
    stack.logged("received signal=SIGTERM", 5)
