"""Every kind of bad line becomes an error result that names line, field and remedy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest
from kit.commands.support import chat_line, queued, run_all, run_producer, state, write_lines

from contract.redis.batches import BatchStore
from producer.cli.show import batch_json

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"


def completion(**body: Any) -> dict[str, Any]:
    return {"custom_id": "bad", "method": "POST", "url": COMPLETION, "body": body}


def chat(**body: Any) -> dict[str, Any]:
    return chat_line("bad", **body)


BAD: list[tuple[str, dict[str, Any] | bytes, str, str, str]] = [
    # what, line, code, field, part of the message
    ("wrong JSON", b'{"prompt": "x"', "invalid_json", "", "write one JSON object per line"),
    ("no object", b'["prompt"]', "invalid_json", "", "write {...} on each line"),
    ("invalid UTF-8", b'{"prompt": "\xff\xfe"}', "invalid_json", "", "in UTF-8"),
    ("NaN", b'{"prompt": "x", "temperature": NaN}', "invalid_json", "", "not valid JSON"),
    ("infinity", b'{"prompt": "x", "temperature": Infinity}', "invalid_json", "", "not valid JSON"),
    ("deeply nested", b"[" * 100_000, "invalid_json", "", "not valid JSON"),
    ("deeply nested inside", b'{"prompt": ' + b"[" * 5000 + b"]" * 5000 + b"}", "invalid_json", "",
     "not valid JSON"),
    ("wrong type", chat(max_tokens="10"), "invalid_request", "body.max_tokens", "whole number"),
    ("wrong type of text", completion(prompt=5), "invalid_request", "body.prompt", "give a text"),
    ("unknown url", chat_line("bad") | {"url": "/v1/moderations"}, "unknown_url", "url",
     f"use one of {CHAT}, {COMPLETION}"),
    ("wrong method", chat_line("bad") | {"method": "GET"}, "unknown_url", "method",
     "'GET' is not served; write POST"),
    ("no url", {"custom_id": "bad", "method": "POST", "body": {"prompt": "x"}}, "unknown_url",
     "url", f"field url: is missing; give one of {CHAT}, {COMPLETION}"),
    ("no body", {"custom_id": "bad", "url": CHAT}, "invalid_request", "body",
     "field body: is missing; give the request's fields as a JSON object, such as "
     '{"messages":[{"role":"user","content":"Hello"}]}'),
    ("a body in quotes", {"custom_id": "bad", "url": COMPLETION, "body": '{"prompt": "x"}'},
     "invalid_request", "body", 'is a text; give the request\'s fields as a JSON object, such as '
     '{"prompt":"x"}'),
    ("no prompt", completion(max_tokens=5), "invalid_request", "body.prompt", "is missing"),
    ("neither prompt nor messages", {"custom_id": "bad", "max_tokens": 5}, "invalid_request",
     "prompt", "give one of them"),
    ("empty prompt", completion(prompt=""), "invalid_request", "body.prompt", "give a text"),
    ("empty messages", completion() | {"url": CHAT, "body": {"messages": []}}, "invalid_request",
     "body.messages", "at least one message"),
    ("message without role", completion() | {"url": CHAT, "body": {"messages": [{}]}},
     "invalid_request", "body.messages", "is missing"),
    ("max_tokens of 0", chat(max_tokens=0), "invalid_request", "body.max_tokens", "at least 1"),
    ("negative max_tokens", chat(max_tokens=-1), "invalid_request", "body.max_tokens",
     "at least 1"),
    ("hot temperature", chat(temperature=2.1), "invalid_request", "body.temperature",
     "from 0 (greedy) to 2"),
    ("cold temperature", chat(temperature=-0.1), "invalid_request", "body.temperature",
     "from 0 (greedy) to 2"),
    ("n of 0", chat(n=0), "invalid_request", "body.n", "from 1 to 128"),
    ("large n", chat(n=129), "invalid_request", "body.n", "from 1 to 128"),
    ("n as a fraction", chat(n=1.5), "invalid_request", "body.n", "from 1 to 128"),
    ("stop with an empty text", chat(stop=["a", ""]), "invalid_request", "body.stop",
     "none of them empty"),
    ("stop with a number", chat(stop=[1]), "invalid_request", "body.stop", "list of texts"),
    ("stream", chat(stream=True), "invalid_request", "body.stream", "cannot stream; remove it"),
    ("stream options", chat(stream_options={}), "invalid_request", "body.stream_options",
     "remove it"),
    ("int beyond 64 bit", b'{"prompt": "x", "seed": 9223372036854775808}', "invalid_request",
     "seed", "fits 64 bits"),
    ("int far beyond 64 bit", b'{"prompt": "x", "seed": 1' + b"0" * 40 + b"}", "invalid_request",
     "seed", "fits 64 bits"),
    ("unknown field", chat(max_token=5), "unknown_field", "body.max_token", "spelling"),
    ("body fields beside the body", chat_line("bad") | {"max_tokens": 5}, "unknown_field",
     "max_tokens", "inside `body`"),
    ("custom_id that is a number", chat_line() | {"custom_id": 7}, "invalid_request", "custom_id",
     "text of 1 to 512"),
    ("empty custom_id", chat_line() | {"custom_id": ""}, "invalid_request", "custom_id", "text of"),
    ("long custom_id", chat_line() | {"custom_id": "x" * 513}, "invalid_request", "custom_id",
     "text of 1 to 512"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("line", "code", "field", "remedy"), [b[1:] for b in BAD], ids=[b[0] for b in BAD]
)
def test_a_bad_line_fails_with_line_field_and_remedy_and_its_neighbours_run(
    store: BatchStore, tmp_path: Path, submit, error_lines, line, code, field, remedy
):
    path = write_lines(tmp_path / "in.jsonl", [chat_line("a"), b"", line, chat_line("b")])

    submit(path)

    (error,) = error_lines()
    assert error["error"]["code"] == code
    assert error["error"]["line"] == 3
    assert error["error"].get("param", "").startswith(field)
    assert error["error"]["message"].startswith("line 3, " + (f"field {field}" if field else ""))
    assert remedy in error["error"]["message"]
    own = line.get("custom_id") if isinstance(line, dict) else None
    assert error["custom_id"] == ("bad" if own == "bad" else "line-3")
    assert [m["headers"]["warmq"]["custom_id"] for m in queued(store)] == ["a", "b"]


@pytest.fixture
def submit(store: BatchStore):
    from contract.settings import Settings
    from producer.input.reader import Input, chunks
    from producer.submit.submission import Submission
    from producer.submit.submit import Submitter

    def run(path: Path, **settings: Any):
        submission = Submission("b1", "warmq", 6)
        limits = Settings(_env_file=None, **settings)
        batch = submission.create(store, "in.jsonl")
        submitter = Submitter(store, limits, submission, batch)
        source = Input(str(path))
        try:
            return submitter.run(chunks(source.lines(), submission.seed, limits.max_line_bytes))
        finally:
            source.close()

    return run


@pytest.fixture
def error_lines(store: BatchStore):
    from producer.collect.collect import Collector

    def read() -> list[dict[str, Any]]:
        lines = Collector(store, state(store, "b1"), follow=False, partial=True).lines("input")
        return [orjson.loads(line.json) for line in lines if line.failed]

    return read


def test_a_line_over_the_size_limit_fails_alone(
    store: BatchStore, tmp_path: Path, submit, error_lines
):
    big = chat_line("big", content="x" * 2000)
    path = write_lines(tmp_path / "in.jsonl", [chat_line("a"), big, chat_line("b")])

    submit(path, max_line_bytes=1000)

    (error,) = error_lines()
    size = len(orjson.dumps(big))
    assert error["error"] == {
        "line": 2,
        "code": "line_too_long",
        "message": f"line 2, longer than 1000 bytes (it has {size}); shorten it, or raise "
        "WARMQ_MAX_LINE_BYTES",
    }
    assert error["custom_id"] == "line-2"


def test_a_repeated_custom_id_fails_by_its_own_line_and_the_first_one_runs(
    store: BatchStore, tmp_path: Path, submit, error_lines
):
    lines = [chat_line("a", "first"), chat_line("a", "second"), chat_line("a", "third")]

    submit(write_lines(tmp_path / "in.jsonl", lines))

    assert [e["error"]["code"] for e in error_lines()] == ["duplicate_custom_id"] * 2
    assert [e["error"]["line"] for e in error_lines()] == [2, 3]
    assert error_lines()[0]["error"]["message"] == (
        "line 2, field custom_id: 'a' was used before; make it unique"
    )
    (message,) = queued(store)
    assert "first" in message["body"]


def test_duplicates_are_found_over_chunks_and_beyond_the_memory_bound(
    store: BatchStore, tmp_path: Path, submit, monkeypatch
):
    monkeypatch.setattr("producer.input.seen.IN_MEMORY", 100)
    names = [f"r{i}" for i in range(1500)]
    path = write_lines(tmp_path / "in.jsonl", (chat_line(name) for name in names + names))

    submit(path)

    batch = state(store, "b1")
    assert (batch.number("total"), batch.number("valid")) == (3000, 1500)
    assert batch.number("failed") == 1500


def test_a_bad_line_claims_its_custom_id_so_that_results_stay_unambiguous(
    store: BatchStore, tmp_path: Path, submit, error_lines
):
    submit(write_lines(tmp_path / "in.jsonl", [chat_line("a", n=0), chat_line("a")]))

    assert [e["error"]["code"] for e in error_lines()] == ["invalid_request", "duplicate_custom_id"]


def test_lines_without_custom_id_are_named_after_their_line_number(
    store: BatchStore, tmp_path: Path, submit
):
    submit(write_lines(tmp_path / "in.jsonl", [{"prompt": "x"}, b"", chat_line()]))

    names = [m["headers"]["warmq"]["custom_id"] for m in queued(store)]
    assert names == ["line-1", "line-3"]


def test_a_file_without_a_valid_line_ends_as_a_failed_batch_that_says_why(
    redis_url: str, store: BatchStore, tmp_path: Path
):
    path = write_lines(tmp_path / "in.jsonl", [b"{", {"prompt": ""}])

    done = run_producer("submit", path, "--batch-id", "b1", redis_url=redis_url)

    assert done.returncode == 2
    assert "no valid line: all 2 are wrong; the first: line 1, not valid JSON" in done.stderr
    batch = state(store, "b1")
    assert batch.status == "failed"
    assert batch_json(batch)["reason"].startswith("no valid line")


def test_an_empty_file_ends_as_a_failed_batch_that_says_why(
    redis_url: str, store: BatchStore, tmp_path: Path
):
    path = write_lines(tmp_path / "in.jsonl", [b"", b"  "])

    done = run_producer("submit", path, "--batch-id", "b1", redis_url=redis_url)

    assert done.returncode == 2
    assert "the file has no request lines" in done.stderr
    assert state(store, "b1").status == "failed"


def test_a_batch_with_bad_lines_completes_and_counts_them_as_failed(
    store: BatchStore, tmp_path: Path, submit
):
    submit(write_lines(tmp_path / "in.jsonl", [chat_line("a"), b"{"]))
    run_all(store)

    batch = state(store, "b1")
    assert batch_json(batch)["status"] == "completed"
    assert batch_json(batch)["request_counts"] == {
        "total": 2, "completed": 1, "failed": 1, "cancelled": 0, "expired": 0, "in_progress": 0,
    }  # fmt: skip
