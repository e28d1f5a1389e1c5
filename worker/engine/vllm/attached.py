"""Runs requests in the EngineCore of another process, with vLLM's serving classes."""

import os
import select
import threading
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from signal import SIGKILL, SIGTERM, Signals
from typing import Any

from worker.engine.rbln.rules import prepare
from worker.engine.vllm.engine import VllmEngine
from worker.engine.vllm.names import AsyncEngineArgs, AsyncLLMEngine
from worker.engine.vllm.preflight import choose_sampler
from worker.engine.vllm_settings import EngineArgs, VllmSettings
from worker.machine.packages import installed


class AttachedEngine(VllmEngine):
    """Runs requests in another process's engine (clients.py), and ends when that engine ends."""

    def __init__(self, settings: VllmSettings, client: dict[str, Any]) -> None:
        user_options = settings.engine_args.options
        memory_options = "".join(f" --{name} {value}" for name, value in client["memory"].items()
                         if name not in user_options)  # fmt: skip
        args = EngineArgs(settings.engine_args + memory_options)
        super().__init__(settings.model_copy(update={"engine_args": args}))
        self._client = client
        self._kill_grace_s, self.grace_s = self.grace_s, 0.0  # this process has no engine processes

    def _connect(self) -> AsyncLLMEngine:
        client = self._client
        args = AsyncEngineArgs.from_cli_args(self._args)
        args._api_process_count, args._api_process_rank = client["clients"], client["index"]
        engine = AsyncLLMEngine.from_vllm_config(
            args.create_engine_config(),
            stat_loggers=[lambda config, index=0: self._progress],
            disable_log_stats=args.disable_log_stats,
            client_addresses={name: at for name, at in client["addresses"].items() if at},
            client_count=client["clients"],
            client_index=client["index"],
        )
        watched = (engine, client["processes"])
        threading.Thread(target=_fail_when_one_ends, args=watched, daemon=True).start()
        return engine

    def kill(self) -> None:
        """Send a hung engine's processes SIGTERM, and SIGKILL after the grace period.

        The process that started the engine builds a new one.
        """
        if self._engine is None:
            return
        self._killed = True
        _send(SIGTERM, self._client["processes"])
        timer = threading.Timer(self._kill_grace_s, _send, (SIGKILL, self._client["processes"]))
        timer.daemon = True
        timer.start()


def _send(signal: Signals, processes: Sequence[int]) -> None:
    for process in processes:
        with suppress(ProcessLookupError):
            os.kill(process, signal)


def _fail_when_one_ends(engine: AsyncLLMEngine, processes: list[int]) -> None:
    """Wait until one of the engine's processes ends, then fail all requests in flight.

    vLLM does this only for processes that it has started, and a killed process notifies no client.
    """
    with ExitStack() as opened, suppress(ProcessLookupError):
        descriptors = []
        for process in processes:
            descriptors.append(os.pidfd_open(process))
            opened.callback(os.close, descriptors[-1])
        select.select(descriptors, (), ())
    engine.engine_core.resources.engine_dead = True
    engine.engine_core.shutdown()


def attach(settings: VllmSettings, client: dict[str, Any]) -> AttachedEngine:
    """Return an engine that the caller has to build.

    The process that made the client has already checked the settings.
    """
    settings = prepare(settings)
    choose_sampler(installed())
    return AttachedEngine(settings, client)
