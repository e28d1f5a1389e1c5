"""What `producer plan` has found: for people, or as JSON."""

from typing import Any

import click

from producer.cli import show
from producer.cli.findings import size_text
from producer.cli.progress import counted
from producer.queue_workers import clock_text
from producer.submit.plan.content import FileContent
from producer.submit.plan.duration import Duration
from producer.submit.plan.plan import Plan

#: Where a duration's range comes from.
WHY = {
    "rates": "the workers' measured rates",
    "lengths": "answers may end before their max_tokens",
    "limits": "lines without max_tokens are taken for average ones",
    "cache": "whether shared beginnings stay in the KV cache depends on the order",
}


def plan_json(file: str, found: Plan) -> dict[str, Any]:
    """Return a plan as `--json` shows it."""
    content, time, shared = found.content, found.duration, found.content.shared
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
            "expected": round(content.expected.written),
            "mean_answer": found.mean_answer,
        },
        "shared_prefixes": {
            "share": round(shared.share, 4),
            "distinct_share": round(shared.distinct / shared.whole, 4) if shared.whole else 0.0,
            "saved_tokens": found.saved_tokens,
            "saved_as_is": _as_is(found),
            "kv_tokens": found.kv_tokens,
            "any_order": found.any_order,
        },
        "redis_bytes": {
            "waiting": found.memory.waiting,
            "finished": found.memory.finished,
            "most": found.memory.most,
        },
        "workers": found.workers,
        "duration": None if time is None else _duration_json(time),
    }


def _duration_json(time: Duration) -> dict[str, Any]:
    return {
        "seconds": round(time.seconds, 1),
        "low": round(time.low, 1),
        "high": round(time.high, 1),
        "measured_workers": time.measured,
        "range_from": time.why,
    }


def plan_table(file: str, found: Plan) -> None:
    """Print a plan for people."""
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
        click.echo(show.harmless(f"bad: {error}"))
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
    text = f"at most {content.limits:,}" if content.limits else ""
    if content.without_limit:
        text += f"{' and ' if text else ''}{counted(content.without_limit, 'line')} without limit"
    if content.fixed == content.requests:
        return f"{content.limits:,}, as the lines ask for"
    if found.mean_answer is None:
        return f"{text or 'none'}; no answer of this queue's workers says how long they are"
    expected = f"{content.expected.written:,.0f} expected"
    return f"{text}; {expected}, as the workers' answers have {found.mean_answer:g} on average"


def _shared(found: Plan) -> str:
    shared = found.content.shared
    if shared.share < 0.005:
        return "no beginnings"
    text = f"{shared.share:.0%} of the prompts repeat the beginning of an earlier one"
    if found.kv_tokens is None:
        return f"{text}; no worker with a prefix cache is known"
    text += f": {found.saved_tokens:,} tokens need not be computed"
    if found.any_order:
        return f"{text}, in any order"
    return (
        f"{text} with --order prefix, {_as_is(found):,} as the lines stand; the KV cache has "
        f"{found.kv_tokens:,} tokens"
    )


def _as_is(found: Plan) -> int:
    """Return the prompt tokens that the prefix caches save in the file's own order."""
    shared = found.content.shared
    return round(found.saved_tokens * shared.as_is / shared.repeated) if shared.repeated else 0


def _time(found: Plan) -> str:
    time = found.duration
    if not found.workers:
        return f"not known: no worker of queue {found.queue} is known"
    if time is None:
        workers = counted(found.workers, "worker")
        return f"not known: {workers}, but none has had all its slots full for a few seconds yet"
    text = f"{clock_text(time.seconds)} on {counted(time.workers, 'worker')}"
    if time.measured < time.workers:
        text += f" ({time.measured} of them measured)"
    reasons = "; ".join(WHY[reason] for reason in time.why)
    return f"{text}; {clock_text(time.low)} to {clock_text(time.high)}: {reasons}"
