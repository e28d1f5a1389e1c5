"""The benchmark of people at a worker's server: rows, times until targets hold again, ratios."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from bench.gpu import beside_people, people
from bench.gpu.online_beside import OnlinePeople
from bench.gpu.people import Felt


def felt(sent: float, first_s: float) -> Felt:
    return Felt(sent, [sent + first_s], [people.TOKENS])


def test_targets_hold_again_when_one_second_of_requests_is_within_them() -> None:
    slow = [felt(100 + at / 10, 0.5) for at in range(1, 23)]
    fast = [felt(102.3 + at / 10, 0.01) for at in range(30)]
    assert people.recovered_s(fast, 100, 0.1) == 0.0
    assert people.recovered_s(slow, 100, 0.1) is None
    assert people.recovered_s(slow + fast, 100, 0.1) == pytest.approx(3.3, abs=0.11)


def test_a_request_without_a_token_felt_the_time_until_it_was_given_up() -> None:
    lost = Felt(100.0, error="not answered in time", left=120.0)
    found = people.feelings([lost, felt(100.5, 0.02)])
    assert found["failed"] == 1 and found["errors"] == ["not answered in time"]
    assert found["first_ms"]["max"] == 20_000
    assert [one["p99"] for one in people.by_second([lost], 100)] == [20_000]


def test_the_stream_shows_when_tokens_came_and_how_many() -> None:
    one = Felt(0.0)
    for total in (1, 2, 5, 5):
        event = {"choices": [{"text": ""}], "usage": {"completion_tokens": total}}
        people.People.read_line(one, b"data: " + orjson.dumps(event) + b"\n")
    people.People.read_line(one, b'data: {"choices":[],"usage":{"completion_tokens":5}}\n')
    people.People.read_line(one, b"data: [DONE]\n")
    assert one.counts == [1, 1, 3] and len(one.gaps_s) == 2
    people.People.read_line(one, b'data: {"error":{"message":"no"}}\n')
    assert "no" in one.error and not one.answered


def test_the_gateways_stream_has_the_number_of_tokens_at_its_end() -> None:
    one = Felt(0.0)
    for event in ({"choices": [{"text": "a"}]}, {"choices": [{"text": ""}]},
                  {"choices": [], "usage": {"completion_tokens": people.TOKENS}}):  # fmt: skip
        OnlinePeople.read_line(one, b"data: " + orjson.dumps(event) + b"\n")
    assert len(one.came) == 1 and one.answered


def test_metrics_are_summed_over_replicas() -> None:
    text = (
        b'vllm:num_requests_running{engine="0"} 3.0\nvllm:num_requests_running{engine="1"} 4.0\n'
        b'vllm:num_requests_waiting{engine="0"} 1.0\nvllm:num_requests_waiting_by_reason{a="b"} 9\n'
        b'vllm:generation_tokens_total{engine="0"} 1e+06\n'
    )
    assert people.read(text) == {
        "num_requests_running": 7, "num_requests_waiting": 1, "generation_tokens_total": 1e6,
    }  # fmt: skip


def test_rows_take_turns_and_those_without_people_come_last() -> None:
    rows = list(beside_people.ROWS)
    assert beside_people.order_of(rows, 0) == rows
    assert beside_people.order_of(rows, 1)[:4] == ["today", "alone", "no-policy", "people"]
    assert beside_people.order_of(rows, 1)[4:] == rows[4:]
    assert beside_people.order_of(["night"], 3) == ["night"]


def test_ratios_are_of_rows_of_one_round() -> None:
    def row(name: str, number: int, p99: float, tokens: float) -> dict[str, Any]:
        between = {"p50": 10.0, "p99": 20.0, "max": 30.0}
        first = {"p50": p99 / 2, "p99": p99, "max": p99}
        batch = {} if name == "alone" else {"requests_left": 5}
        return {
            "row": name, "round": number, "batch_tokens_per_s": tokens, "running": 9.0,
            "people": {"first_ms": first, "between_ms": between}, **batch,
        }  # fmt: skip

    found = people.reached([
        row("alone", 0, 50, 0), row("people", 0, 100, 90), row("today", 0, 1000, 100),
        row("people", 1, 100, 80), {"row": "today", "round": 1, "error": "ended"},
    ])  # fmt: skip
    assert found["people to alone: first p99 ms"]["values"] == [2.0]
    assert found["today to alone: first p99 ms"]["values"] == [20.0]
    assert found["people to today: batch tokens/s"]["values"] == [0.9]
    assert found["people: batch tokens/s"]["values"] == [90, 80]
    assert "alone: batch tokens/s" not in found
