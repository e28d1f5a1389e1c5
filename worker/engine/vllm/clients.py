"""More processes at one EngineCore, by vLLM's own means for several API servers.

EngineCore connects to a pair of sockets for each of its clients, whether or not they are bound, and
answers each request to the client that sent it. This process is the first client; more attach
later (attached.py). A client that died is replaced by a new one: EngineCore greets each once.
"""

import multiprocessing
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from contract.settings import SettingsError
from worker.engine.vllm.names import core_client

#: Replacements of dead clients while one engine runs.
SPARE = 8
#: Options that this worker sets by the free memory, which shrinks once the engine runs.
MEMORY = ("kv_cache_memory_bytes", "gpu_memory_utilization")


class EngineClients:
    """The clients of one engine that `front_ends` processes feed, this one included."""

    def __init__(self, front_ends: int) -> None:
        self.count = 1 if front_ends == 1 else front_ends + SPARE
        self._addresses: Any = None
        self._processes: list[int] = []
        self._next = 1

    @contextmanager
    def started(self) -> Iterator[None]:
        """Start an engine within: it gets sockets for all clients.

        Raises:
            SettingsError: the engine's processes are on several machines.
        """
        if self.count == 1:
            yield
            return
        allocate = core_client.get_engine_zmq_addresses

        def allocate_all(config: Any, *_: Any, **__: Any) -> Any:
            self._addresses = allocate(config, self.count)
            if any(one.endswith(":0") for one in self._addresses.inputs):
                raise SettingsError(
                    "WARMQ_FRONT_ENDS: this engine's processes are on several machines; leave the "
                    "variable out, or start one worker on each machine"
                )
            return self._addresses

        core_client.get_engine_zmq_addresses = allocate_all
        try:
            yield
        finally:
            core_client.get_engine_zmq_addresses = allocate
        self._processes = [p.pid for p in multiprocessing.active_children() if p.pid is not None]

    def new(self, args: Namespace) -> dict[str, Any] | None:
        """Return a client's addresses and options for AttachedEngine; None if all are used."""
        index = self._next
        if index >= self.count or self._addresses is None:
            return None
        self._next += 1
        memory = {name.replace("_", "-"): getattr(args, name) for name in MEMORY}
        return {
            "index": index,
            "clients": self.count,
            "addresses": {
                "input_address": self._addresses.inputs[index],
                "output_address": self._addresses.outputs[index],
                "stats_update_address": self._addresses.frontend_stats_publish_address,
            },
            "processes": self._processes,
            "memory": {name: value for name, value in memory.items() if value is not None},
        }
