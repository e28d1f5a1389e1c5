"""Implements `producer plan`, which estimates a file's tokens, Redis memory and time."""

from collections.abc import Collection
from contextlib import suppress
from typing import Any

import click

from contract.errors import StoreUnavailable
from contract.naming import queue_name
from contract.redis.announced_models import models_of
from contract.redis.announcements import is_alive
from contract.redis.waiting import WaitingReads
from producer.cli import options, show
from producer.cli.context import Context, Exit, open_input, pass_context
from producer.cli.options import fields_of_all_lines, seconds_until
from producer.cli.progress import Meter, counted, tell
from producer.cli.show import size_text
from producer.input.source import Source
from producer.model_states import PlannedSwaps, planned_swaps
from producer.queue_workers import clock_text
from producer.submit.plan import FileContent, Plan, plan, queues_of
from producer.submit.prompt_tokens import choose_counter
from producer.submit.reuse import Reuse
from producer.submit.routes import routed, to_default_queue
from producer.submit.submission import Submission
from producer.time_left import Outlook, OutlookReads


def _seconds_left(_: click.Context, __: click.Parameter, text: str | None) -> float | None:
    return None if text is None else seconds_until(text)


@click.command("plan", cls=options.TakesReuse)
@click.argument("file", metavar="FILE")
@options.model
@options.priority
@options.tenant
@options.pairs
@options.choice
@options.schema
@options.mapped
@options.keep
@options.delimiter
@options.reuse
@click.option(
    "--tokenizer",
    metavar="DIR|NAME",
    default="",
    help="Count tokens with this model's tokenizer. Default: that of the workers' model, if its "
    "folder is on this machine.",
)
@click.option("--estimate", is_flag=True, help="Estimate tokens from characters, which is faster.")
@click.option(
    "--deadline",
    metavar="D",
    callback=_seconds_left,
    help="Show what is needed to end by then: 90s, 2h, 3d, 08:00 (this machine's time), or a time "
    "with its time zone.",
)
@options.as_json
@pass_context
def command(
    context: Context,
    *,
    file: str,
    model: str,
    priority: int,
    tenant: str,
    pairs: tuple[str, ...],
    choice: str | None,
    schema: str | None,
    mapped: tuple[str, ...],
    keep: tuple[str, ...],
    delimiter: str,
    reuse_s: float | None,
    tokenizer: str,
    estimate: bool,
    deadline: float | None,
    as_json: bool,
) -> Exit:
    """Estimate the tokens, Redis memory and time that FILE takes. Queues nothing.

    FILE is read in the same way as by `producer submit`; give the same --model,
    --set and --tenant. The time is computed from the rate of the queue's workers in the last
    minutes in which they had work.
    Exit status: 0; 1 if some lines are bad; 2 if all are.
    """
    if tokenizer and estimate:
        raise click.UsageError("--tokenizer and --estimate exclude each other: give one")
    settings = context.settings
    fields = fields_of_all_lines(pairs, choice, schema, model)
    queue = queue_name(model or None, settings.queue)
    submission = Submission("plan", queue, priority, model, fields,
                            tenant=tenant, keep=keep, reuse_s=reuse_s)  # fmt: skip
    submission.check()
    source = open_input(file, mapped, submission.overrides, submission.keep, delimiter)
    with suppress(StoreUnavailable):  # known_workers prints the error
        submission = to_default_queue(submission, context.store, settings.queue)
    planned, swaps = estimated(context, submission, source, file, None if estimate else tokenizer)
    if as_json:
        show.put_json(plan_json(file, planned, swaps) | _deadline_json(planned, deadline))
    else:
        _print_plan(file, planned, swaps, deadline)
    if not planned.content.requests:
        return Exit.BAD_INPUT
    return Exit.SOME_FAILED if planned.content.bad else Exit.ALL_WELL


