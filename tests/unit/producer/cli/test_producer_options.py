"""The options of `submit`: overrides, batch ids, what makes two submissions equal."""

from __future__ import annotations

import datetime as dt

import pytest

from producer.cli.options import parse_deadline, parse_overrides, seconds_until
from producer.input.options import BadOption
from producer.submit.submission import Submission


def submission(**changes) -> Submission:
    return Submission(**({"batch_id": "b1", "queue": "warmq", "priority": 6} | changes))


def test_a_value_is_json_where_it_parses_and_text_where_it_does_not():
    assert parse_overrides(("max_tokens=256", "stop=END", "stop_token_ids=[1, 2]", "user=7")) == {
        "max_tokens": 256,
        "stop": "END",
        "stop_token_ids": [1, 2],
        "user": "7",  # 7 parses as JSON, but a user is a text
    }


@pytest.mark.parametrize(
    ("pair", "problem"),
    [
        ("max_tokens", "write name=value"),
        ("max_tokens=0", "field max_tokens: is below 1; give a whole number"),
        ("max_tokens=many", "field max_tokens: is a text; give a whole number"),
        ("max_token=5", "did you mean max_tokens?"),
        ("temperature=NaN", "field temperature"),
        ("stream=true", "unknown to"),
        ("audio={}", "field audio: answers are text here"),
        ("=5", "unknown to"),
    ],
)
def test_a_wrong_override_is_a_usage_error_that_says_why(pair: str, problem: str):
    with pytest.raises(BadOption, match=problem.replace("?", r"\?")):
        parse_overrides((pair,))


def test_a_field_that_lines_have_for_openai_alone_can_be_taken_out_of_them_all():
    assert parse_overrides(("verbosity=null", "store=true")) == {"verbosity": None, "store": True}


@pytest.mark.parametrize("batch_id", ["", "a b", "../x", "a:index", "-x", "ä", "x" * 129, "a\n"])
def test_batch_ids_that_could_break_a_key_or_a_shell_are_refused(batch_id: str):
    with pytest.raises(BadOption, match="batch id"):
        submission(batch_id=batch_id).check()


@pytest.mark.parametrize("batch_id", ["a", "batch_1", "2026-01-01.eval", "x" * 128])
def test_ordinary_batch_ids_are_taken(batch_id: str):
    submission(batch_id=batch_id).check()


def test_control_characters_in_a_model_name_are_refused():
    with pytest.raises(BadOption, match="model"):
        submission(queue="warmq.a\x06\x163", model="a\x06\x163").check()


def test_every_option_that_shapes_a_message_changes_the_seed():
    base = submission()
    others = [
        submission(queue="warmq.x"),
        submission(priority=3),
        submission(overrides={"max_tokens": 1}),
        submission(overrides={"max_tokens": 2}),
    ]
    assert len({s.seed for s in [base, *others]}) == 5
    assert submission(batch_id="b2").seed == base.seed
    assert (
        submission(overrides={"n": 1, "seed": 2}).seed
        == submission(overrides={"seed": 2, "n": 1}).seed
    )


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


def test_a_plan_takes_the_next_such_time_of_day():
    now = dt.datetime.now().astimezone()
    in_two_hours = (now + dt.timedelta(hours=2)).replace(second=0, microsecond=0)
    left_s = seconds_until(f"{in_two_hours:%H:%M}")
    assert left_s == pytest.approx((in_two_hours - now).total_seconds(), abs=5)
    before = now - dt.timedelta(hours=1)
    assert 22 * 3600 < seconds_until(f"{before:%H:%M}") <= 23 * 3600
    assert seconds_until("2h") == 7200
    ahead = now + dt.timedelta(minutes=3)
    assert seconds_until(ahead.isoformat()) == pytest.approx(180, abs=5)


@pytest.mark.parametrize("text", ["24:00", "8:60", "08:00:00", "2020-01-01T00:00:00+00:00", "soon"])
def test_a_plan_refuses_other_times(text: str):
    with pytest.raises(BadOption, match="--deadline"):
        seconds_until(text)


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
