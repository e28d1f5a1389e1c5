"""A real engine starts online requests before the batch's, and what it preempts ends the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from kit.engines.priorities import Line, run_in_process
from kit.stacks.real_stack import asked, listed_questions

from contract.openai.body import CHAT_URL, COMPLETION_URL

pytestmark = pytest.mark.timeout(300)
#: Twice as many as there are slots, some of which are sampled.
BATCH = 16


def lines() -> tuple[dict[str, Line], dict[str, Line]]:
    """Return the lines of a batch, and online requests of all ways into the engine."""
    questions = listed_questions(BATCH + 4, seed=37)
    long = {"max_tokens": 160, "ignore_eos": True}
    batch: dict[str, Line] = {}
    for n, question in enumerate(questions[:BATCH]):
        sampled: dict[str, Any] = {"temperature": 0.8, "seed": n} if n % 4 == 3 else {}
        chat = bool(n % 2)
        batch[f"b{n}"] = (
            CHAT_URL if chat else COMPLETION_URL,
            asked(question, chat, **(long | sampled)),
        )
    short = {"max_tokens": 40, "ignore_eos": True}
    first, second, third, fourth = questions[BATCH:]
    online = {
        # Of the form of a batch's lines, which the fast path has learned.
        "fast": (CHAT_URL, asked(first, True, **long)),
        "logprobs": (COMPLETION_URL, asked(second, False, logprobs=1, **short)),
        "two choices": (CHAT_URL, asked(third, True, n=2, temperature=0.8, seed=5, **short)),
        "stop text": (CHAT_URL, asked(fourth, True, stop=["no text has this"], **short)),
    }
    return batch, online


def test_online_requests_pass_and_a_preempted_request_has_the_answer_that_it_has_alone(
    tmp_path: Path,
) -> None:
    batch, online = lines()
    report = run_in_process(tmp_path, batch, online)
    assert report["preempted_alone"] == 0
    assert report["preempted"] > 0
    assert report["fast_forms"] > 0
    assert report["together"] == report["alone"]
    ended = report["ended"]
    before = {name: len(batch.keys() & set(ended[: ended.index(name)])) for name in online}
    # In the order of arrival each starts when eight of the batch's sixteen are left.
    assert max(before.values()) < 8, ended
