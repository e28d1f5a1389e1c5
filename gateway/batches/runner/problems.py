"""Problems that end a batch, in the words that its owner reads."""

from __future__ import annotations

from gateway.batches.api.record import Problem
from gateway.http.services import Services
from producer.submit.expected import least_bytes


def no_file(file_id: str) -> Problem:
    """Return the problem of a batch whose input file was deleted too early."""
    told = f"file {file_id} was deleted before all its lines were queued; upload it again"
    return Problem("file_not_found", told, "input_file_id")


def was_deleted(parts: list[str]) -> Problem:
    """Return the problem of a batch some of whose parts were in the queue and are gone."""
    told = (
        f"{', '.join(parts[:5])} {'was' if len(parts) == 1 else 'were'} deleted from the queue, or "
        "the life of the results has ended (WARMQ_RESULT_TTL_S), before the batch's files were "
        "written; nothing is computed again: create the batch anew if its results are wanted"
    )
    return Problem("batch_deleted", told)


def no_room(services: Services, requests: int) -> list[Problem]:
    """Return what is wrong with so many requests: their results cannot all be in Redis, where they
    are until the batch ends, not even if nothing else is there."""
    most = services.batches.memory_for_batches(services.settings.high_water)
    if most is None or least_bytes(requests) <= most:
        return []
    fit = most // least_bytes(1000) * 1000
    told = (
        f"the results of {requests} requests do not fit into Redis, which takes {most} bytes of "
        f"batches; split the file into batches of at most {fit} lines, or give Redis more memory"
    )
    return [Problem("too_many_tasks", told)]
