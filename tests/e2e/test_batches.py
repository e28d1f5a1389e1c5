"""Batches of real questions through the installed `producer` and the real engine."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from kit.stacks.real_stack import (
    Stack,
    asked,
    chat_messages,
    engine_frozen,
    frozen,
    listed_questions,
    read_jsonl,
    text_of,
    write_jsonl,
)
from questions import held_out_reading

from contract.redis import keys
from demo.stack import Worker, eventually

pytestmark = [pytest.mark.timeout(240), pytest.mark.usefixtures("worker")]
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"


def line(custom_id: str, body: dict[str, Any]) -> dict[str, Any]:
    """Return an OpenAI batch line."""
    url = CHAT if "messages" in body else COMPLETION
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def long_body(n: int, tokens: int) -> dict[str, Any]:
    """Return a request that runs for exactly so many tokens."""
    return {
        "messages": chat_messages(listed_questions(1, n)[0]),
        "max_tokens": tokens,
        "ignore_eos": True,
    }


def test_500_requests_with_a_bad_line_are_answered_truly(stack: Stack, tmp_path: Path) -> None:
    # Given 250 listed and 249 held-out reading questions, chat and completion mixed, one bad line
    questions = listed_questions(250) + list(held_out_reading(77, 249))
    lines = [line(f"q{n}", asked(q, n % 2 == 0)) for n, q in enumerate(questions)]
    lines.insert(123, line("bad", asked(questions[0], True, max_tokens=-5)))
    source = write_jsonl(tmp_path / "in.jsonl", lines)
    out, errors = tmp_path / "out.jsonl", tmp_path / "err.jsonl"
    # When the file is submitted and waited for
    run = stack.producer(
        "submit", source, "--batch-id", "b500", "--wait", "-o", out, "--errors", errors
    )
    # Then one request failed, and says why
    assert run.returncode == 1, run.stderr
    (bad,) = read_jsonl(errors)
    assert (bad["custom_id"], bad["error"]["line"]) == ("bad", 124)
    assert "max_tokens" in bad["error"]["message"]
    # And the others are answered in the file's order, and truly
    results = read_jsonl(out)
    assert [r["custom_id"] for r in results] == [f"q{n}" for n in range(499)]
    right = [text_of(r["response"]["body"]) == q.answer
             for r, q in zip(results, questions, strict=True)]  # fmt: skip
    assert all(right[:250])
    assert sum(right[250:]) >= 0.95 * 249
    for result in results:
        body = result["response"]["body"]
        assert result["response"]["status_code"] == 200
        assert body["choices"][0]["finish_reason"] == "stop"
        assert body["usage"]["total_tokens"] > body["usage"]["completion_tokens"] > 0
    # And the batch's account agrees
    status = json.loads(stack.producer("status", "b500", "--json").stdout)
    assert status["status"] == "completed"
    assert status["request_counts"] == {
        "total": 500, "completed": 499, "failed": 1, "cancelled": 0, "expired": 0, "in_progress": 0,
    }  # fmt: skip
    total = sum(result["response"]["body"]["usage"]["total_tokens"] for result in results)
    assert status["usage"]["total_tokens"] == total


def test_a_submit_that_was_killed_is_resumed_and_runs_nothing_twice(
    stack: Stack, tmp_path: Path
) -> None:
    questions = listed_questions(1200, seed=2)
    lines = [line(f"q{n}", asked(q, True)) for n, q in enumerate(questions)]
    source = write_jsonl(tmp_path / "in.jsonl", lines)
    # Given a submit that is killed after its first chunks
    with subprocess.Popen(
        stack.command("submit", "-", "--batch-id", "killed"),
        stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        env=stack.environment(),
    ) as process:  # fmt: skip
        assert process.stdin is not None
        process.stdin.write("".join(source.read_text().splitlines(keepends=True)[:1100]).encode())
        process.stdin.flush()
        eventually(
            lambda: (b := stack.store.batch("killed")) and b.number("cursor") >= 500, 20, "a chunk"
        )
        process.kill()
    assert stack.batch("killed").status == "validating"
    # When the file is submitted again under that id
    out = tmp_path / "out.jsonl"
    run = stack.producer("submit", source, "--batch-id", "killed", "--wait", "-o", out)
    # Then every request is answered once
    assert run.returncode == 0, run.stderr
    results = read_jsonl(out)
    assert [r["custom_id"] for r in results] == [f"q{n}" for n in range(1200)]
    assert [text_of(r["response"]["body"]) for r in results] == [q.answer for q in questions]
    batch = stack.batch("killed")
    assert (batch.number("total"), batch.number("completed")) == (1200, 1200)
    assert len(stack.store.finished_ids("killed", 0, 5000)) == 1200
    assert {r["warmq"]["timing"]["attempts"] for r in results} == {1}


def test_results_are_followed_while_the_batch_runs(stack: Stack, tmp_path: Path) -> None:
    lines = [line(f"q{n}", long_body(n, 8)) for n in range(600)]
    source = write_jsonl(tmp_path / "in.jsonl", lines).read_bytes().splitlines(keepends=True)
    # Given a submit whose input pauses after its first chunk of 500 lines
    with subprocess.Popen(
        stack.command("submit", "-", "--batch-id", "followed"),
        stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        env=stack.environment(),
    ) as submit:  # fmt: skip
        assert submit.stdin is not None
        submit.stdin.write(b"".join(source[:550]))
        submit.stdin.flush()
        eventually(lambda: stack.store.batch("followed"), 30, "the batch is there")
        # When somebody follows the results
        with subprocess.Popen(
            stack.command("results", "followed", "--follow", "--order", "completion", "-o", "-"),
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=stack.environment(),
        ) as follow:  # fmt: skip
            assert follow.stdout is not None
            # Then those of the first chunk come while the batch is open
            results = [json.loads(follow.stdout.readline()) for _ in range(500)]
            assert stack.batch("followed").status == "validating"
            # And the others after them
            submit.communicate(b"".join(source[550:]))
            results += [json.loads(text) for text in follow.stdout]
    assert (submit.returncode, follow.returncode) == (0, 0)
    assert sorted(r["custom_id"] for r in results) == sorted(f"q{n}" for n in range(600))
    for result in results:
        assert result["response"]["body"]["usage"]["completion_tokens"] == 8
        assert result["response"]["body"]["choices"][0]["finish_reason"] == "length"


def ended_at(stack: Stack, batch_id: str) -> list[str]:
    """Return when each finished request of a batch ended, in ISO 8601, earliest first."""
    metas = stack.store.results(stack.store.finished_ids(batch_id, 0, 1000))
    return sorted(json.loads(meta)["date_done"] for meta in metas if meta)


def test_an_urgent_batch_overtakes_a_long_one(stack: Stack, worker: Worker, tmp_path: Path) -> None:
    slow = write_jsonl(tmp_path / "s.jsonl", [line(f"s{n}", long_body(n, 300)) for n in range(300)])
    questions = listed_questions(10, seed=4)
    lines = [line(f"f{n}", asked(q, True)) for n, q in enumerate(questions)]
    fast = write_jsonl(tmp_path / "f.jsonl", lines)
    # Given a long batch of which the first requests have ended
    with frozen(worker):
        stack.producer("submit", slow, "--batch-id", "slow", "--priority", "9")
    eventually(lambda: stack.batch("slow").number("completed") > 0, 30)
    # When an urgent one is submitted
    with frozen(worker):
        stack.producer("submit", fast, "--batch-id", "fast", "--priority", "0")
        before = stack.batch("slow").terminal
    eventually(lambda: stack.batch("fast").finished, 60)
    stack.store.cancel(stack.batch("slow"))
    # Then only what the engine had already, or got together with it, ended before it
    *_, last = ended_at(stack, "fast")
    in_flight = stack.stats()["in_flight_limit"]
    assert sum(end < last for end in ended_at(stack, "slow")) < before + 2 * in_flight
    out = tmp_path / "out.jsonl"
    assert stack.producer("results", "fast", "-o", out).returncode == 0
    answers = [text_of(r["response"]["body"]) for r in read_jsonl(out)]
    assert answers == [q.answer for q in questions]


def test_cancel_frees_the_engine(stack: Stack, worker: Worker, tmp_path: Path) -> None:
    # Given every slot generates for a long time, and more of that waits
    lines = [line(f"q{n}", long_body(n, 900)) for n in range(300)]
    source = write_jsonl(tmp_path / "in.jsonl", lines)
    with frozen(worker):
        stack.producer("submit", source, "--batch-id", "doomed")
    in_flight = stack.stats()["in_flight_limit"]
    eventually(lambda: stack.client.zcard(keys.LEASES) == in_flight, 20, "the engine is full")
    # When the batch is cancelled
    with frozen(worker):
        before = stack.batch("doomed").number("completed")
        run = stack.producer("cancel", "doomed")
        assert run.returncode == 0, run.stderr
    # Then a new question is answered, and the engine has let go of what it was at
    (question,) = listed_questions(1, seed=5)
    sent = stack.app.send_task("warmq.generate", args=[asked(question, True)], queue="warmq")
    assert text_of(sent.get(timeout=20)) == question.answer
    eventually(lambda: stack.in_flight() == 0, 20, "nothing is in flight")
    assert stack.batch("doomed").number("completed") < before + in_flight
    # And every request of the batch has its ending
    batch = stack.batch("doomed")
    assert (batch.status, batch.terminal) == ("cancelled", 300)
    assert batch.number("cancelled") > 200
    out = tmp_path / "out.jsonl"
    errors = tmp_path / "err.jsonl"
    assert stack.producer("results", "doomed", "-o", out, "--errors", errors).returncode == 1
    assert len(read_jsonl(errors)) == batch.number("cancelled")
    assert len(read_jsonl(out)) == batch.number("completed")


def test_one_request_in_flight_is_cancelled_and_the_others_are_not(
    stack: Stack, worker: Worker, tmp_path: Path
) -> None:
    lines = [line(f"q{n}", long_body(n, 900)) for n in range(8)]
    source = write_jsonl(tmp_path / "in.jsonl", lines)
    with engine_frozen(worker):
        stack.producer("submit", source, "--batch-id", "partly")
        eventually(lambda: stack.client.zcard(keys.LEASES) == 8, 20, "all are in the engine")
        cancelled = stack.producer("cancel", "partly", "--request", "q3")
        assert cancelled.returncode == 0, cancelled.stderr
        eventually(lambda: stack.batch("partly").number("cancelled") == 1, 20, "it was heard")
    eventually(lambda: stack.batch("partly").finished, 30)
    batch = stack.batch("partly")
    assert (batch.number("completed"), batch.number("cancelled")) == (7, 1)


def test_a_prompt_that_does_not_fit_fails_alone(
    stack: Stack, worker: Worker, tmp_path: Path
) -> None:
    (question,) = listed_questions(1, seed=6)
    lines = [
        line("fits", asked(question, True)),
        line("long-chat", {"messages": [{"role": "user", "content": "one two three " * 2000}]}),
        line("long-text", {"prompt": "one two three " * 2000, "max_tokens": 4}),
        line("exact", {"prompt": [5] * 1020, "max_tokens": 4, "ignore_eos": True}),
        line("one-over", {"prompt": [5] * 1021, "max_tokens": 4, "ignore_eos": True}),
        line("unlimited", {"prompt": [5] * 1000, "ignore_eos": True}),
        line("echoed", {"prompt": [5] * 1000, "ignore_eos": True, "echo": True}),
    ]
    out, errors = tmp_path / "out.jsonl", tmp_path / "err.jsonl"
    source = write_jsonl(tmp_path / "in.jsonl", lines)
    run = stack.producer("submit", source, "--wait", "-o", out, "--errors", errors)
    assert run.returncode == 1, run.stderr
    good = {r["custom_id"]: r["response"]["body"] for r in read_jsonl(out)}
    assert set(good) == {"fits", "exact", "unlimited", "echoed"}, errors.read_text()
    assert text_of(good["fits"]) == question.answer
    assert good["exact"]["usage"]["completion_tokens"] == 4
    # The default limit is cut to what the context leaves.
    assert good["unlimited"]["usage"]["total_tokens"] == 1024
    assert good["echoed"]["usage"]["total_tokens"] == 1024
    bad = {r["custom_id"]: r["error"] for r in read_jsonl(errors)}
    assert {e["code"] for e in bad.values()} == {"context_length_exceeded"}
    assert all("1024" in e["message"] for e in bad.values())
