"""`producer run --order`: what is queued when, and the order of the output at the end."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from kit.commands.runs import custom_ids, done_windows, journal_of, running, served
from kit.commands.support import chat_line, finish, run_producer, write_lines
from kit.protocol.lessee import Lessee, client_of

from contract.redis.batches import BatchStore
from demo.stack import eventually
from producer.submit.order.by_line import sort_by_line

pytestmark = pytest.mark.timeout(120)
DOCUMENTS, QUESTIONS = 300, 4


def by_question(path: Path) -> Path:
    """Write a file that asks each question of all documents before it asks the next."""
    return write_lines(
        path,
        [
            chat_line(f"d{document}-q{question}", f"document {document} " * 40 + f"? {question}")
            for question in range(QUESTIONS)
            for document in range(DOCUMENTS)
        ],
    )


def ids_of_the_file() -> list[str]:
    return [f"d{d}-q{q}" for q in range(QUESTIONS) for d in range(DOCUMENTS)]


def popped(store: BatchStore, count: int) -> list[str]:
    """Answer the next requests; return their custom_ids in the order in which they came."""
    lessee = Lessee(client_of(store))
    leases = lessee.pop(count)
    finish(lessee, leases)
    return [json.loads(lease.message)["headers"]["warmq"]["custom_id"] for lease in leases]


def test_a_run_takes_common_beginnings_together_and_its_output_has_the_files_order(
    redis_url: str, store: BatchStore, tmp_path: Path
) -> None:
    source, out = by_question(tmp_path / "in.jsonl"), tmp_path / "out.jsonl"
    came: list[str] = []
    with running(redis_url, source, out, "--window", "500", "--order", "prefix") as process:

        def ended() -> bool:
            came.extend(popped(store, 64))
            return process.poll() is not None

        eventually(ended, 60)
        assert process.stderr is not None
        assert process.returncode == 0, process.stderr.read()
        assert "order: prefix, 300 groups of lines" in process.stderr.read()
    assert came == [f"d{d}-q{q}" for d in range(DOCUMENTS) for q in range(QUESTIONS)]
    assert custom_ids(out) == ids_of_the_file()
    assert store.batches() == []


def test_a_killed_run_goes_on_by_the_same_order(
    redis_url: str, store: BatchStore, tmp_path: Path
) -> None:
    source, out = by_question(tmp_path / "in.jsonl"), tmp_path / "out.jsonl"
    words = (source, out, "--window", "500", "--order", "prefix")
    with running(redis_url, *words) as process:
        eventually(lambda: sum(batch.sealed for batch in store.batches()) == 2, 20)
        before = popped(store, 600)
        eventually(lambda: done_windows(out) == 1, 20)
        process.send_signal(signal.SIGKILL)
    assert custom_ids(out) != ids_of_the_file()[:500]
    status, told = served(redis_url, store, *words)
    assert status == 0, told
    assert len(before) == 600
    assert custom_ids(out) == ids_of_the_file()
    assert json.loads(journal_of(out).read_text())["complete"]


def test_a_run_that_is_stopped_while_it_sorts_its_output_sorts_it_again(
    redis_url: str, store: BatchStore, tmp_path: Path
) -> None:
    source, out = by_question(tmp_path / "in.jsonl"), tmp_path / "out.jsonl"
    words = (source, out, "--window", "500", "--order", "prefix")
    assert served(redis_url, store, *words)[0] == 0
    results, journal = out.read_bytes(), journal_of(out)
    # As a kill leaves them between the sorting and the last write of the journal
    left = json.loads(journal.read_text()) | {"complete": False}
    journal.write_text(json.dumps(left))
    assert served(redis_url, store, *words)[0] == 0
    assert out.read_bytes() == results
    assert json.loads(journal.read_text())["complete"]


def test_bad_and_repeated_lines_are_errors_of_their_own_in_the_files_order(
    redis_url: str, store: BatchStore, tmp_path: Path
) -> None:
    shared = "the same beginning " * 20
    lines = [
        chat_line("other", "another text " * 20),
        chat_line("twice", shared + "1"),
        chat_line("bad", max_tokens=-1),
        chat_line("first", shared + "2"),
        chat_line("other", shared + "3"),
    ]
    source, out = write_lines(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    status, told = served(redis_url, store, source, out, "--order", "prefix")
    assert status == 1, told
    assert custom_ids(out) == ["other", "twice", "first"]
    errors = [json.loads(x) for x in (tmp_path / "out.errors.jsonl").read_text().splitlines()]
    assert [(e["custom_id"], e["error"]["line"]) for e in errors] == [("bad", 3), ("other", 5)]


def test_auto_leaves_a_file_that_shares_nothing_as_it_is(
    redis_url: str, store: BatchStore, tmp_path: Path
) -> None:
    lines = [chat_line(f"r{n}", f"{n} " * 100) for n in range(700)]
    source, out = write_lines(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    status, told = served(redis_url, store, source, out, "--order", "auto", "--window", "500")
    assert status == 0, told
    assert "order: input" in told
    assert custom_ids(out) == [f"r{n}" for n in range(700)]


def test_another_order_is_another_run(redis_url: str, store: BatchStore, tmp_path: Path) -> None:
    source, out = by_question(tmp_path / "in.jsonl"), tmp_path / "out.jsonl"
    assert served(redis_url, store, source, out, "--order", "prefix")[0] == 0
    again = run_producer("run", source, out, redis_url=redis_url)
    assert again.returncode == 2
    assert "differ from those of the run that is complete" in again.stderr


def test_a_result_file_is_sorted_by_the_lines_of_its_input(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    lines = [
        b'{"custom_id":"c","error":null,"warmq":{"line":12}}\n',
        b'{"custom_id":"a","error":{"line":3,"code":"x"}}\n',
        b'{"custom_id":"b","error":null,"warmq":{"line":7}}\n',
    ]
    path.write_bytes(b"".join(lines))
    sort_by_line(path)
    assert path.read_bytes() == lines[1] + lines[2] + lines[0]
