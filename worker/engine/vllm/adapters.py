"""Loads LoRA adapters when requests ask for them, and unloads those that no request uses.

If vLLM's own cache is full, vLLM drops the adapter that was used least recently, and reads it again
inside a step of the engine. An error then ends the engine with all requests in it, for example if
the folder is gone. So the adapters are counted here: one is unloaded before another one is loaded,
and only while no request uses it. An adapter that cannot be loaded is refused outside of a step.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Self

from contract.errors import EngineDead, RequestRejected, WarmqError
from worker.engine.vllm import names
from worker.engine.vllm.adapter_folder import AdapterFolder, Stamp, check_adapter

log = logging.getLogger(__name__)

#: Seconds between two reads of the folder's names.
LOOK_EVERY_S = 3.0
#: Seconds after which an adapter that vLLM has refused is tried again, although no file changed.
FAILED_S = 60.0
#: Seconds between two checks whether the engine died while it loads an adapter.
DEAD_EVERY_S = 0.5
#: The beginning of the error of a failed call to EngineCore.
_FAILED_CALL = "Call to add_lora method failed: "


class Adapters:
    """The adapters of one engine.

    At most `most` are loaded. Requests of adapters that are not loaded wait. If all loaded ones are
    in use, the one that was used least recently takes no further requests, so that it can be
    unloaded. `load` lets the engine load a folder, and returns vLLM's number of the adapter, which
    `unload` gets. `fixed` are names of models that are never loaded here.
    """

    def __init__(
        self,
        folder: AdapterFolder,
        most: int,
        most_rank: int,
        load: Callable[[str, Path, Stamp], Awaitable[int]],
        unload: Callable[[str, int], Awaitable[Any]],
        dead: Callable[[], bool],
        fixed: Collection[str] = (),
    ) -> None:
        self._fixed = fixed
        self.names: tuple[str, ...] = ()
        self._folder, self._most, self._most_rank = folder, most, most_rank
        self._load, self._unload, self._dead = load, unload, dead
        #: The number of running requests of each loaded adapter, the least recently used first.
        self._users: dict[str, int] = {}
        self._loaded: dict[str, int] = {}
        #: The waiting requests of each adapter; the one that has waited longest first.
        self._waiting: dict[str, list[asyncio.Future[None]]] = {}
        self._changed = asyncio.Event()
        self._failed: dict[str, tuple[Stamp, float, WarmqError]] = {}
        self._loading: asyncio.Task[None] | None = None
        self._looking: asyncio.Task[None] | None = None

    @classmethod
    def of(cls, folder: str, engine: Any, served: Any, dead: Callable[[], bool]) -> Self:
        """Return the adapters of a folder in an AsyncLLM, `served` by its OpenAIServingModels."""
        config, preloaded = engine.vllm_config.lora_config, len(served.lora_requests)
        fixed = {model.name for model in served.base_model_paths} | set(served.lora_requests)

        async def load(name: str, path: Path, stamp: Stamp) -> int:
            # vLLM's prefix cache knows adapters by lora_name: changed files need a new name.
            request = names.LoRARequest(
                lora_name=f"{name} {hash(stamp):x}",
                lora_int_id=served.lora_id_counter.inc(1),
                lora_path=str(path),
            )
            number = int(request.lora_int_id)
            try:
                await engine.add_lora(request)
            except Exception as error:
                if dead():
                    raise EngineDead(str(error), inside=False) from error
                await engine.remove_lora(number)  # vLLM may have loaded a part
                text = " ".join(str(error).removeprefix(_FAILED_CALL).split())
                raise refused(name, text, "Save it again with PEFT, for this model") from error
            served.lora_requests[name] = request
            return number

        async def unload(name: str, number: int) -> None:
            del served.lora_requests[name]
            await engine.remove_lora(number)

        most = config.max_cpu_loras
        if names.current_platform.is_cpu():  # see _check_adapters in options.py
            most = min(most, config.max_loras - 1)
        adapters = cls(
            AdapterFolder(folder), most - preloaded, config.max_lora_rank,
            load, unload, dead, fixed,
        )  # fmt: skip
        adapters._looking = asyncio.create_task(adapters.look())
        return adapters

    @asynccontextmanager
    async def using(self, name: str | None) -> AsyncIterator[None]:
        """Keep an adapter loaded in this context. For no name, or a name of `fixed`, do nothing.

        Raises:
            RequestRejected: the adapter cannot be loaded.
        """
        if not name or name in self._fixed:
            yield
            return
        if name not in self._users:  # a wrong name is refused at once
            await asyncio.to_thread(self._checked, name)
        if name not in self._users or self._is_next_to_unload(name):
            await self._wait(name)
        else:
            self._enter(name)
        try:
            yield
        finally:
            self._users[name] -= 1
            self._changed.set()

    def _is_next_to_unload(self, name: str) -> bool:
        full = len(self._users) >= self._most and all(self._users.values())
        return bool(self._waiting) and full and name == next(iter(self._users))

    def _enter(self, name: str) -> None:
        self._users[name] = self._users.pop(name) + 1  # it is the most recently used one now

    async def _wait(self, name: str) -> None:
        waiter = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(name, []).append(waiter)
        if self._loading is None or self._loading.done():
            self._loading = asyncio.create_task(self._load_waiting())
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                self._users[name] -= 1  # the request has just been let in
            elif waiter in (waiters := self._waiting.get(name, [])):
                waiters.remove(waiter)
                if not waiters:
                    del self._waiting[name]
            self._changed.set()
            raise

    async def _load_waiting(self) -> None:
        """Load one adapter after the other while requests wait."""
        while self._waiting:
            name, error = next(iter(self._waiting)), None
            try:
                if name not in self._users:
                    await self._load_one(name)
            except WarmqError as failed:
                error = failed
            except Exception as failed:  # the requests must not wait for ever
                extra = {"action": "adapter_failed", "adapter": name}
                log.exception("the adapter %s cannot be loaded", name, extra=extra)
                error = (
                    EngineDead(str(failed), inside=False) if self._dead() else _unexplained(name)
                )
            for waiter in self._waiting.pop(name, []):
                if waiter.done():
                    continue
                if error is None:
                    self._enter(name)
                    waiter.set_result(None)
                else:
                    waiter.set_exception(error)

    async def _load_one(self, name: str) -> None:
        """Check an adapter, unload unused ones, and load it, unless no request waits now."""
        path, stamp = await asyncio.to_thread(self._checked, name)
        while len(self._users) >= self._most:
            idle = next((each for each, users in self._users.items() if not users), None)
            if idle is None:
                self._changed.clear()
                await self._changed.wait()
            else:
                number = self._loaded.pop(idle)
                del self._users[idle]
                await self._result_unless_dead(self._unload(idle, number))
            if name not in self._waiting:
                return
        began = time.monotonic()
        try:
            self._loaded[name] = await self._result_unless_dead(self._load(name, path, stamp))
        except RequestRejected as error:
            self._failed[name] = stamp, time.monotonic(), error
            raise
        self._users[name] = 0
        text, seconds = "loaded the adapter %s in %.2f s", time.monotonic() - began
        log.info(text, name, seconds, extra={"action": "adapter_loaded", "adapter": name})

    def _checked(self, name: str) -> tuple[Path, Stamp]:
        """Return an adapter's folder and stamp. Raises WarmqError if it cannot be loaded."""
        path, stamp = self._folder.find(name, self.names), self._folder.stamp(name)
        if finding := check_adapter(path, self._most_rank):
            raise refused(name, finding.problem, finding.remedy)
        before, at, error = self._failed.pop(name, ((), 0.0, None))
        if error is not None and before == stamp and time.monotonic() < at + FAILED_S:
            self._failed[name] = before, at, error
            raise type(error)(error.message, code=error.code)
        return path, stamp

    async def _result_unless_dead(self, call: Awaitable[Any]) -> Any:
        """Return the result of a call of vLLM, which waits for ever if the engine dies.

        Raises:
            EngineDead: the engine has died.
        """
        task = asyncio.ensure_future(call)
        try:
            while not (await asyncio.wait([task], timeout=DEAD_EVERY_S))[0]:
                if self._dead():
                    raise EngineDead("the engine is dead", inside=False)
            return task.result()
        finally:
            task.cancel()

    def listed(self) -> tuple[str, ...]:
        """Return the names in the folder that requests may name."""
        return self.names

    async def look(self) -> None:
        """Read the folder's names until cancelled."""
        reason = ""
        while True:
            try:
                names_in_folder = await asyncio.to_thread(self._folder.names)
                self.names, reason = tuple(n for n in names_in_folder if n not in self._fixed), ""
            except OSError as error:
                if reason != (reason := str(error.strerror)):
                    text = "WARMQ_ADAPTERS: %s cannot be read: %s"
                    log.warning(text, self._folder.path, reason, extra={"action": "adapters_gone"})
            await asyncio.sleep(LOOK_EVERY_S)

    def close(self) -> None:
        """End the tasks, from any thread. Called when no request runs."""
        for task in filter(None, (self._loading, self._looking)):
            with suppress(RuntimeError):  # the loop is closed
                task.get_loop().call_soon_threadsafe(task.cancel)


def refused(name: str, problem: str, remedy: str) -> RequestRejected:
    """Return the error for a request whose adapter cannot be loaded."""
    return RequestRejected(
        f"field body.model: the adapter {name} cannot be loaded: {problem}. {remedy}",
        code="adapter_unusable",
        field="body.model",
    )


def _unexplained(name: str) -> RequestRejected:
    return refused(name, "the worker's log has the reason", "Ask the operator")
