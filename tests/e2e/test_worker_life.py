"""Workers with the real engine: two models on two queues, their end, and starts that fail."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from kit.stacks.real_stack import (
    Stack,
    asked,
    chat_messages,
    frozen,
    listed_questions,
    read_jsonl,
    text_of,
    write_jsonl,
)

from contract.redis import keys
from demo.stack import MODEL, ROOT, Worker, eventually, procfile_command, tiny_model_worker

pytestmark = pytest.mark.timeout(300)
NAMES = ("left", "right")


def named(stack: Stack, name: str, number: int = 1) -> Worker:
    """Return a worker that serves the shipped model under another name."""
    log = stack.folder / f"worker-{name}-{number}.log"
    return tiny_model_worker(stack.url, log, served_model_name=name)


@pytest.fixture(scope="module")
def pair(stack: Stack) -> Iterator[dict[str, Worker]]:
    """Return two workers, each with a name and so with a queue of its own, both ready."""
    workers = {name: named(stack, name).start() for name in NAMES}
    try:
        for name, worker in workers.items():
            stack.ready(worker, f"warmq.{name}")
        yield workers
    finally:
        for worker in workers.values():
            if worker.process is not None and worker.process.poll() is None:
                worker.stop()


def family(worker: Worker) -> list[psutil.Process]:
    """Return a worker's process and all its descendants."""
    assert worker.process is not None
    parent = psutil.Process(worker.process.pid)
    return [parent, *parent.children(recursive=True)]


def alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Return those that still run; a zombie only waits to be reaped."""
    return [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


def test_two_models_are_served_from_two_queues(
    stack: Stack, pair: dict[str, Worker], tmp_path: Path
) -> None:
    questions = listed_questions(40, seed=31)
    outs = {}
    for name in NAMES:
        lines = [asked(q, n % 2 == 0) | {"custom_id": f"{name}{n}", "model": name}
                 for n, q in enumerate(questions)]  # fmt: skip
        source = write_jsonl(tmp_path / f"{name}.jsonl", lines)
        outs[name] = tmp_path / f"{name}.out.jsonl"
        run = stack.producer("submit", source, "--model", name, "--wait", "-o", outs[name])
        assert run.returncode == 0, run.stderr
    for name, out in outs.items():
        bodies = [result["response"]["body"] for result in read_jsonl(out)]
        assert {body["model"] for body in bodies} == {name}
        assert [text_of(body) for body in bodies] == [q.answer for q in questions]
    counts = {name: stack.stats(f"warmq.{name}")["counts"]["completed"] for name in NAMES}
    assert counts == dict.fromkeys(NAMES, 40)


def test_a_line_for_another_model_fails_and_names_the_remedy(
    stack: Stack, pair: dict[str, Worker], tmp_path: Path
) -> None:
    (question,) = listed_questions(1, seed=32)
    lines = [asked(question, True) | {"model": "right"}, asked(question, True)]
    source = write_jsonl(tmp_path / "in.jsonl", lines)
    out, errors = tmp_path / "out.jsonl", tmp_path / "err.jsonl"
    run = stack.producer(
        "submit", source, "--model", "left", "--wait", "-o", out, "--errors", errors
    )
    assert run.returncode == 1, run.stderr
    (bad,) = read_jsonl(errors)
    assert bad["error"]["code"] == "model_not_found"
    assert bad["error"]["message"].endswith("the queue of a worker that serves 'right'")
    (good,) = read_jsonl(out)
    assert text_of(good["response"]["body"]) == question.answer


def test_sigterm_leaves_no_process_behind_and_a_second_worker_continues(
    stack: Stack, pair: dict[str, Worker], tmp_path: Path
) -> None:
    # Given a worker in the middle of a batch
    questions = listed_questions(300, seed=33)
    lines = [
        {"messages": chat_messages(q), "max_tokens": 150, "ignore_eos": True} for q in questions
    ]
    source = write_jsonl(tmp_path / "in.jsonl", lines)
    first = pair["left"]
    with frozen(first):
        run = stack.producer("submit", source, "--batch-id", "moved", "--model", "left")
        assert run.returncode == 0, run.stderr
    eventually(lambda: stack.batch("moved").number("completed") > 0, 30)
    processes = family(first)
    assert len(processes) > 1
    # When it is told to stop
    assert first.stop(60) == 0
    # Then nothing of it is left, and it holds nothing
    eventually(lambda: not alive(processes), 20, "multiprocessing's tracker ends after its parent")
    done = stack.batch("moved").terminal
    assert 0 < done < 300
    assert sum(stack.store.queue_lengths("warmq.left").values()) == 300 - done
    assert not [key for key in stack.client.keys("warmq:worker:*") if stack.client.hlen(key)]
    # And a second worker goes on where it stopped
    pair["left"] = second = named(stack, "left", 2).start()
    stack.ready(second, "warmq.left")
    eventually(lambda: stack.batch("moved").finished, 120)
    batch = stack.batch("moved")
    assert (batch.number("completed"), batch.number("total")) == (300, 300)
    assert stack.client.hlen(keys.DEATHS) == 0
    assert finish_reasons(stack, "moved") == ["length"] * 300


def finish_reasons(stack: Stack, batch_id: str) -> list[str]:
    """Return how each request that has a result ended."""
    results = [raw for chunk in stack.store.index(batch_id)
               for raw in stack.store.results(chunk.request_ids(batch_id)) if raw]  # fmt: skip
    return [json.loads(raw)["result"]["choices"][0]["finish_reason"] for raw in results]


def test_sigterm_to_every_process_at_once_makes_no_half_answers(
    stack: Stack, pair: dict[str, Worker], tmp_path: Path
) -> None:
    """So systemd stops a service, if it is not told otherwise."""
    lines = [{"messages": chat_messages(q), "max_tokens": 600, "ignore_eos": True}
             for q in listed_questions(100, seed=34)]  # fmt: skip
    source = write_jsonl(tmp_path / "in.jsonl", lines)
    victim = pair["left"]
    with frozen(victim):
        stack.producer("submit", source, "--batch-id", "whole", "--model", "left")
    eventually(lambda: stack.batch("whole").number("completed") > 0, 30)
    os.killpg(victim.pid, signal.SIGTERM)
    assert victim.process is not None
    assert victim.process.wait(60) == 0
    ended = finish_reasons(stack, "whole")
    assert 0 < len(ended) < 100
    assert set(ended) == {"length"}
    assert sum(stack.store.queue_lengths("warmq.left").values()) == 100 - len(ended)
    assert stack.client.hlen(keys.DEATHS) == 0


def test_sigkill_leaves_no_engine_process_behind(stack: Stack, pair: dict[str, Worker]) -> None:
    victim = pair["right"]
    processes = family(victim)
    assert len(processes) > 1
    assert victim.process is not None
    victim.process.kill()
    victim.process.wait()
    eventually(lambda: not alive(processes), 20, "the engine's processes end with their worker")


# -- Ctrl-C, which a terminal sends to all processes of the group ------------------------------


def told_since_the_stop(worker: Worker) -> list[str]:
    """Return the lines from `stopping` on, but for those that tell of a busy machine: vLLM did not
    end in its 5 s and was killed, and Python speaks of the shared memory that it has left."""
    lines = worker.log_path.read_text().partition(": INFO/MainProcess] stopping")[2].splitlines()
    busy = ("force killing", "resource_tracker", "workers still running after grace period")
    told = [line for line in lines if not any(word in line for word in busy)]
    return [line.rpartition("MainProcess] ")[2] for line in told]


def test_ctrl_c_lets_running_requests_end_and_takes_three_lines(
    stack: Stack, worker: Worker, tmp_path: Path
) -> None:
    lines = [{"messages": chat_messages(q), "max_tokens": 150, "ignore_eos": True}
             for q in listed_questions(200, seed=35)]  # fmt: skip
    source = write_jsonl(tmp_path / "in.jsonl", lines)
    with frozen(worker):
        stack.producer("submit", source, "--batch-id", "interrupted")
    eventually(lambda: stack.batch("interrupted").number("completed") > 0, 30)
    processes = family(worker)
    os.killpg(worker.pid, signal.SIGINT)
    assert worker.process is not None
    assert worker.process.wait(60) == 1
    told = told_since_the_stop(worker)
    assert len(told) == 3, told
    assert "requests in flight may finish within 25 s" in told[0]
    drained = re.fullmatch(
        r"drained: (\d+) requests have ended, \d+ are back in the queue", told[1]
    )
    assert drained is not None and int(drained[1]) > 0
    assert told[2] == "stopped"
    ended = finish_reasons(stack, "interrupted")
    assert set(ended) == {"length"}
    assert sum(stack.store.queue_lengths("warmq").values()) == 200 - len(ended)
    assert stack.client.hlen(keys.DEATHS) == 0
    eventually(lambda: not alive(processes), 20, "nothing is left of it")


def test_ctrl_c_while_the_model_is_loaded_takes_three_lines(stack: Stack) -> None:
    starting = named(stack, "early").start()
    eventually(lambda: len(family(starting)) > 2, 60, "the engine's processes begin", every_s=0.1)
    processes = family(starting)
    os.killpg(starting.pid, signal.SIGINT)
    assert starting.process is not None
    assert starting.process.wait(60) == 1
    told = told_since_the_stop(starting)
    assert told[1:] == ["drained: 0 requests have ended, 0 are back in the queue", "stopped"]
    eventually(lambda: not alive(processes), 20, "nothing is left of it")


# -- starts that fail -------------------------------------------------------------------------


def failing_start(stack: Stack, **settings: str) -> subprocess.CompletedProcess[str]:
    """Run a worker that cannot start to its end; its queue is one of its own."""
    env = stack.environment() | {"WARMQ_QUEUE": "nowhere", "HF_HUB_OFFLINE": "1"}
    env |= {f"WARMQ_{name.upper()}": value for name, value in settings.items()}
    return subprocess.run(
        [*procfile_command(), "--hostname=failing@%h"],
        cwd=ROOT, env=os.environ | env, text=True, timeout=120, check=False,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("model", "engine_args", "part"),
    [
        (str(MODEL), "--no-such-option 1", "WARMQ_ENGINE_ARGS: unrecognized arguments"),
        (str(MODEL), "--max-num-seqs many", "WARMQ_ENGINE_ARGS: argument --max-num-seqs"),
        ("/no/such/model", "", "/no/such/model"),
        (str(MODEL), "--max-model-len 9999", "max_model_len"),
    ],
    ids=["option", "value", "model", "length"],
)
def test_an_engine_that_cannot_start_ends_the_process_and_names_the_cause(
    stack: Stack, model: str, engine_args: str, part: str
) -> None:
    stack.client.delete("nowhere")
    stack.app.send_task("warmq.generate", args=[{"prompt": "x"}], queue="nowhere")
    run = failing_start(stack, model=model, engine_args=engine_args)
    assert run.returncode == 1
    cause = run.stdout[run.stdout.index("the drain ended") :]
    assert part in cause
    assert stack.client.llen("nowhere") == 1
