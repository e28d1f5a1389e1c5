"""`producer plan`."""

from typing import Any

import click

from contract.errors import StoreUnavailable
from contract.naming import queue_name
from producer.cli import options, show
from producer.cli.context import Context, Exit, open_input, pass_context
from producer.cli.options import parse_overrides
from producer.cli.progress import Meter, counted, tell
from producer.cli.show import size_text
from producer.queue_workers import clock_text
from producer.submit.plan import FileContent, Plan, plan
from producer.submit.prompt_tokens import CharacterCounter, choose_counter
from producer.submit.submission import Submission
from producer.time_left import Pace, pace_of_queue


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
@click.option("--estimate", is_flag=True, help="Count 4 characters as a token: faster.")
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
    """Estimate the tokens, Redis memory and time that FILE takes. Queues nothing.

    FILE is read in the same way as by `producer submit`; give the same --model and
    --set. The time is computed from the rate of the queue's workers in the last
    minutes in which they had work.
    Exit status: 0; 1 if some lines are bad; 2 if all are.
    """
    if tokenizer and estimate:
        raise click.UsageError("--tokenizer and --estimate exclude each other: give one")
    settings = context.settings
    queue = queue_name(model or None, settings.queue)
    submission = Submission("plan", queue, priority, model, parse_overrides(pairs))
    submission.check()
    source = open_input(file, mapped, submission.overrides)
    workers, pace = _workers(context, queue)
    models = [str(worker["model"]) for worker in workers if worker.get("model")]
    counter = CharacterCounter() if estimate else choose_counter(tokenizer, models)
    with Meter(file, source.size) as meter:

        def report(content: FileContent) -> None:
            if meter.due():
                meter.update(source.position, f"{content.lines} lines read")

        found = plan(settings, submission, source, counter, workers, pace, report)
    show.put_json(plan_json(file, found)) if as_json else plan_table(file, found)
    if not found.content.requests:
        return Exit.BAD_INPUT
    return Exit.SOME_FAILED if found.content.bad else Exit.ALL_WELL


def _workers(context: Context, queue: str) -> tuple[list[dict[str, Any]], Pace | None]:
    """Return the announcements (states) and pace of the queue's workers; none without Redis."""
    try:
        found = [w for w in context.store.workers(queue) if w.get("state") != "draining"]
        return found, pace_of_queue(context.store, queue, found)
    except StoreUnavailable as error:
        tell(f"without the workers: {error.message}")
        return [], None


def plan_json(file: str, found: Plan) -> dict[str, Any]:
    """Return the JSON object of a plan."""
    content, shared, seconds = found.content, found.content.shared, found.seconds
    return {
        "object": "warmq.plan",
        "input_file": file,
        "queue": found.queue,
        "lines_read": content.lines,
        "request_counts": {
            "total": content.requests + content.bad,
            "valid": content.requests,
            "bad": content.bad,
            "duplicates": content.duplicates,
        },
        "first_errors": content.first_bad,
        "prompt_tokens": {
            "total": content.prompt_tokens,
            "tokenizer": found.tokenizer or None,
            "estimated_requests": content.estimated,
        },
        "completion_tokens": {
            "limit": content.limits,
            "without_limit": content.without_limit,
            "expected": round(content.expected),
            "mean_answer": found.mean_answer,
        },
        "shared_prefixes": {
            "share": round(shared.share, 4),
            "distinct_share": round(shared.distinct / shared.whole, 4) if shared.whole else 0.0,
            "saved_tokens": found.saved_tokens,
            "saved_as_is": _saved_as_is(found),
            "kv_tokens": found.kv_tokens,
            "any_order": found.any_order,
        },
        "redis_bytes": {
            "waiting": found.memory.waiting,
            "finished": found.memory.finished,
            "most": found.memory.most,
        },
        "workers": found.workers,
        "duration": None if found.pace is None or seconds is None else {
            "seconds": round(seconds, 1), "tokens_per_s": round(found.pace.tokens_per_s, 1),
        },
    }  # fmt: skip


def plan_table(file: str, found: Plan) -> None:
    """Print a plan as text."""
    content = found.content
    show.put_rows({
        "file": file,
        "queue": found.queue,
        "requests": _requests(content),
        "tokens in": _tokens_in(found),
        "tokens out": _tokens_out(found),
        "shared": _shared(found),
        "redis": f"{size_text(found.memory.most)} at most: {size_text(found.memory.waiting)} while "
        f"all wait, {size_text(found.memory.finished)} with all results",
        "time": _time(found),
    })  # fmt: skip
    for error in content.first_bad:
        click.echo(show.printable(f"bad: {error}"))
    if content.bad > len(content.first_bad):
        click.echo(f"bad: {content.bad - len(content.first_bad):,} more")


def _requests(content: FileContent) -> str:
    text = f"{content.requests:,}"
    if content.duplicates:
        text += f", {content.duplicates:,} of them identical to an earlier one"
    return f"{text}; {counted(content.bad, 'bad line')}" if content.bad else text


def _tokens_in(found: Plan) -> str:
    content = found.content
    text = f"{content.prompt_tokens:,}"
    if not found.tokenizer:
        return f"about {text}: estimated, 4 characters a token; --tokenizer DIR counts them"
    text += f", counted with the tokenizer of {found.tokenizer}"
    if content.estimated:
        text += f"; those of {content.estimated:,} requests are estimated"
    return text


def _tokens_out(found: Plan) -> str:
    content = found.content
    if content.fixed == content.requests:
        return f"{content.limits:,}, as the lines ask for"
    parts = [f"at most {content.limits:,}"] if content.limits else []
    if content.without_limit:
        parts.append(f"{counted(content.without_limit, 'line')} without limit")
    text = " and ".join(parts)
    if found.mean_answer is None:
        reason = "no running worker has reported it"
        return f"{text or 'none'}; the length of answers is not known: {reason}"
    return (
        f"{text}; {content.expected:,.0f} expected, as the workers' answers have "
        f"{found.mean_answer:g} on average"
    )


def _shared(found: Plan) -> str:
    share = found.content.shared.share
    if share < 0.005:
        return "no prompts have a common beginning"
    text = f"{share:.0%} of the prompts repeat the beginning of an earlier one"
    if found.kv_tokens is None:
        return f"{text}; no worker with a prefix cache is known"
    text += f": {found.saved_tokens:,} tokens need not be computed"
    if found.any_order:
        return f"{text}, in any order"
    return (
        f"{text} with --order prefix, {_saved_as_is(found):,} in the file's order; the KV cache "
        f"has {found.kv_tokens:,} tokens"
    )


def _saved_as_is(found: Plan) -> int:
    """Return the prompt tokens that the prefix cache saves in the file's own order."""
    shared = found.content.shared
    return round(found.saved_tokens * shared.as_is / shared.repeated) if shared.repeated else 0


def _time(found: Plan) -> str:
    if not found.workers:
        return f"not known: no worker of queue {found.queue} is known"
    workers = counted(found.workers, "worker")
    if found.pace is None or found.seconds is None:
        reason = "none has recorded work in the last day (it is recorded after 10 s)"
        return f"not known: {workers}, but {reason}"
    rate = f"{found.pace.tokens_per_s:,.0f} tokens/s, read and written"
    return f"{clock_text(found.seconds)} on {workers}, at the {rate}, of their last minutes of work"