def estimated(
    context: Context, submission: Submission, source: Source, file: str, tokenizer: str | None
) -> tuple[Plan, PlannedSwaps | None]:
    """Read a file; return its plan and the swaps that it needs.

    `tokenizer` is that of --tokenizer, '' for the workers' own, None to count characters.
    """
    settings = context.settings
    workers, outlook = known_workers(context, [submission.queue])
    with suppress(StoreUnavailable):
        submission = routed(submission, context.store, settings.queue)
    if not workers and submission.routes:
        workers, outlook = known_workers(context, sorted(set(submission.routes.values())))
    counter = choose_counter(tokenizer, workers)
    with Meter(file, source.size) as meter:

        def report(content: FileContent) -> None:
            if meter.due():
                meter.update(source.position, f"{content.lines} lines read")

        reuse = None
        if submission.reuse_s is not None:
            with suppress(StoreUnavailable):
                reuse = Reuse.of(context.store, settings, submission, thorough=True)
        planned = plan(settings, submission, source, counter, workers, outlook, report, reuse=reuse)
    queues = queues_of(submission, planned.content)
    if queues != [submission.queue]:
        workers, outlook = known_workers(context, queues)
        planned = planned.on(len(workers), outlook, submission)
    return planned, known_swaps(context, queues)


def known_workers(
    context: Context, queues: Collection[str]
) -> tuple[list[dict[str, Any]], Outlook | None]:
    """Return the announcements of the workers of queues, and their outlook.

    Without Redis, returns [] and None, and prints the error.
    """
    try:
        reads = OutlookReads.using(context.store)
        workers = [w for w in reads.workers_of(queues) if w.get("state") != "draining"]
        return workers, reads.outlook_of(queues, workers)
    except StoreUnavailable as error:
        tell(f"without the workers: {error.message}")
        return [], None


def known_swaps(context: Context, queues: Collection[str]) -> PlannedSwaps | None:
    """Return the swaps that requests of `queues` need; None without workers of several models."""
    try:
        alive = [worker for worker in context.store.announcements() if is_alive(worker)]
        names = sorted({queue for worker in alive for queue in models_of(worker).values()})
        waiting = WaitingReads.using(context.store).waiting_totals(names) if names else {}
    except StoreUnavailable:  # known_workers has printed the error
        return None
    return planned_swaps(alive, queues, waiting)


def plan_json(file: str, planned: Plan, swaps: PlannedSwaps | None = None) -> dict[str, Any]:
    """Return the JSON object of a plan."""
    content, shared, seconds = planned.content, planned.content.shared, planned.seconds
    return {
        "object": "warmq.plan",
        "input_file": file,
        "queue": planned.queue,
        "lines_read": content.lines,
        "request_counts": {
            "total": content.requests + content.bad,
            "valid": content.requests,
            "bad": content.bad,
            "duplicates": content.duplicates,
            **({} if content.known is None else {"known": content.known}),
        },
        "first_errors": content.first_bad,
        "prompt_tokens": {
            "total": content.prompt_tokens,
            "tokenizer": planned.tokenizer or None,
            "estimated_requests": content.estimated,
        },
        "completion_tokens": {
            "limit": content.limits,
            "without_limit": content.without_limit,
            "expected": round(content.expected),
            "mean_answer": planned.mean_answer,
        },
        "shared_prefixes": {
            "share": round(shared.share, 4),
            "distinct_share": round(shared.distinct / shared.whole, 4) if shared.whole else 0.0,
            "saved_tokens": planned.saved_tokens,
            "saved_as_is": _saved_as_is(planned),
            "kv_tokens": planned.kv_tokens,
            "any_order": planned.any_order,
        },
        "redis_bytes": {
            "waiting": planned.memory.waiting,
            "finished": planned.memory.finished,
            "most": planned.memory.most,
        },
        "workers": planned.workers,
        "duration": None if planned.pace is None or seconds is None else {
            "seconds": round(seconds, 1), "tokens_per_s": round(planned.pace.tokens_per_s, 1),
            "requests_before": planned.before,
        },
        **({} if swaps is None else {"swaps": _swaps_json(swaps)}),
    }  # fmt: skip


