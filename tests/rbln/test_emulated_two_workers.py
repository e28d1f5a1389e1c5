"""EMULATED: two workers side by side on one machine, a card each, over one queue."""

from __future__ import annotations

from typing import Any

import pytest
from kit.engines.emulated_batch import assert_settled, lines_of, prompts
from kit.engines.emulated_npu import SLOW_STEP_S, Emulated
from kit.verdicts.settled import leftovers

pytestmark = pytest.mark.timeout(300)

Both = tuple[Emulated, Emulated]


def test_both_drain_one_queue_each_on_its_own_card(both: Both, greedy: Any) -> None:
    asked = prompts(48, seed=12)
    before = [len(stack.steps()) for stack in both]
    for card, stack in enumerate(both):
        holder = (stack.cards / str(card)).read_text()
        assert int(holder) == stack.engine_process().pid
        stack.fault("slow", SLOW_STEP_S)  # a step outlasts the way of a message
    assert both[0].run("both", lines_of(asked)).all_tokens() == greedy(asked)
    for stack, since in zip(both, before, strict=True):
        assert max(live for _, live in stack.decodes(since)) == 4, stack.folder
    chunks = [stack.prefills(since) for stack, since in zip(both, before, strict=True)]
    assert sum(chunks) == sum(-(-len(prompt) // 128) for prompt in asked), "nothing ran twice"
    assert_settled(both[0].store, both[0].redis.folder, "both", lines_of(asked))


def test_a_worker_that_cannot_rebuild_its_engine_ends_and_the_other_takes_over(
    both: Both, greedy: Any
) -> None:
    asked, (left, right) = prompts(32, seed=13), both
    right.fault("slow", SLOW_STEP_S)
    producer = left.in_the_middle("lost", lines_of(asked))
    left.fault("refuse-load", "SYS_ENODEV: No free ASID, emulated")
    left.engine_process().kill()
    assert left.worker is not None and left.worker.process is not None
    assert left.worker.process.wait(120) == 1
    assert "rebuilding the engine, try 1 of 1" in left.log()
    assert "SYS_ENODEV: No free ASID, emulated" in left.log()[-4000:], "the cause is told last"
    assert left.collect("lost", producer).all_tokens() == greedy(asked)
    assert_settled(left.store, left.redis.folder, "lost", lines_of(asked))


def test_a_worker_drains_and_leaves_nothing(pair: dict[str, Emulated]) -> None:
    stack = pair["right"]
    stack.ready()
    engine = stack.engine_process()
    assert stack.worker is not None
    assert stack.worker.stop(90) == 0
    assert not engine.is_running()
    assert leftovers(stack.store) == {}
