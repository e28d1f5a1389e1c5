"""Reads the values of `--deadline`, `--set` and `--map`."""

import datetime as dt
import re
from typing import Any

import orjson

from contract.errors import RequestRejected
from contract.nearest import did_you_mean
from contract.openai.body import BODY_TYPES, smallest
from contract.openai.lines import check_body
from contract.openai.openai_only import known_names
from contract.redis.url import LONGEST_S
from producer.input.options import BadOption

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_DURATION = re.compile(r"(?:[0-9]+(?:\.[0-9]+)?[smhd])+")
_PART = re.compile(r"([0-9]+(?:\.[0-9]+)?)([smhd])")
_EXAMPLES = "90s, 2h, 1d12h, or a time with its zone such as 2026-11-21T08:00:00+01:00"


def parse_deadline(text: str | None) -> str:
    """Return a deadline as CREATE takes it, in ms: `+7200000` after the creation, or a moment.

    A duration counts from the batch's creation on Redis' clock, so a resumed
    submit keeps the deadline, and this machine's clock does not matter.

    Raises:
        BadOption: for anything that is neither a duration nor a time with a zone.
    """
    if text is None:
        return ""
    if _DURATION.fullmatch(text):
        seconds = sum(float(number) * _UNITS[unit] for number, unit in _PART.findall(text))
        if not 0 < seconds <= LONGEST_S:
            raise BadOption(f"--deadline {text}: give a duration of up to ten years")
        return f"+{round(seconds * 1000)}"
    try:
        moment = dt.datetime.fromisoformat(text)
    except ValueError:
        raise BadOption(f"--deadline {text[:80]}: write {_EXAMPLES}") from None
    if moment.tzinfo is None:
        raise BadOption(f"--deadline {text}: the time zone is missing; write {_EXAMPLES}")
    ms = round(moment.timestamp() * 1000)
    if ms <= 0:
        raise BadOption(f"--deadline {text}: lies before 1970")
    return str(ms)


def parse_overrides(pairs: tuple[str, ...]) -> dict[str, Any]:
    """Return the body fields of `--set name=value` options.

    A value is JSON where it parses and fits, else the text as it stands.

    Raises:
        BadOption: for a name or value that no request body can have.
    """
    overrides: dict[str, Any] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals:
            raise BadOption(f"--set {pair}: write name=value, for example max_tokens=256")
        if name in overrides:
            raise BadOption(f"--set {pair}: {name} is set already; give it once")
        overrides[name] = _override(name, text)
    return overrides


def parse_map(pairs: tuple[str, ...]) -> dict[str, str]:
    """Return the columns or templates of `--map field=column` options, by field.

    Raises:
        BadOption: one is not of that form, or a field is there twice.
    """
    found: dict[str, str] = {}
    for pair in pairs:
        field, equals, given = pair.partition("=")
        if not (field and equals and given):
            raise BadOption(
                f"{pair!r}: write FIELD=COLUMN, as prompt=text, or a template, as "
                "prompt='Summarise: {text}'"
            )
        if field in found:
            raise BadOption(f"{pair!r}: {field} has {found[field]!r} already; give it once")
        found[field] = given
    return found


def _override(name: str, text: str) -> Any:
    urls = [url for url in BODY_TYPES if name in known_names(url)]
    if not urls:
        known = sorted(set().union(*(known_names(url) for url in BODY_TYPES)))
        hint = did_you_mean(name, known)
        raise BadOption(f"--set {name}: unknown to any of {', '.join(BODY_TYPES)}{hint}")
    try:
        values = [orjson.loads(text), text]
    except orjson.JSONDecodeError:
        values = [text]
    problem: RequestRejected | None = None
    for value in values:
        for url in urls:
            try:
                check_body(url, smallest(url) | {name: value}, "")
            except RequestRejected as error:
                problem = problem or error
            else:
                return value
    raise BadOption(f"--set {problem.message if problem else name}")
