"""Lets more processes send requests to one EngineCore, as vLLM does for several API servers.

EngineCore connects to a pair of sockets for each of its clients, even before a client uses them,
and sends each answer to the client that sent the request. This process is the first client; further
ones attach later (attached.py). EngineCore greets each client only once, so a client that died is
replaced by a new one.
"""

import multiprocessing
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from contract.settings import SettingsError
from worker.engine.vllm.names import core_client, get_open_zmq_ipc_path

#: Clients beyond `front_ends` that one engine gets, as replacements of clients that die.
SPARE = 8
#: Options that the worker computes from the free memory, which is less once the engine runs.
MEMORY = ("kv_cache_memory_bytes", "gpu_memory_utilization")


class EngineClients:
    """The clients of one engine: one for each of `front_ends` processes, and spare ones."""

    def __init__(self, front_ends: int) -> None:
        self.count = 1 if front_ends == 1 else front_ends + SPARE
        self._addresses: Any = None
        self._processes: list[int] = []
        self._next = 1

    @contextmanager
    def started(self) -> Iterator[None]:
        """An engine that starts in this context gets sockets for all its clients.

        Raises:
            SettingsError: the engine's processes are on several machines.
        """
        if self.count == 1:
            yield
            return
        launch = core_client.launch_core_engines

        def launch_for_all(
            config: Any, executor: Any, log_stats: bool, addresses: Any, *args: Any, **kwargs: Any
        ) -> Any:
            if not addresses.inputs[0].startswith("ipc:"):
                raise SettingsError(
                    "WARMQ_FRONT_ENDS: this engine's processes are on several machines; leave the "
                    "variable out, or start one worker on each machine"
                )
            # The first client has bound its sockets; EngineCore gets these lists, and connects.
            for one in (addresses.inputs, addresses.outputs):
                one += [get_open_zmq_ipc_path() for _ in range(self.count - len(one))]
            self._addresses = addresses
            return launch(config, executor, log_stats, addresses, *args, **kwargs)

        core_client.launch_core_engines = launch_for_all
        try:
            yield
        finally:
            core_client.launch_core_engines = launch
        self._processes = [p.pid for p in multiprocessing.active_children() if p.pid is not None]

    def new(self, args: Namespace) -> dict[str, Any] | None:
        """Return the addresses and options for a new client; None if no client is left."""
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
