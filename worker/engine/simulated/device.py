"""Simulates one device's memory, which engines of this process share, awake or asleep."""

import asyncio
from contextlib import suppress
from typing import ClassVar

from contract.errors import RequestFailed
from worker.engine.simulated import ASLEEP_BYTES

#: Bytes of the device that an engine has while it is awake.
AWAKE_BYTES = 10 * ASLEEP_BYTES


class DeviceShare:
    """One engine's part of the device; `sleep_as` is SimulatedTests.sleep."""

    #: The bytes of each engine.
    _held: ClassVar[dict[int, int]] = {}

    def __init__(self, sleep_as: str) -> None:
        self._sleep_as = sleep_as
        self._asleep = False
        #: The answer to the fixed question of CanSleep.
        self.answer = "4"

    def load(self) -> None:
        """Take the memory of an engine that is awake."""
        self._held[id(self)] = AWAKE_BYTES

    def free(self) -> None:
        """Give all memory back."""
        self._held.pop(id(self), None)

    def used(self) -> int:
        """Return the bytes in use by all engines of this process."""
        return sum(self._held.values())

    async def sleep(self) -> None:
        """Give back all but ASLEEP_BYTES."""
        if self._sleep_as == "hangs":
            await _hang()
        if self._sleep_as == "fails":
            raise RuntimeError("the simulated engine cannot sleep")
        self._asleep = True
        if self._sleep_as != "leaks":
            self._held[id(self)] = ASLEEP_BYTES

    async def wake_up(self) -> None:
        """Take the memory again."""
        if self._sleep_as == "wake-hangs":
            await _hang()
        self._asleep = False
        self.load()
        if self._sleep_as == "wrong":
            self.answer = "5"

    def refuse_asleep(self) -> None:
        """Fail a request to an engine that sleeps: the worker must not send one."""
        if self._asleep:
            raise RequestFailed("the simulated engine sleeps")


async def _hang() -> None:
    """Never return, and end at the third cancellation only, as a call into a library may."""
    for _ in range(2):
        with suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
    await asyncio.Event().wait()
