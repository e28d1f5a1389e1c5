"""`producer run`: windows, a journal, an output that only grows; its order with `--order`."""

from __future__ import annotations

import gzip
import json
import signal
from pathlib import Path

import pytest
import redis
from kit.commands.runs import custom_ids, done_windows, journal_of, running, served, windows
from kit.commands.support import batch_file, chat_line, finish, run_all, run_producer, write_lines
from kit.protocol.lessee import Lessee, client_of

from contract.redis.batches import BatchStore
from demo.stack import eventually
from producer.run.append_file import sort_by_line

pytestmark = pytest.mark.timeout(120)


def test_a_file_comes_out_in_order_and_redis_holds_two_windows_of_it(
    redis_url: str, store: BatchStore, tmp_path: Path
) -> None:
    # Given 2,600 lines with a bad one, and one that repeats a custom_id of another window
    lines = [chat_line(f"r{n}", f"question {n}") for n in range(2600)]
    lines[1200] = chat_line("bad", max_tokens=-1)
    lines[2000] = chat_line("r3")
    source, out = write_lines(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    # When they run in windows of 1,000
    most = 0
    with running(redis_url, source, out, "--window", "1000") as process:

        def served() -> bool:
            nonlocal most
            most = max(most, len(windows(store)))
            run_all(store)
            return process.poll() is not None

        eventually(served, 60)
    # Then there were never more than two batches, and none is left
    assert most <= 2
    assert windows(store) == []
    # And every line has its result, in the file's order
    assert process.returncode == 1
    good = [f"r{n}" for n in range(2600) if n not in (1200, 2000)]
    assert custom_ids(out) == good
    errors = [json.loads(line) for line in (tmp_path / "out.errors.jsonl").read_text().splitlines()]
    assert [(e["custom_id"], e["error"]["line"]) for e in errors] == [("bad", 1201), ("r3", 2001)]
    assert "used before" in errors[1]["error"]["message"]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "in.jsonl", "out.errors.jsonl", "out.jsonl", "out.jsonl.progress",
    ]  # fmt: skip


def test_a_killed_run_goes_on_where_its_output_ends_and_computes_nothing_twice(
    redis_url: str, store: BatchStore, tmp_path: Path
) -> None:
    source, out = batch_file(tmp_path / "in.jsonl", 2200), tmp_path / "out.jsonl"
    journal = tmp_path / "out.jsonl.progress"
    lessee, answered = Lessee(client_of(store)), 0
    # Given a run that is killed after its first window, while it waits for the next one
    with running(redis_url, source, out, "--window", "500") as process:
        eventually(lambda: len(windows(store)) == 2, 20)
        answered += finish(lessee, lessee.pop(700))
        eventually(lambda: done_windows(out) == 1, 20)
        process.send_signal(signal.SIGKILL)
    # And a half-written line of it
    with out.open("a") as file:
        file.write('{"id":"batch_req_12')
    # When the same command runs again
    with running(redis_url, source, out, "--window", "500") as process:

        def served() -> bool:
            nonlocal answered
            answered += run_all(store)
            return process.poll() is not None

        eventually(served, 60)
        assert process.stderr is not None
        assert process.returncode == 0, process.stderr.read()
    # Then the output is whole, and nothing was computed twice
    assert custom_ids(out) == [f"r{n}" for n in range(2200)]
    assert answered == 2200
    assert windows(store) == []
    assert json.loads(journal.read_text())["complete"]


@pytest.mark.parametrize("window", ["500", "1000"])
def test_a_complete_run_that_is_repeated_says_so_and_queues_nothing(
    redis_url: str, store: BatchStore, tmp_path: Path, window: str
) -> None:
    source, out = batch_file(tmp_path / "in.jsonl", 700), tmp_path / "out.jsonl"
    status, told = served(redis_url, store, source, out, "--window", "500")
    assert status == 0, told
    results = out.read_bytes()
    again = run_producer("run", source, out, "--window", window, redis_url=redis_url)
    assert (again.returncode, again.stderr) == (
        0, f"{out}: was complete already, 700 results, 0 failed\n"
    )  # fmt: skip
    assert out.read_bytes() == results
    assert windows(store) == []
    # Other options and another input are refused; once the output is taken away, the name is free
    warmer = run_producer("run", source, out, "--set", "temperature=0.5", redis_url=redis_url)
    assert warmer.returncode == 2
    assert "differ from those of the run that is complete (700 lines); use" in warmer.stderr
    assert (out.read_bytes(), windows(store)) == (results, [])
    other = batch_file(tmp_path / "other.jsonl", 3)
    changed = run_producer("run", other, out, redis_url=redis_url)
    assert (changed.returncode, "a run of another input" in changed.stderr) == (2, True)
    out.unlink()
    status, told = served(redis_url, store, other, out)
    assert (status, custom_ids(out)) == (0, ["r0", "r1", "r2"]), told


