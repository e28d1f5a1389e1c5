"""What a submit tells when a file is queued."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from producer.cli.progress import counted
from producer.cli.show import iso_time
from producer.submit.summary import Summary

if TYPE_CHECKING:  # it loads numpy, which takes 0.1 s
    from producer.submit.order.choice import Choice


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


def order(choice: Choice) -> str:
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
