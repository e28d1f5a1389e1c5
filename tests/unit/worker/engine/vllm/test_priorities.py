"""Which priority vLLM gets of each request, and who enters the shared slots first."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from contract.naming import PRIORITY_STEPS
from worker.engine.vllm import priorities
from worker.engine.vllm.fastpath.learning import Replay
from worker.engine.vllm.priorities import POLICY, PRIORITY, guard, vllm_priority
from worker.engine.vllm.stats import Progress
from worker.engine.vllm.turns import SequenceSlots, begin

LEAST, MOST = -(2**63), 2**63 - 1


def test_the_queues_priority_comes_before_a_lines_own() -> None:
    owns = [LEAST, -5, 0, 5, MOST]
    given = [vllm_priority(queued, own) for queued in PRIORITY_STEPS for own in owns]
    assert all(earlier < later for earlier, later in pairwise(given))
    assert given[0] >= LEAST and given[-1] <= MOST  # EngineCore gets it as an integer of 64 bits
    assert vllm_priority(0, 0) == 0


def made_engine(policy: str | None) -> tuple[Any, list[Any]]:
    """Return an engine with this policy, and what its EngineCore has got."""
    got: list[Any] = []

    async def add_request_async(request: Any) -> None:
        got.append(request)

    config = SimpleNamespace(scheduler_config=SimpleNamespace(policy=policy))
    core = SimpleNamespace(add_request_async=add_request_async)
    return SimpleNamespace(vllm_config=config, engine_core=core), got


async def test_a_request_gets_the_priority_of_its_task_and_its_time_of_entry() -> None:
    engine, got = made_engine(POLICY)
    guard(engine)

    async def send(priority: int, own: int = 0) -> None:
        PRIORITY.set(priority)
        request = SimpleNamespace(priority=own, arrival_time=1.0)
        # vLLM sends some requests from tasks of its own.
        await asyncio.create_task(engine.engine_core.add_request_async(request))

    for priority, own in ((6, 0), (0, 0), (6, -1), (3, 7)):
        await asyncio.create_task(send(priority, own))
    ordered = sorted(got, key=lambda request: request.priority)
    assert [got.index(request) for request in ordered] == [1, 3, 2, 0]
    arrivals = [request.arrival_time for request in got]
    assert arrivals[0] > 1.0 and arrivals == sorted(arrivals)


@pytest.mark.parametrize("policy", ["fcfs", None])
async def test_with_another_policy_requests_stay_as_they_are(policy: str | None) -> None:
    engine, got = made_engine(policy)
    guard(engine)
    PRIORITY.set(6)
    await engine.engine_core.add_request_async(SimpleNamespace(priority=0, arrival_time=1.0))
    assert (got[0].priority, got[0].arrival_time) == (0, 1.0)


def test_a_release_that_sends_requests_in_another_way_is_not_changed() -> None:
    engine, _ = made_engine(POLICY)
    engine.engine_core = SimpleNamespace()
    guard(engine)
    assert vars(engine.engine_core) == {}


@pytest.mark.parametrize(
    ("cpu", "cuda", "policy"),
    [(True, False, POLICY), (False, True, POLICY), (False, False, "fcfs")],
)
def test_priorities_are_the_default_where_the_scheduler_is_vllms_own(
    cpu: bool, cuda: bool, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    platform = SimpleNamespace(is_cpu=lambda: cpu, is_cuda_alike=lambda: cuda)
    monkeypatch.setattr(priorities, "current_platform", platform)
    assert priorities.default_policy("fcfs") == policy


async def test_a_copy_of_an_observed_request_has_only_the_priority_of_its_own() -> None:
    engine, got = made_engine(POLICY)
    guard(engine)
    replay = Replay()
    # Given a form that was learned from a request of a batch, with the priority that EngineCore got
    observed = SimpleNamespace(priority=vllm_priority(6, 0), prompt_token_ids=[1])
    replay.requests, replay.names = [observed], [("cmpl-", "-0")]
    PRIORITY.set(0)
    (request,) = replay.engine_requests("r1", 1, [([2], None)], 5.0)
    await engine.engine_core.add_request_async(request)
    assert (got[0].priority, got[0].prompt_token_ids) == (0, [2])
    assert observed.priority == vllm_priority(6, 0)


@pytest.mark.parametrize("added_first", [False, True], ids=["vllm 0.30", "answers since 0.32"])
async def test_sequences_of_large_requests_get_slots_by_priority(added_first: bool) -> None:
    states: dict[str, Any] = {}
    entered: list[str] = []

    async def send(request: Any) -> None:
        entered.append(request.request_id)

    async def add(request: Any, prompt: Any, parent: Any = None) -> None:
        states[request.request_id] = request
        await engine.engine_core.add_request_async(request)

    processor = SimpleNamespace(
        request_states=states, add_request=None, propagate_error=None,
        abort_requests=lambda names: [states.pop(name) for name in names],
    )  # fmt: skip
    config = SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_seqs=2),
        parallel_config=SimpleNamespace(data_parallel_size=1),
    )
    engine: Any = SimpleNamespace(
        vllm_config=config, output_processor=processor, _add_request=add, errored=False,
        engine_core=SimpleNamespace(add_request_async=send),
    )  # fmt: skip
    SequenceSlots(Progress()).guard(engine, 1)  # one of two slots is for large requests

    async def enter(name: str, priority: int) -> None:
        begin(2)
        PRIORITY.set(priority)
        request = SimpleNamespace(request_id=name)
        if added_first:  # vLLM has added all answers of a request before it sends the first
            states[name] = request
            await engine.engine_core.add_request_async(request)
        else:
            await engine._add_request(request, None, None)

    tasks = []
    for name, priority in (("first", 6), ("second", 6), ("given up", 3), ("online", 0)):
        tasks.append(asyncio.create_task(enter(name, priority)))
        await asyncio.sleep(0)
    tasks[2].cancel()
    for name in ("first", "online", "second"):
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        processor.abort_requests([name])
    assert entered == ["first", "online", "second"]
