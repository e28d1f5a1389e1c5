"""Lets requests wait while vLLM refuses them because its queue is full.

With --max-num-queued-reqs or --max-num-queued-tokens vLLM's server answers 503, and its client
tries again. A request from warmq's queue has no such client, so it waits here.
"""

import asyncio
from collections.abc import Mapping
from typing import Any

from contract.errors import EngineDead, RequestRejected
from contract.openai.amounts import sequences_of
from worker.engine.vllm.names import QUEUE_FULL, AsyncLLMEngine, ErrorResponse

#: Seconds between two checks whether vLLM takes one more request.
ASK_EVERY_S = 0.1


def queue_full(response: Any) -> bool:
    """Whether vLLM's serving class refused a request because its queue is full."""
    return isinstance(response, ErrorResponse) and response.error.code == 503


class FullQueue:
    """The requests that wait; the first one asks vLLM, the rest wait behind it."""

    def __init__(self) -> None:
        self._first = asyncio.Lock()

    async def wait(self, engine: AsyncLLMEngine | None, body: Mapping[str, Any]) -> None:
        """Wait until vLLM takes this request.

        Raises:
            RequestRejected: vLLM never takes a request of so many sequences.
            EngineDead: the engine ended meanwhile.
        """
        count = sequences_of(body)
        config = getattr(getattr(engine, "vllm_config", None), "scheduler_config", None)
        most = getattr(config, "max_num_queued_reqs", None)
        if most is not None and count > most:
            raise RequestRejected(
                f"the request has {count} sequences (n × prompts); --max-num-queued-reqs in the "
                f"worker's WARMQ_ENGINE_ARGS allows {most}"
            )
        async with self._first:
            while True:
                if engine is None or engine.errored:
                    raise EngineDead("the engine is dead", inside=False)
                await asyncio.sleep(ASK_EVERY_S)
                try:
                    engine.check_admission(count)
                except QUEUE_FULL:
                    continue
                return
