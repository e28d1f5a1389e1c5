"""The same file twice with `--reuse`: the second time vLLM computes nothing, 50 times as fast."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from kit.stacks.real_stack import Stack, asked, listed_questions, read_jsonl, write_jsonl

from contract.redis.known import KnownAnswers
from demo.stack import Worker, eventually, tiny_model_worker

pytestmark = pytest.mark.timeout(300)
CHAT, QUEUE = "/v1/chat/completions", "warmq.noting"


@pytest.fixture
def noting(stack: Stack) -> Iterator[Worker]:
    """Return a worker that notes answers, ready, with a queue of its own."""
    settings = {"served_model_name": "noting", "known_answers": 10_000}
    with tiny_model_worker(stack.url, stack.folder / "noting.log", **settings) as running:
        stack.ready(running, QUEUE)
        eventually(lambda: KnownAnswers.using(stack.store).offer(QUEUE), 20, "it offers answers")
        yield running


def computed(stack: Stack) -> int:
    """Return how many requests the worker has ended since its start."""
    (worker,) = stack.store.workers(QUEUE)
    return int(worker["done"]["completed"])


def seconds(stack: Stack, batch_id: str) -> float:
    """Return the seconds from a batch's creation to its end."""
    batch = stack.store.batch(batch_id)
    assert batch is not None and batch.seconds is not None
    return batch.seconds


def test_the_second_run_makes_no_request_and_one_percent_changed_makes_as_many(
    stack: Stack, noting: Worker, tmp_path: Path
) -> None:
    # Given 1,000 lines that were answered: questions with seeds, each with eight texts
    texts = {"n": 8, "temperature": 0.01, "max_tokens": 64}
    questions = listed_questions(202)
    bodies_in = [asked(one, True, seed=seed, **texts) for seed in range(5) for one in questions]
    lines = [
        {"custom_id": f"q{n}", "method": "POST", "url": CHAT, "body": body}
        for n, body in enumerate(bodies_in)
    ]
    out = [tmp_path / f"{n}.jsonl" for n in range(3)]
    first = write_jsonl(tmp_path / "in.jsonl", lines[:1000])
    options = ("--model", "noting", "--reuse", "--wait", "-o")
    computing = stack.producer("submit", first, "--batch-id", "computed", *options, out[0])
    assert computing.returncode == 0, computing.stderr
    eventually(lambda: computed(stack) == 1000, 10, "the worker has announced its answers")
    # When they are asked again
    again = stack.producer("submit", first, "--batch-id", "reused", *options, out[1])
    # Then the bodies are the same, and the worker has computed nothing
    assert again.returncode == 0, again.stderr
    assert "1000 of them answered by known answers" in again.stderr
    bodies = [[line["response"]["body"] for line in read_jsonl(path)] for path in out[:2]]
    assert bodies[0] == bodies[1]
    assert seconds(stack, "computed") >= 50 * seconds(stack, "reused")
    # And with 1 % of other lines, exactly these are computed
    changed = write_jsonl(tmp_path / "changed.jsonl", lines[10:])
    third = stack.producer("submit", changed, *options, out[2])
    assert "990 of them answered by known answers" in third.stderr, third.stderr
    eventually(lambda: computed(stack) == 1010, 10, "the worker has announced the other ten")
    assert [line["response"]["body"] for line in read_jsonl(out[2])][:990] == bodies[0][10:]
