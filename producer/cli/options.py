"""Options that several commands take."""

import click

batch_id = click.argument("batch_id", metavar="BATCH")
as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON on stdout.")
output = click.option("-o", "--output", metavar="OUT", help="File for results; `-` is stdout.")
errors = click.option(
    "--errors",
    metavar="ERR",
    help="File for failed requests. Default: where the results go if that is stdout, else a file "
    "beside OUT (OUT.errors.jsonl).",
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