@pytest.mark.parametrize(("first", "second"), [("500", "2000"), ("1000", "500")])
def test_a_stopped_run_goes_on_with_another_window(
    redis_url: str, store: BatchStore, tmp_path: Path, first: str, second: str
) -> None:
    source, out = batch_file(tmp_path / "in.jsonl", 3200), tmp_path / "out.jsonl"
    with running(redis_url, source, out, "--window", first) as process:
        eventually(lambda: len(windows(store)) == 2, 20)
        process.send_signal(signal.SIGKILL)
    status, told = served(redis_url, store, source, out, "--window", second)
    assert (status, custom_ids(out)) == (0, [f"r{n}" for n in range(3200)]), told
    assert windows(store) == []


def test_files_that_a_run_cannot_write_are_told_before_it_makes_any(
    redis_url: str, store: BatchStore, tmp_path: Path
) -> None:
    source = batch_file(tmp_path / "in.jsonl", 3)
    for out, *errors in (["no/out"], ["."], ["out", "--errors", "no/bad"]):
        places = [tmp_path / out, *(word if "-" in word else tmp_path / word for word in errors)]
        done = run_producer("run", source, *places, redis_url=redis_url)
        assert (done.returncode, "folder" in done.stderr) == (2, True), done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]
    assert windows(store) == []


def test_a_run_of_a_cut_file_says_that_it_must_begin_again(
    redis_url: str, store: BatchStore, tmp_path: Path
) -> None:
    whole = gzip.compress(batch_file(tmp_path / "in.jsonl", 700).read_bytes())
    cut, out = tmp_path / "in.jsonl.gz", tmp_path / "out.jsonl"
    cut.write_bytes(whole[:-9])
    done = run_producer("run", cut, out, redis_url=redis_url)
    assert done.returncode == 2
    assert "the file is cut off, its compressed data ends too early" in done.stderr
    assert f"fix this one, and remove {out}" in done.stderr


def test_a_run_says_which_fields_it_has_left_out(
    redis_url: str, store: BatchStore, tmp_path: Path
) -> None:
    lines = [chat_line(f"r{n}", store=True) for n in range(1100)]
    source, out = write_lines(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    status, told = served(redis_url, store, source, out, "--window", "500")
    assert status == 0, told
    assert told.count("store (on 1100 lines)") == 1


def test_what_a_run_cannot_go_on_with_is_refused(
    redis_url: str, store: BatchStore, redis_client: redis.Redis, tmp_path: Path
) -> None:
    source, out = batch_file(tmp_path / "in.jsonl", 1200), tmp_path / "out.jsonl"
    with running(redis_url, source, out, "--window", "500") as process:
        eventually(lambda: len(windows(store)) == 2, 20)
        # While one writes the output, no other may
        second = run_producer("run", source, out, redis_url=redis_url)
        assert (second.returncode, "another run is writing" in second.stderr) == (2, True)
        lessee = Lessee(client_of(store))
        finish(lessee, lessee.pop(600))
        eventually(lambda: done_windows(out) == 1, 20)
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 130
        assert process.stderr is not None
        assert "the same command goes on" in process.stderr.read()
    # Another input does not go on with this output
    other = batch_file(tmp_path / "other.jsonl", 1200, prefix="x")
    changed = run_producer("run", other, out, redis_url=redis_url)
    assert changed.returncode == 2
    assert "another input" in changed.stderr
    assert "give the same one, or remove" in changed.stderr
    # An output that no run has left is not overwritten
    (tmp_path / "mine.jsonl").write_text("{}\n")
    mine = run_producer("run", source, tmp_path / "mine.jsonl", redis_url=redis_url)
    assert (mine.returncode, "exists; remove it" in mine.stderr) == (2, True)
    assert (tmp_path / "mine.jsonl").read_text() == "{}\n"
    # Nor can a pipe be gone on with
    assert run_producer("run", source, "-", redis_url=redis_url).returncode == 2


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
    assert windows(store) == []


def test_a_killed_run_goes_on_by_the_same_order(
    redis_url: str, store: BatchStore, tmp_path: Path
) -> None:
    source, out = by_question(tmp_path / "in.jsonl"), tmp_path / "out.jsonl"
    words = (source, out, "--window", "500", "--order", "prefix")
    with running(redis_url, *words) as process:
        eventually(lambda: sum(batch.sealed for batch in windows(store)) == 2, 20)
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
