"""Passes the queue's priorities to vLLM's scheduler, so that urgent requests start first.

With vLLM's policy `priority` the scheduler takes the waiting request with the lowest number next;
among equal ones, the one that arrived first. If the KV cache is full, it preempts the running
request with the highest number, which later continues with its own tokens. The worker sets this
policy unless the user sets another. So an online request passes the batch's requests that wait in
the engine (the look-ahead).
"""

import logging
import time
from contextvars import ContextVar
from typing import Any

from worker.engine.vllm.names import current_platform

log = logging.getLogger(__name__)

#: The policy of vLLM's scheduler that uses priorities.
POLICY = "priority"
#: The number of vLLM's priorities that each of the queue's has; a request's own `priority` (vLLM's
#: field) orders requests within them.
RANGE = 2**32
#: The queue's priority of the current task's request.
PRIORITY: ContextVar[int] = ContextVar("priority", default=0)


def default_policy(default: str) -> str:
    """Return the policy for engines whose user sets none; `default` is vLLM's."""
    # Plugins of other platforms may have schedulers of their own.
    vllms_own = current_platform.is_cpu() or current_platform.is_cuda_alike()
    return POLICY if vllms_own else default


def vllm_priority(queued: int, own: int) -> int:
    """Return vLLM's priority of a request with this priority in the queue and in its body."""
    return queued * RANGE + max(-RANGE // 2, min(own, RANGE // 2 - 1))


def guard(engine: Any) -> None:
    """Make an AsyncLLM set the priority of all requests that it sends to EngineCore."""
    if getattr(engine.vllm_config.scheduler_config, "policy", None) != POLICY:
        return
    core = engine.engine_core
    if not hasattr(core, "add_request_async"):
        extra = {"action": "priorities_unused"}
        log.warning("this vLLM starts requests in the order in which they come", extra=extra)
        return
    add = core.add_request_async

    async def add_request(request: Any) -> None:
        request.priority = vllm_priority(PRIORITY.get(), request.priority)
        # vLLM notes the arrival before it makes the tokens. The sequences of a large request, which
        # wait for slots afterwards (turns.py), would otherwise pass all requests.
        request.arrival_time = time.time()
        await add(request)

    core.add_request_async = add_request
