"""Masks of answers that are bound to a schema: vLLM's threads get a request's at a time."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.v1.structured_output import StructuredOutputManager

from worker.engine.vllm.processes import NEIGHBOURS, share_masks

REQUESTS = 200


class Grammar:
    """Allows the tokens whose bits its number has, and notes the thread's share."""

    def __init__(self, number: int) -> None:
        self.number = number

    def is_terminated(self) -> bool:
        return False

    def fill_bitmask(self, mask: Any, index: int) -> None:
        mask[index].fill_(self.number)


class Threads(ThreadPoolExecutor):
    """Two threads; `shares` has the number of requests of each task."""

    def __init__(self) -> None:
        super().__init__(2)
        self.shares: list[int] = []

    def submit(self, work: Any, batch: Any) -> Any:  # type: ignore[override]
        self.shares.append(len(batch))
        return super().submit(work, batch)


def manager() -> tuple[Any, Threads]:
    """Return vLLM's manager as its constructor leaves it for 256 slots, without a model."""
    made: Any = object.__new__(StructuredOutputManager)
    threads = Threads()
    made.vllm_config = SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_seqs=256), num_speculative_tokens=0
    )
    made.backend = SimpleNamespace(allocate_token_bitmask=lambda n: torch.zeros(n, 4).int())
    made._grammar_bitmask, made._full_mask = None, torch.tensor(-1, dtype=torch.int32)
    made.reasoner_cls, made.enable_in_reasoning = None, False
    made.fill_bitmask_parallel_threshold = 128
    made.fill_bitmask_parallel_batch_size = 16
    made.executor_for_fillmask = threads
    return made, threads


def masks(made: Any) -> Any:
    structured = [
        SimpleNamespace(grammar=Grammar(number), reasoning_ended=True, reasoner=None)
        for number in range(REQUESTS)
    ]
    requests = {
        str(number): SimpleNamespace(structured_output_request=one, use_structured_output=True)
        for number, one in enumerate(structured)
    }
    return made.grammar_bitmask(requests, list(requests), {})


def test_no_thread_has_several_neighbours_and_the_masks_are_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    vllms, threads = manager()
    expected = masks(vllms)
    assert max(threads.shares) == 16
    # restores the class at the end
    monkeypatch.setattr(
        StructuredOutputManager, "fill_bitmask_parallel_batch_size", 16, raising=False
    )
    share_masks()
    ours, threads = manager()
    found = masks(ours)
    assert set(threads.shares) == {NEIGHBOURS}
    assert sum(threads.shares) == REQUESTS
    assert np.array_equal(found, expected)
    assert found[:, 0].tolist() == list(range(REQUESTS))


def _share_in_child(pipe: Any) -> None:
    from vllm.plugins import load_general_plugins
    from vllm.v1.engine import core

    load_general_plugins()
    made = object.__new__(core.StructuredOutputManager)
    made.fill_bitmask_parallel_batch_size = 16
    pipe.send(made.fill_bitmask_parallel_batch_size)


def test_an_engine_process_has_it_by_the_plugin() -> None:
    ours, childs = multiprocessing.Pipe()
    child = multiprocessing.get_context("spawn").Process(target=_share_in_child, args=(childs,))
    child.start()
    assert ours.poll(120)
    assert ours.recv() == NEIGHBOURS
    child.join(30)
    assert child.exitcode == 0
