"""Defines options of several commands, and parses --deadline, --set and --map."""

import datetime as dt
import re
from shlex import quote
from typing import Any

import click

from contract.durations import duration_s
from contract.errors import WarmqError
from contract.naming import DEFAULT_TENANT
from contract.redis.batches import BatchStore
from contract.redis.url import LONGEST_S
from contract.settings import Settings, load
from producer.cli.progress import tell
from producer.input.options import BadOption, field_value
from producer.input.structured import with_structure
from producer.submit.reuse import ANY_AGE, oldest_age_s

#: Seconds that the completion of batch ids in a shell waits for Redis.
_COMPLETION_S = 0.5


def _complete_batch_id(_: click.Context, __: click.Parameter, incomplete: str) -> list[str]:
    """Return the newest batch ids with this beginning; none if Redis does not answer."""
    try:
        settings = load(Settings)
        store = BatchStore.open(
            settings.redis_url.get_secret_value(),
            "warmq-producer",
            ttl_ms=settings.result_ttl_ms,
            timeout_s=_COMPLETION_S,
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
    "File for failed requests. Default: next to OUT, as answers.errors.jsonl for answers.jsonl; "
    "none if OUT is a table, which has all rows."
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
    "--model",
    metavar="NAME",
    default="",
    help="Served model to send the requests to. Default: the one that each line names.",
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


def _at_most_once(
    _: click.Context, parameter: click.Parameter, given: tuple[str, ...]
) -> str | None:
    """Return the value of an option that may be given once; None if it is not given."""
    if len(given) > 1:
        name = parameter.opts[0]
        remedy = "; give it once"
        if name == "--choice" and not any(one.startswith("[") for one in given):
            texts = dict.fromkeys(text.strip() for one in given for text in one.split(","))
            remedy = f": give it once, with all texts, {name} {','.join(texts)[:200]}"
        raise BadOption(f"{name} is given {len(given)} times{remedy}")
    return given[0] if given else None


choice = click.option(
    "--choice",
    metavar="A,B",
    multiple=True,
    callback=_at_most_once,
    help="Allow only these texts as answers, for example good,bad (or a JSON list of texts); sets "
    "structured_outputs of every line.",
)
schema = click.option(
    "--schema",
    metavar="FILE",
    multiple=True,
    callback=_at_most_once,
    help="Make every answer a JSON text of this JSON schema; sets structured_outputs of every "
    "line.",
)
mapped = click.option(
    "--map",
    "mapped",
    metavar="FIELD=COLUMN",
    multiple=True,
    help="For a table: map a field to a column (prompt=text), to a template over columns "
    "(messages.user='Summarise: {text}') or to a constant (messages.system='Be brief.'); "
    "repeatable.",
)
keep = click.option(
    "--keep",
    metavar="COLUMNS",
    multiple=True,
    help="For a table: columns to copy into the results with their types (id,label), or all; "
    "repeatable.",
)
delimiter = click.option(
    "--delimiter",
    metavar="C",
    default="",
    help="For CSV: the character between cells, such as ; or |, or tab. Default: a comma.",
)
tenant = click.option(
    "--tenant",
    metavar="T",
    default=DEFAULT_TENANT,
    show_default=True,
    help="Tenant of the requests: tenants of one priority share the workers by weight.",
)


class TakesReuse(click.Command):
    """A command with `--reuse`, whose value is optional and follows `=` only."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        end = args.index("--") if "--" in args else len(args)
        given = [f"--reuse={ANY_AGE}" if arg == "--reuse" else arg for arg in args[:end]]
        return super().parse_args(ctx, given + args[end:])


def _oldest_age_s(_: click.Context, __: click.Parameter, text: str | None) -> float | None:
    return oldest_age_s(text, "--reuse")


reuse = click.option(
    "--reuse",
    "reuse_s",
    metavar="[=D]",
    callback=_oldest_age_s,
    help="Answer lines from known answers to the same body by the same model; =7d: only if they "
    "are not older.",
)
stop_after = click.option(
    "--stop-after-failures",
    "stop_after",
    metavar="N|P%",
    help="Cancel the batch when N requests have failed, for example 100; or a share, for example "
    "5%, checked once 100 requests have ended.",
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
    help="input: queue the lines in FILE's order. prefix: group lines by model, then by common "
    "beginning, so that the engine loads each model and computes each beginning once. auto: prefix "
    "if that saves tokens. Results keep FILE's order.",
)

#: Former name of a field -> how an error names the option that replaces --set of this field.
_OPTION_FOR = {"guided_choice": ", or --choice {}", "guided_json": ", or --schema FILE"}


def _seconds(_: click.Context, __: click.Parameter, text: str) -> float:
    """Return the seconds of --wait-redis."""
    seconds = 0.0 if text == "0" else duration_s(text)
    if seconds is None or seconds > LONGEST_S:
        raise BadOption(f"--wait-redis {text[:80]}: write a duration such as 90s, 10m or 2h, or 0")
    return seconds


wait_redis = click.option(
    "--wait-redis",
    metavar="D",
    default="10m",
    show_default=True,
    callback=_seconds,
    help="How long to wait for Redis if it goes away, restarts or fails over, for example 90s, "
    "10m, 2h; then the exit status is 3.",
)
_EXAMPLES = "90s, 2h, 1d12h, or a time with its zone such as 2026-11-21T08:00:00+01:00"


def parse_deadline(text: str | None) -> str:
    """Return a deadline in ms for the script CREATE: `+7200000` for a duration, else since 1970.

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
        raise BadOption(f"--deadline {text}: lies before 1970; give a later time")
    return str(ms)


def seconds_until(text: str) -> float:
    """Return the seconds from now until a deadline, which may be a time of day such as 08:00.

    A time of day is the next such time in this machine's time zone.
    """
    now = dt.datetime.now().astimezone()
    if re.fullmatch(r"\d{1,2}:\d\d", text):
        hour, _, minute = text.partition(":")
        try:
            at = now.replace(hour=int(hour), minute=int(minute), second=0, microsecond=0)
        except ValueError:
            raise BadOption(f"--deadline {text}: write a time from 00:00 to 23:59") from None
        return (at - now).total_seconds() + (86_400 if at <= now else 0)
    deadline = parse_deadline(text)
    if deadline.startswith("+"):
        return int(deadline) / 1000
    if (left_s := int(deadline) / 1000 - now.timestamp()) <= 0:
        raise BadOption(f"--deadline {text}: has passed; give a later time")
    return left_s


def fields_of_all_lines(
    pairs: tuple[str, ...], choice: str | None, schema: str | None, model: str
) -> dict[str, Any]:
    """Return the body fields that --set, --choice and --schema give to every line.

    Prints a notice if `model` is among them and differs from --model, because only --model chooses
    where the requests go.
    """
    fields = with_structure(parse_overrides(pairs), choice, schema, "--")
    if fields.get("model") not in (None, model):
        tell("model in --set does not choose a worker; use --model")
    return fields


def parse_overrides(pairs: tuple[str, ...]) -> dict[str, Any]:
    """Return the body fields of `--set name=value`; a value is JSON if valid, otherwise text."""
    overrides: dict[str, Any] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals:
            raise BadOption(f"--set {pair}: write name=value, for example max_tokens=256")
        if name in overrides:
            raise BadOption(f"--set {pair}: {name} is set already; give it once")
        try:
            overrides[name] = field_value(name, text)
        except BadOption as error:
            option = _OPTION_FOR.get(name, "").format(quote(text) if len(text) < 100 else "A,B")
            error.message = f"--set {error.message}{option}"
            raise
    return overrides


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
