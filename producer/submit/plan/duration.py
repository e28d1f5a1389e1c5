"""How long a file takes on the workers that are there, from the rates that they have measured."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from producer.submit.plan.content import Asked, FileContent

Worker = dict[str, Any]
_RATES = ("prefill_tokens_s", "decode_tokens_s", "context_tokens_s")
#: The least doubt, as a share: one file on one worker took up to 10 % more or less when repeated.
LEAST_DOUBT = 0.15
#: Doubt in standard deviations of the rates.
DEVIATIONS = 2.0
#: Where answers end of themselves, they may be so much shorter than expected.
SHORTER = 0.5


@dataclass(slots=True)
class Duration:
    """Seconds from the first request's start to the last one's end; `low` and `high` bound it.

    `measured` of `workers` have measured rates. `why` names what the range comes from: rates,
    lengths (answers end of themselves), limits (lines without max_tokens), cache (whether
    beginnings stay in the KV cache depends on the order).
    """

    seconds: float
    low: float
    high: float
    workers: int
    measured: int
    why: list[str] = field(default_factory=list)


def mean_answer(workers: Sequence[Worker]) -> float | None:
    """Return the tokens of the workers' answers on average; None if none has answered yet."""
    known = [_number(worker.get("mean_answer")) for worker in workers]
    return sum(known) / len(known) if (known := [k for k in known if k]) else None


def kv_tokens(workers: Sequence[Worker]) -> int | None:
    """Return the size of the smallest KV cache that shares prompts; None where none is known."""
    sharing = [worker for worker in workers if worker.get("prefix_caching") is True]
    return int(min((_number(worker.get("kv_tokens")) for worker in sharing), default=0)) or None


def saved_tokens(content: FileContent, workers: Sequence[Worker]) -> tuple[int, bool]:
    """Return the prompt tokens that the workers' prefix caches can save, and whether they do so in
    any order: the shared beginnings fit into the smallest KV cache."""
    size = kv_tokens(workers)
    if size is None or not content.shared.whole:
        return 0, True
    tokens_each = content.prompt_tokens / content.shared.whole
    fits = content.shared.distinct * tokens_each <= size / 2  # running answers need the rest
    return round(content.shared.share * content.prompt_tokens), fits


def duration(content: FileContent, workers: Sequence[Worker]) -> Duration | None:
    """Return how long these workers need together; None while none has measured its rates."""
    measured = [worker for worker in workers if _costs(worker)]
    if not measured:
        return None
    saved, fits = saved_tokens(content, workers)
    computed = content.prompt_tokens - saved
    seconds, doubt = _together(measured, len(workers), content, computed, content.expected)
    found = Duration(seconds, 0, 0, len(workers), len(measured), ["rates"])
    low, high = seconds, seconds
    if content.fixed < content.requests and content.choices:
        found.why.append("lengths")
        shorter = Asked(content.expected.written * SHORTER, content.expected.read * SHORTER)
        low = _together(measured, len(workers), content, computed, shorter)[0]
        high = _together(measured, len(workers), content, computed, content.most)[0]
    if content.without_limit:
        found.why.append("limits")
    if not fits:
        found.why.append("cache")
        whole = content.prompt_tokens
        high += _together(measured, len(workers), content, whole, content.expected)[0] - seconds
    found.low, found.high = low * max(0.0, 1 - doubt), high * (1 + doubt)
    return found


def _together(
    measured: Sequence[Worker], workers: int, content: FileContent, computed: float, asked: Asked
) -> tuple[float, float]:
    """Return seconds and their doubt, as a share.

    Workers that have measured nothing yet are taken for as fast as the others.
    """
    speed, doubts = 0.0, []
    amounts = computed, asked.written, asked.read
    tail = 0.0
    for worker in measured:
        costs = _costs(worker) or []
        seconds = sum(map(_times, costs, amounts))
        doubts.append(_deviation(worker, amounts) / seconds if seconds else 0.0)
        speed += 1 / max(seconds, 1e-9)
        tail = max(tail, _tail(worker, costs, content.choices, asked))
    doubt = max(LEAST_DOUBT, DEVIATIONS * sum(doubts) / len(doubts))
    return len(measured) / workers / speed + tail, doubt


def _tail(worker: Worker, costs: Sequence[float], choices: int, asked: Asked) -> float:
    """Return what the end costs, where slots run empty: half of a mean answer's time."""
    slots = min(_number(worker.get("slots")), choices)
    share = slots / choices if choices else 0.0
    return share * (costs[1] * asked.written + costs[2] * asked.read) / 2


def _costs(worker: Worker) -> list[float] | None:
    """Return the seconds of a token computed, written and read again; None: not known."""
    rates = worker.get("rates")
    if not isinstance(rates, dict):
        return None
    speeds = [_number(rates.get(name)) for name in _RATES]
    return [1 / speed if speed else 0.0 for speed in speeds] if any(speeds) else None


def _deviation(worker: Worker, amounts: Sequence[float]) -> float:
    """Return the standard deviation of the seconds that these amounts take."""
    rows = worker["rates"].get("covariance") or []
    try:
        square = sum(
            row[j] * amounts[i] * amounts[j] for i, row in enumerate(rows) for j in range(len(row))
        )
        return float(max(0.0, square) ** 0.5)
    except (TypeError, IndexError):  # of a worker of another version
        return 0.0


def _times(a: float, b: float) -> float:
    return a * b


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) and value > 0 else 0.0