def _deadline_json(planned: Plan, left_s: float | None) -> dict[str, Any]:
    if left_s is None:
        return {}
    needed = planned.needed(left_s)
    return {
        "deadline": needed and {
            "seconds": round(left_s, 1), "met": needed.met,
            "tokens_per_s": round(needed.tokens_per_s, 1), "slots": needed.slots,
            "workers": needed.workers,
        }
    }  # fmt: skip


def _swaps_json(swaps: PlannedSwaps) -> dict[str, Any]:
    return {
        "count": len(swaps.models),
        "seconds": None if swaps.seconds is None else round(swaps.seconds, 1),
        "models": [one.model for one in swaps.models],
        "unloadable": [one.model for one in swaps.unloadable],
    }


def _print_plan(
    file: str, planned: Plan, swaps: PlannedSwaps | None = None, left_s: float | None = None
) -> None:
    """Print a plan as text."""
    content = planned.content
    rows = {
        "file": file,
        "queue": planned.queue,
        "requests": requests_text(content),
        "known": known_text(content),
        "tokens in": _tokens_in(planned),
        "too long": _too_long(planned),
        "tokens out": _tokens_out(planned),
        "shared": _shared(planned),
        "redis": f"{size_text(planned.memory.most)} at most: {size_text(planned.memory.waiting)} "
        f"while all wait, {size_text(planned.memory.finished)} with all results",
        "time": time_text(planned),
        "deadline": None if left_s is None else _deadline_text(planned, left_s),
        "swaps": swaps and _swaps_text(swaps),
    }  # fmt: skip
    if content.all_known:
        rows["tokens in"] = rows["tokens out"] = "none: all answers are known"
        rows |= {"shared": None, "time": clock_text(0)}
    show.put_rows(rows)
    for error in content.first_bad:
        click.echo(show.printable(f"bad: {error}"))
    if content.bad > len(content.first_bad):
        click.echo(f"bad: {content.bad - len(content.first_bad):,} more")


def requests_text(content: FileContent) -> str:
    """Return a text with the numbers of requests, duplicates and bad lines."""
    text = f"{content.requests:,}"
    if content.duplicates:
        text += f", {content.duplicates:,} of them identical to an earlier one"
    return f"{text}; {counted(content.bad, 'bad line')}" if content.bad else text


def known_text(content: FileContent) -> str | None:
    """Return a text with the number of requests whose answers are known; None without --reuse."""
    if content.known is None:
        return None
    if not content.known:
        return f"none of {content.requests:,}"
    # A result may be too old for --reuse=D, or expire before the submit.
    return f"up to {content.known:,} of {content.requests:,} are known, and need no computing"


def _tokens_in(planned: Plan) -> str:
    content = planned.content
    text = f"{content.prompt_tokens:,}"
    if not planned.tokenizer:
        each = f"estimated, {planned.token_characters:.2g} characters a token"
        return f"about {text}: {each}; --tokenizer DIR counts them"
    text += f", counted with the tokenizer of {planned.tokenizer}"
    if content.estimated:
        text += f"; those of {content.estimated:,} requests are estimated"
    return text


def _too_long(planned: Plan) -> str | None:
    """Return a text about the prompts that no worker can read; None without any."""
    content = planned.content
    if not content.too_long or not planned.context:
        return None
    one = content.too_long == 1
    prompts = f"{content.too_long:,} {'prompt exceeds' if one else 'prompts exceed'}"
    first = "" if one else "the first is "
    return f"{prompts} the workers' {planned.context:,} tokens: {first}{content.first_too_long}"


