"""The tables that set warmq beside other ways: missed bars and what could not run are said."""

from __future__ import annotations

from typing import Any

import pytest
from bench.pages import comparison


def spread(value: float) -> dict[str, Any]:
    return {"median": value, "min": value, "max": value, "values": [value]}


WAYS: dict[str, Any] = {
    "requests": 500, "tokens_each": 64, "names": {"warmq": "warmq", "ray": "Ray Data LLM"},
    "fewer": {"ray": 50},
    "start_s": {"warmq": 12.5, "ray": 0.0}, "not_run": {"llmq": "pip says no"},
    "bars": {"warmq_to_ray": 1.0, "run_batch_files_to_warmq": 4.0},
    "files": {"lines": 1000, "tokens_each": 4, "number": 3},
    "reached": {name: spread(value) for name, value in {
        "warmq_tokens_per_s": 90, "warmq_wall_s": 7, "ray_tokens_per_s": 100, "ray_wall_s": 60,
        "warmq_to_ray": 0.9, "warmq_file_s": 3, "run_batch_file_s": 27,
        "run_batch_files_to_warmq": 9,
    }.items()},
}  # fmt: skip
QUEUES: dict[str, Any] = {
    "versions": {"arq": "arq==0.28.0"}, "not_run": {"taskiq": "not within 120 s"},
    "bars": {"warmq_occupancy_512": 0.99},
    "reached": {
        "warmq_idle_ms_p50": spread(1.5), "warmq_occupancy_512": spread(0.98),
        "arq_idle_ms_p50": spread(400),
    },
}  # fmt: skip


def test_a_way_that_is_ahead_of_warmq_is_shown_as_a_missed_bar() -> None:
    text = "\n".join(comparison.ways_table(WAYS))
    assert (
        "| Ray Data LLM | 100 (100 to 100, n=1) | 60 (60 to 60, n=1), 50 chats | in the wall "
        "| 0.9 (0.9 to 0.9, n=1), bar ≥ 1 **missed** |"
    ) in text
    assert "run-batch ÷ warmq 9 (9 to 9, n=1), bar ≥ 4." in text
    assert "Could not run: llmq: pip says no" in text


def test_queues_stand_in_columns_and_only_those_that_ran() -> None:
    lines = comparison.queues_table(QUEUES)
    assert lines[0] == "| simulated engine, mean 200 ms | warmq | arq==0.28.0 |"
    assert "| slots full, N = 512 | 0.98 (0.98 to 0.98, n=1), bar ≥ 0.99 **missed** |  |" in lines
    assert "Could not run: taskiq: not within 120 s\n" in lines


def test_the_page_takes_the_tables_between_its_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    page = f"before\n{comparison.BEGIN}\nold\n{comparison.END}\nafter\n"
    monkeypatch.setattr(comparison.report, "load", lambda _: None)
    assert comparison.put_in(page) == page
    monkeypatch.setattr(comparison.report, "load", {"alternatives": WAYS, "queues": QUEUES}.get)
    written = comparison.put_in(page)
    assert written.startswith(f"before\n{comparison.BEGIN}\n\nOne file of 500 chats")
    assert written.endswith(f"{comparison.END}\nafter\n")
    assert "old" not in written


def test_the_documents_have_the_marks() -> None:
    page = comparison.PAGE.read_text()
    assert page.index(comparison.BEGIN) < page.index(comparison.END)
