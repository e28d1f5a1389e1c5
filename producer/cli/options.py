"""Options that several commands take, and what the values of --deadline, --set and --map mean."""

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

#: How long the shell may wait for Redis while it completes a word, in seconds.
_COMPLETE_S = 0.5


def _complete_batch_id(_: click.Context, __: click.Parameter, incomplete: str) -> list[str]:
    """Return the newest batches whose ids begin so; none, without a word, where Redis is away."""
    try:
        settings = load(Settings)
        url = settings.redis_url.get_secret_value()
        store = BatchStore.open(
            url, "warmq-producer", ttl_ms=settings.result_ttl_ms, timeout_s=_COMPLETE_S
        )
        return [name for name in store.newest_ids() if name.startswith(incomplete)]
    except WarmqError:
        return []


batch_id = click.argument("batch_id", metavar="BATCH", shell_complete=_complete_batch_id)
dedupe = click.option(
    "--dedupe",
    is_flag=True,
    help="Run lines with the same body once and give all the answer, where the body alone decides "
    "it: temperature 0.",
)
as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON on stdout.")
ERRORS_BESIDE = (
    "File for failed requests. Default: beside OUT, as answers.errors.jsonl is beside "
    "answers.jsonl."
)
output = click.option("-o", "--output", metavar="OUT", help="File for results; `-` is stdout.")
errors = click.option(
    "--errors",
    metavar="ERR",
    help=f"{ERRORS_BESIDE} If the results go to stdout, failed requests do too.",
)
force = click.option(
    "--force",
    is_flag=True,
    help="Replace OUT and ERR whatever is in them, not only an earlier collection of this batch.",
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
    help="Set a body field of every line, as max_tokens=256; repeatable.",
)
mapped = click.option(
    "--map",
    "mapped",
    metavar="FIELD=COLUMN",
    multiple=True,
    help="Of a table: the column that a field gets, as prompt=text, or a template over columns, as "
    "messages.user='Summarise: {text}'; repeatable.",
)
tenant = click.option(
    "--tenant",
    metavar="T",
    default=DEFAULT_TENANT,
    show_default=True,
    help="Whose requests these are: tenants of one priority share the fleet by weight.",
)
turn = click.option(
    "--turn",
    type=click.Choice(["fair", "fifo"]),
    default="fair",
    show_default=True,
    help="fair: share with the tenant's other batches; fifo: run after those queued so before.",
)
order = click.option(
    "--order",
    type=click.Choice(["input", "prefix", "auto"]),
    default="input",
    show_default=True,
    help="input: queue the lines as they stand. prefix: lines with a common beginning together, "
    "so that the engine computes it once. auto: prefix where that saves something. Results keep "
    "FILE's order.",
)


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
                f"--map: {pair!r}: write FIELD=COLUMN, as prompt=text, or a template, as "
                "prompt='Summarise: {text}'"
            )
        if field in found:
            raise BadOption(f"--map: {pair!r}: {field} has {found[field]!r} already; give it once")
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
                check_body(url, min_body(url) | {name: value}, "")
            except RequestRejected as error:
                problem = problem or error
            else:
                return value
    raise BadOption(f"--set {problem.message if problem else name}")
