"""The options that shape a batch besides its file, which `submit` and `run` take alike."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any

from contract.naming import did_you_mean, queue_name
from contract.redis.batches import BatchStore
from contract.settings import Settings
from producer.cli import options
from producer.cli.options import parse_overrides
from producer.cli.progress import counted, tell
from producer.cli.show import iso_time
from producer.submit.submission import Submission
from producer.submit.submit import Summary

if TYPE_CHECKING:  # it loads numpy, which takes 0.1 s
    from producer.submit.order.prefix import OrderChoice

#: In the order of `--help`.
_OPTIONS = {
    "model": options.model,
    "priority": options.priority,
    "tenant": options.tenant,
    "turn": options.turn,
    "pairs": options.pairs,
    "dedupe": options.dedupe,
    "order": options.order,
}


def shaping_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command these options; it takes their values as `shaping`, by name."""

    @wraps(command)
    def collected(*args: Any, **values: Any) -> Any:
        return command(*args, shaping={name: values.pop(name) for name in _OPTIONS}, **values)

    for option in reversed(_OPTIONS.values()):
        collected = option(collected)
    return collected


def make_submission(
    settings: Settings, batch_id: str, shaped: dict[str, Any], deadline: str = ""
) -> Submission:
    """Return what `shaped` asks for; `deadline` as CREATE takes it.

    Raises:
        BadOption: naming the option that is wrong.
    """
    found = Submission(
        batch_id,
        queue_name(shaped["model"] or None, settings.queue),
        shaped["priority"],
        shaped["model"],
        parse_overrides(shaped["pairs"]),
        deadline,
        tenant=shaped["tenant"],
        in_order=shaped["turn"] == "fifo",
        dedupe=shaped["dedupe"],
        order=shaped["order"],
    )
    found.check()
    return found


def queued(summary: Summary, took_s: float) -> str:
    """Return lines on what became of a file: queued, bad, ignored, without a limit, ended."""
    batch = summary.batch
    valid, rejected = batch.number("valid"), batch.number("total") - batch.number("valid")
    text = f"{batch.id}: {counted(valid, 'request')} queued in {took_s:.1f} s"
    if summary.found and not (summary.queued or summary.rejected):
        text = f"{batch.id}: was submitted already, {counted(valid, 'request')}, {batch.status}"
    elif summary.found:
        text += f", {summary.queued} of them now"
    if identical := batch.number("identical"):
        text += f", {identical} of them answered by an earlier line with the same body"
    if rejected:
        text += f", {counted(rejected, 'bad line')} (see `producer results`)"
    deadline = iso_time(batch.fields.get("deadline"))
    if deadline and not batch.finished:
        text += f", deadline {deadline}"
    if summary.choice is not None:
        text += f"\n{batch.id}: {order(summary.choice)}"
    if summary.ignored:
        text += f"\n{batch.id}: {ignored_fields(summary.ignored)}"
    if summary.without_limit:
        text += (
            f"\n{batch.id}: lines without max_tokens: {summary.without_limit}; they get the "
            "worker's default (WARMQ_DEFAULT_MAX_TOKENS). --set max_tokens=256 gives all yours"
        )
    return text + _what_is_wrong(summary)


def _what_is_wrong(summary: Summary) -> str:
    batch = summary.batch
    if reason := batch.fields.get("reason"):
        return f"\n{batch.id}: {batch.status}: {reason}"
    return f"\n{batch.id}: first bad line: {summary.first_error}" if summary.first_error else ""


def order(choice: OrderChoice) -> str:
    """Return in which order requests are queued, and what that is expected to save."""
    plan = choice.plan
    as_is, planned = (
        100 * tokens / max(1, plan.prompt) for tokens in (plan.saved_as_is, plan.saved)
    )
    if choice.in_groups:
        return (
            f"order: prefix, {counted(plan.groups, 'group')} of lines that share about "
            f"{plan.group_tokens:,} tokens; about {planned:.0f} % of prompt tokens need no "
            f"computing (in the file's order {as_is:.0f} %)"
        )
    return (
        f"order: input; another would save about {max(0.0, 100 * plan.gain):.1f} % of the prompts"
    )


def ignored_fields(lines: Counter[str]) -> str:
    """Name the fields that were left out, and on how many lines each was."""
    names = (f"{name} (on {counted(count, 'line')})" for name, count in sorted(lines.items()))
    return f"ignored, because they concern OpenAI's service and not the answer: {', '.join(names)}"


def tell_if_unserved(store: BatchStore, base: str, model: str) -> None:
    """Say which models are served if `model` is not, and any other is; '' is the default queue."""
    queue, served = queue_name(model or None, base), store.served_queues()
    if queue in served or not served:
        return
    prefix = f"{base}."
    models = sorted(name.removeprefix(prefix) for name in served if name.startswith(prefix))
    unserved = f"no worker serves queue {queue}"
    options = [f"--model {name}" for name in models]
    if not options and base in served:
        tell(f"{unserved}; a worker serves requests without --model")
        return
    if base in served:
        options.append("and requests without --model")
    if options:
        tell(f"{unserved}; served are: {', '.join(options)}{did_you_mean(model, models)}")
