"""Defines options and messages that `submit` and `run` have in common."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from contract.naming import queue_name
from contract.redis.batches import BatchStore
from contract.redis.known import KnownAnswers
from contract.settings import Settings
from producer.cli import options
from producer.cli.options import fields_of_all_lines
from producer.cli.progress import counted, tell
from producer.cli.show import iso_time
from producer.queue_workers import refuse_older_workers, unserved_text
from producer.submit.routes import routed, to_default_queue
from producer.submit.submission import Submission, stop_after_text
from producer.submit.submit import Summary

if TYPE_CHECKING:  # the imported module loads numpy, which takes 0.1 s
    from producer.submit.order.prefix import OrderChoice

#: Options that `submit` and `run` have in common, in the order of `--help`.
_OPTIONS = (
    options.model, options.priority, options.tenant, options.turn, options.pairs,
    options.choice, options.schema, options.dedupe, options.once, options.reuse, options.order,
    options.stop_after, options.keep, options.delimiter,
)  # fmt: skip


def submission_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add _OPTIONS to a command, which passes their values to `make_submission`."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def make_submission(
    settings: Settings,
    batch_id: str,
    values: dict[str, Any],
    deadline: str = "",
    notify: str = "",
) -> Submission:
    """Return the submission for the values of _OPTIONS; `deadline` is from `parse_deadline`."""
    if values["once"]:
        tell("--once is now --dedupe; this release still takes --once, the next one does not")
    submission = Submission(
        batch_id,
        queue_name(values["model"] or None, settings.queue),
        values["priority"],
        values["model"],
        fields_of_all_lines(values["pairs"], values["choice"], values["schema"], values["model"]),
        deadline,
        tenant=values["tenant"],
        in_order=values["turn"] == "fifo",
        dedupe=values["dedupe"] or values["once"],
        order=values["order"],
        stop_after=stop_after_text(values["stop_after"], "--stop-after-failures"),
        notify=notify,
        keep=values["keep"],
        reuse_s=values["reuse_s"],
    )
    submission.check()
    return submission


def queued_text(summary: Summary, took_s: float, *, reuse: bool = False) -> str:
    """Return a text about a queued file: its requests, bad lines, ignored fields, order.

    With `reuse`, it also has the number of known answers if that is 0.
    """
    batch = summary.batch
    valid, rejected = batch.number("valid"), batch.number("total") - batch.number("valid")
    text = f"{counted(valid, 'request')} queued in {took_s:.1f} s"
    if summary.found and not (summary.queued or summary.rejected):
        text = f"was submitted already, {counted(valid, 'request')}, {batch.status}"
    elif summary.found:
        text += f", {summary.queued} of them now"
    if identical := batch.number("identical"):
        text += f", {identical} of them answered by an earlier line with the same body"
    if (cached := batch.number("cached")) or reuse:
        text += f", {cached} of them answered by known answers"
    if rejected:
        text += f", {counted(rejected, 'bad line')} (see `producer results`)"
    deadline = iso_time(batch.fields.get("deadline"))
    if deadline and not batch.finished:
        text += f", deadline {deadline}"
    problem, reason = "", batch.fields.get("reason")
    if reason or summary.first_error:
        label = batch.status if reason else "first bad line"
        problem = f"{label}: {reason or summary.first_error}"
    if summary.too_late:
        problem += (
            f"; {counted(summary.too_late, 'request')} had not been submitted by then, and "
            f"{'is' if summary.too_late == 1 else 'are'} cancelled, too"
        )
    notes = [
        order_text(summary.choice) if summary.choice else "",
        ignored_text(summary.ignored) if summary.ignored else "",
        f"lines without max_tokens: {summary.without_limit}; they get the worker's default "
        "(WARMQ_DEFAULT_MAX_TOKENS). --set max_tokens=256 sets a limit for all lines"
        if summary.without_limit
        else "",
        problem,
    ]
    return "\n".join(f"{batch.id}: {line}" for line in (text, *filter(None, notes)))


def order_text(choice: OrderChoice) -> str:
    """Return a text about the order of the requests, and the tokens that an order saves."""
    plan = choice.plan
    if not choice.in_groups:
        gain = max(0.0, 100 * plan.gain)
        return f"order: input; another order would save about {gain:.1f} % of the prompts"
    as_is, planned = (
        100 * tokens / max(1, plan.prompt) for tokens in (plan.saved_as_is, plan.saved)
    )
    of_models = f"lines grouped by {plan.models} models, " if plan.models > 1 else ""
    return (
        f"order: prefix, {of_models}{counted(plan.groups, 'group')} of lines that share about "
        f"{plan.group_tokens:,} tokens; about {planned:.0f} % of prompt tokens need no "
        f"computing (in the file's order {as_is:.0f} %)"
    )


def ignored_text(lines: Counter[str]) -> str:
    """Return a text with the fields that were left out, and the number of their lines."""
    names = (f"{name} (on {counted(count, 'line')})" for name, count in sorted(lines.items()))
    return f"ignored, because they concern OpenAI's service and not the answer: {', '.join(names)}"


def check_workers(store: BatchStore, settings: Settings, submission: Submission) -> Submission:
    """Return the submission with its queues; print the served models if its model is not one.

    Raises ProtocolMismatch if workers are too old.
    """
    submission = to_default_queue(submission, store, settings.queue)
    if submission.reuse_s is not None and KnownAnswers.using(store).offer(submission.queue) is None:
        tell(
            f"reuse: no worker of queue {submission.queue} notes answers (WARMQ_KNOWN_ANSWERS), "
            "or their models differ: its lines are computed"
        )
    refuse_older_workers(store, submission.queue)
    routed_submission = routed(submission, store, settings.queue)
    model = "" if submission.queue == settings.queue else submission.model
    if not routed_submission.routes and (text := unserved_text(store, settings.queue, model)):
        tell(text)
    return routed_submission