def _tokens_out(planned: Plan) -> str:
    content = planned.content
    if content.fixed == content.computed:
        return f"{content.limits:,}, as the lines ask for"
    parts = [f"at most {content.limits:,}"] if content.limits else []
    if content.without_limit:
        lines = counted(content.without_limit, "line")
        parts.append(f"{lines} without max_tokens (the workers' WARMQ_DEFAULT_MAX_TOKENS applies)")
    text = " and ".join(parts)
    if not parts:  # embeddings, for example
        return "none"
    if planned.mean_answer is None:
        return f"{text}; the length of answers is not known: no running worker has reported it"
    return (
        f"{text}; {content.expected:,.0f} expected, as the workers' answers have "
        f"{planned.mean_answer:g} on average"
    )


def _shared(planned: Plan) -> str:
    share = planned.content.shared.share
    if share < 0.005:
        return "no prompts have a common beginning"
    text = f"{share:.0%} of the prompt tokens are in beginnings that an earlier prompt has, too"
    if planned.kv_tokens is None:
        return f"{text}; no worker with a prefix cache is known"
    text += f": at most {planned.saved_tokens:,} tokens need not be computed"
    if planned.any_order:
        return f"{text}, whatever order the requests run in"
    return (
        f"{text} with --order prefix, {_saved_as_is(planned):,} in the file's order; the KV cache "
        f"has {planned.kv_tokens:,} tokens"
    )


def _swaps_text(swaps: PlannedSwaps) -> str:
    """Return a text with the models that must be loaded, and those that cannot be."""
    names = [f"{one.model} ({one.waiting:,} wait)" if one.waiting else one.model
             for one in swaps.models]  # fmt: skip
    text = f"{len(names)} at least, to load {', '.join(names)}" if names else "none is needed"
    if names and swaps.seconds is not None:
        text += f": about {clock_text(swaps.seconds)}, in addition to the time"
    for one in swaps.unloadable:
        text += f"; {one.model} cannot be loaded, its requests wait: {one.why}"
    return text


def _saved_as_is(planned: Plan) -> int:
    """Return the prompt tokens that the prefix cache saves in the file's own order."""
    shared = planned.content.shared
    return round(planned.saved_tokens * shared.as_is / shared.repeated) if shared.repeated else 0


def _deadline_text(planned: Plan, left_s: float) -> str:
    """Return a text with what a deadline needs, and whether it is met."""
    until = f"in {clock_text(left_s)}"
    if planned.content.all_known:
        return f"{until}: met, as nothing is computed"
    if (needed := planned.needed(left_s)) is None or planned.pace is None:
        return f"{until}; whether it is met is not known"
    if needed.slots is None:
        capped = (planned.capped_s or 0.0) > left_s
        why = "the tenant's cap is too low" if capped else "one request takes longer"
        return f"{until}: missed, because {why}"
    what = f"{counted(needed.slots, 'slot')} (about {counted(needed.workers or 0, 'worker')}), " + (
        "under 1 token/s" if needed.tokens_per_s < 1 else f"{needed.tokens_per_s:,.0f} tokens/s"
    )
    if needed.met:
        return f"{until}: met; {what} are enough"
    late, now = clock_text((planned.seconds or 0.0) - left_s), f"{planned.pace.slots:,.0f}"
    return f"{until}: missed by about {late}; {what} are needed, now {now} slots"


def time_text(planned: Plan) -> str:
    """Return a text with the time that the file takes, and the rate that it is based on."""
    if not planned.workers:
        return f"not known: no worker of queue {planned.queue} is known"
    pace, workers = planned.pace, counted(planned.workers, "worker")
    requests = counted((pace and pace.requests) or 0, "request")
    if pace is None or planned.seconds is None:
        reason = "none has recorded work in the last day (it is recorded after 2 s)"
        if pace is not None and pace.too_rough:
            reason = f"{requests} in {pace.slots:,.0f} slots are too few: a worker's first are slow"
        return f"not known: {workers}, but {reason}"
    text = f"rough, from {requests}: " * pace.rough + f"{clock_text(planned.seconds)} on {workers}"
    text += f", at the {pace.tokens_per_s:,.0f} tokens/s, read and written, of their last minutes"
    text += " of work"
    if planned.before:
        text += f", with {counted(planned.before, 'request')} of other batches before"
    return text
