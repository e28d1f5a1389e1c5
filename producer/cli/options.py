"""Options that several commands take."""

import click

from contract.errors import WarmqError
from contract.naming import DEFAULT_TENANT
from contract.redis.batches import BatchStore
from contract.settings import Settings, load

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
once = click.option(
    "--once",
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
