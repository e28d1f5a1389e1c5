"""What `--deadline` takes."""

from __future__ import annotations

import pytest

from producer.cli.values import parse_deadline
from producer.input.options import BadOption
from producer.submit.submission import Submission


@pytest.mark.parametrize(
    ("text", "ms"),
    [
        ("90s", "+90000"), ("2h", "+7200000"), ("3d", "+259200000"), ("1d12h", "+129600000"),
        ("0.5s", "+500"), ("1970-01-01T00:00:02Z", "2000"),
        ("2026-11-21T08:00:00+01:00", "1795244400000"),
        ("9999-12-31T23:59:59-12:00", "253402343999000"),
    ],
)  # fmt: skip
def test_durations_and_moments_are_read(text: str, ms: str):
    assert parse_deadline(text) == ms


def test_no_deadline_is_none():
    assert parse_deadline(None) == ""


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("soon", "write 90s, 2h"), ("", "write 90s, 2h"), ("5", "write 90s, 2h"),
        ("-5s", "write 90s, 2h"), ("2h ", "write 90s, 2h"), ("0s", "up to ten years"),
        ("9999999d", "up to ten years"), ("1" * 400 + "d", "up to ten years"),
        ("2026-11-21T08:00:00", "time zone is missing"), ("1969-01-01T00:00:00Z", "before 1970"),
        ("٣h", "write 90s, 2h"), ("x" * 5000, "write 90s, 2h"),
    ],
)  # fmt: skip
def test_anything_else_is_refused_with_examples(text: str, told: str):
    with pytest.raises(BadOption, match=told):
        parse_deadline(text)


def test_without_a_deadline_the_digest_is_what_it_was_before_there_were_deadlines():
    options = Submission("b", "warmq", 6).options
    assert options == '{"priority":6,"queue":"warmq","set":{}}'
