"""Requests in flight: what an abort reaches."""

from __future__ import annotations

import asyncio

from contract.message import MessageWriter, read_delivery
from worker.drain.in_flight import InFlight


async def test_an_abort_reaches_a_request_whose_task_has_not_begun() -> None:
    # Given a request that was admitted a moment ago: a task that is cancelled now would end
    # before its first line, and nobody would give the request an ending
    message = MessageWriter("b", 1, "life", "warmq", 6).write(
        "id", "c", 1, "/v1/completions", b"{}"
    )
    in_flight, seen = InFlight(), []
    running = in_flight.add(read_delivery("w/1", message))

    async def serve() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            seen.append(running.abort)

    running.task = asyncio.create_task(serve())
    in_flight.abort([running], "cancelled")
    await asyncio.wait([running.task])
    assert seen == ["cancelled"]
