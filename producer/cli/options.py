"""Defines options of several commands, and parses --deadline, --set and --map."""

import datetime as dt
from typing import Any

import click
import orjson

from contract.durations import duration_s
from contract.errors import RequestRejected, WarmqError
from contract.naming import DEFAULT_TENANT, did_you_mean
from contract.openai.body import BODY_TYPES, min_body
from contract.openai.fields import known_names
from contract.openai.lines import check_body
from contract.redis.batches import BatchStore
from contract.redis.url import LONGEST_S
from contract.settings import Settings, load
from producer.input.options import BadOption

#: Seconds that a shell's completion waits for Redis.
_COMPLETE_S = 0.5


def _complete_batch_id(_: click.Context, __: click.Parameter, incomplete: str) -> list[str]:
    """Return the newest batch ids with this beginning; none if Redis does not answer."""
    try:
        settings = load(Settings)
        store = BatchStore.open(
            settings.redis_url.get_secret_value(),
            "warmq-producer",
            ttl_ms=settings.result_ttl_ms,
            timeout_s=_COMPLETE_S,
        )
        return [name for name in store.newest_ids() if name.startswith(incomplete)]
    except WarmqError:
        return []


batch_id = click.argument("batch_id", metavar="BATCH", shell_complete=_complete_batch_id)
dedupe = click.option(
    "--dedupe",
    is_flag=True,
    help="Run lines with the same body once and give all of them the answer, if the answer "
    "depends on nothing but the body (temperature 0).",
)
#: The name of --dedupe in 0.2.0.
once = click.option("--once", is_flag=True, hidden=True)
as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON on stdout.")
ERRORS_HELP = (
    "File for failed requests. Default: next to OUT, as answers.errors.jsonl for answers.jsonl."
)
output = click.option("-o", "--output", metavar="OUT", help="File for results; `-` is stdout.")
errors = click.option(
    "--errors",
    metavar="ERR",
    help=f"{ERRORS_HELP} If the results go to stdout, failed requests do too.",
)
force = click.option(
    "--force",
    is_flag=True,
    help="Replace OUT and ERR even if they are not an earlier collection of this batch.",
)
model = click.option(
    "--model", metavar="NAME", default="", help="Served model to send the requests to."
)
priority = click.option(
    "--priority",
    type=click.IntRange(0, 9),
    default=6,
    show_default=True,
    help="0 is the most urgent; steps are 0, 3, 6, 9.",
)
pairs = click.option(
    "--set",
    "pairs",
    metavar="NAME=VALUE",
    multiple=True,
    help="Set a body field of every line, for example max_tokens=256; repeatable.",
)
mapped = click.option(
    "--map",
    "mapped",
    metavar="FIELD=COLUMN",
    multiple=True,
    help="For a table: map a field to a column (prompt=text) or to a template over columns "
    "(messages.user='Summarise: {text}'); repeatable.",
)
tenant = click.option(
    "--tenant",
    metavar="T",
    default=DEFAULT_TENANT,
    show_default=True,
    help="Tenant of the requests: tenants of one priority share the workers by weight.",
)
turn = click.option(
    "--turn",
    type=click.Choice(["fair", "fifo"]),
    default="fair",
    show_default=True,
    help="fair: share with the tenant's other batches; fifo: run after its earlier fifo batches.",
)
order = click.option(
    "--order",
    type=click.Choice(["input", "prefix", "auto"]),
    default="input",
    show_default=True,
    help="input: queue the lines in FILE's order. prefix: group lines with a common beginning, so "
    "that the engine computes it once. auto: prefix where that saves something. Results keep "
    "FILE's order.",
)

_EXAMPLES = "90s, 2h, 1d12h, or a time with its zone such as 2026-11-21T08:00:00+01:00"


def parse_deadline(text: str | None) -> str:
    """Return a deadline in ms for the script CREATE: `+7200000` for a duration, else a moment.

    A duration counts from the batch's creation on Redis's clock, so a resumed submit keeps it.
    """
    if text is None:
        return ""
    if (seconds := duration_s(text)) is not None:
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
    """Return the body fields of `--set name=value`; a value is JSON if valid, otherwise text."""
    overrides: dict[str, Any] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals:
            raise BadOption(f"--set {pair}: write name=value, for example max_tokens=256")
        if name in overrides:
            raise BadOption(f"--set {pair}: {name} is set already; give it once")
        overrides[name] = _override(name, text)
    return overrides


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
    reason = ""
    for value in values:
        for url in urls:
            try:
                check_body(url, min_body(url) | {name: value}, "")
            except RequestRejected as error:
                reason = reason or error.message
            else:
                return value
    raise BadOption(f"--set {reason}")


def parse_map(pairs: tuple[str, ...]) -> dict[str, str]:
    """Return the columns or templates of `--map field=column`, by field."""
    columns: dict[str, str] = {}
    for pair in pairs:
        field, equals, column = pair.partition("=")
        if not (field and equals and column):
            raise BadOption(
                f"--map: {pair!r}: write FIELD=COLUMN, for example prompt=text, or a template, for "
                "example prompt='Summarise: {text}'"
            )
        if field in columns:
            raise BadOption(
                f"--map: {pair!r}: {field} has {columns[field]!r} already; give it once"
            )
        columns[field] = column
    return columns
