"""Places for more processes at one EngineCore, by vLLM's own means for several API servers.

EngineCore connects to a pair of sockets for each of its clients, whether or not somebody has bound
them, and answers each request to the client that sent it. This process is the first client. The
others attach later (attached.py), and one that died is followed by another in a fresh client: a
client is greeted once, when it is new.
"""

import multiprocessing
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from contract.settings import SettingsError
from worker.engine.vllm.names import core_client

#: Front ends that may be followed by another while one engine runs.
SPARE = 8
#: Options that this worker chooses by what is free, which is another amount once the engine runs.
MEMORY = ("kv_cache_memory_bytes", "gpu_memory_utilization")


class EngineClients:
    """The clients of one engine: `count` processes are to feed it, this one among them."""

    def __init__(self, count: int) -> None:
        self.count = count
        #: vLLM numbers its clients; the spare ones are numbers like others.
        self.clients = 1 if count == 1 else count + SPARE
        self._addresses: Any = None
        self._processes: list[int] = []
        self._next = 1

    @contextmanager
    def made(self) -> Iterator[None]:
        """Within it an engine is started with sockets for all clients.

        Raises:
            SettingsError: its processes are on several machines.
        """
        if self.clients == 1:
            yield
            return
        allocate = core_client.get_engine_zmq_addresses

        def allocate_all(config: Any, *_: Any, **__: Any) -> Any:
            self._addresses = allocate(config, self.clients)
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

    def take(self, args: Namespace) -> dict[str, Any] | None:
        """Return what another process needs to attach; None if every client was taken.

        Args:
            args: the engine's options, as vLLM's parser and this worker have set them.
        """
        index = self._next
        if index >= self.clients or self._addresses is None:
            return None
        self._next += 1
        return {
            "index": index,
            "clients": self.clients,
            "addresses": {
                "input_address": self._addresses.inputs[index],
                "output_address": self._addresses.outputs[index],
                "stats_update_address": self._addresses.frontend_stats_publish_address,
            },
            "processes": self._processes,
            "memory": {
                name.replace("_", "-"): value
                for name in MEMORY
                if (value := getattr(args, name)) is not None
            },
        }
