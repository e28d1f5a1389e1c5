"""Lets EngineCore abort what a client has left in it that died; runs in the engine's process."""

import sys
from typing import Any

#: The utility call by which EngineCore is asked.
ABORT_CLIENT = "warmq_abort_client"
#: Where vLLM's EngineCore is defined.
CORE_MODULE = "vllm.v1.engine.core"


def abort_client(core: Any, client: int) -> int:
    """Abort all requests of one client; return how many.

    Args:
        core: vLLM's EngineCore, between two steps.
        client: its number, as each request has it.
    """
    requests = core.scheduler.requests.values()
    left = [one.request_id for one in requests if one.client_index == client]
    core.abort_requests(left)
    return len(left)


def register() -> None:
    """Add the call to EngineCore, if this process has one."""
    if core := sys.modules.get(CORE_MODULE):
        setattr(core.EngineCore, ABORT_CLIENT, abort_client)
