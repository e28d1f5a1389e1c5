"""`producer plan`."""

from typing import Any

import click

from contract.errors import StoreUnavailable
from contract.naming import queue_name
from producer.cli import options, show
from producer.cli.context import Context, Exit, open_input, pass_context
from producer.cli.planned import plan_json, plan_table
from producer.cli.progress import Meter, tell
from producer.cli.values import parse_overrides
from producer.submit.plan.content import FileContent
from producer.submit.plan.plan import plan
from producer.submit.plan.tokens import Estimate, at_hand
from producer.submit.submission import Submission


@click.command("plan")
@click.argument("file", metavar="FILE")
@options.model
@options.priority
@options.pairs
@options.mapped
@click.option(
    "--tokenizer",
    metavar="DIR|NAME",
    default="",
    help="Count tokens with this model's tokenizer. Default: that of the workers' model, if its "
    "folder is on this machine.",
)
@click.option("--estimate", is_flag=True, help="Count characters, 4 a token: faster.")
@options.as_json
@pass_context
def command(
    context: Context,
    *,
    file: str,
    model: str,
    priority: int,
    pairs: tuple[str, ...],
    mapped: tuple[str, ...],
    tokenizer: str,
    estimate: bool,
    as_json: bool,
) -> Exit:
    """Say what FILE will take before it is submitted: tokens, Redis, time.

    Nothing is queued. FILE is read as submit reads it, with the same --model and
    --set; of Redis only the workers' announcements are asked for, and the time is
    from the rates that they have measured while they worked.
    Ends with 0, with 1 if lines are bad, with 2 if all are.
    """
    if tokenizer and estimate:
        raise click.UsageError("--tokenizer and --estimate are two ways to count: give one")
    settings = context.settings
    queue = queue_name(model or None, settings.queue)
    submission = Submission("plan", queue, priority, model, parse_overrides(pairs))
    submission.check()
    source = open_input(file, mapped, submission.overrides)
    workers = _workers(context, queue)
    models = [str(worker["model"]) for worker in workers if worker.get("model")]
    counter = Estimate() if estimate else at_hand(tokenizer, models)
    with Meter(file, source.size) as meter:

        def report(content: FileContent) -> None:
            if meter.due():
                meter.update(source.position, f"{content.lines} lines read")

        found = plan(settings, submission, source, counter, workers, report)
    show.put_json(plan_json(file, found)) if as_json else plan_table(file, found)
    if not found.content.requests:
        return Exit.BAD_INPUT
    return Exit.SOME_FAILED if found.content.bad else Exit.ALL_WELL


def _workers(context: Context, queue: str) -> list[dict[str, Any]]:
    """Return the announcements of the queue's workers; none, and a word, where Redis is away."""
    try:
        found = context.store.workers(queue)
    except StoreUnavailable as error:
        tell(f"without the workers: {error.message}")
        return []
    return [worker for worker in found if worker.get("state") != "draining"]
