"""What a drain knows of others that feed the same engine (worker/process/front_ends.py)."""

from dataclasses import replace
from typing import Protocol

from worker.engine import Capacity, Engine
from worker.settings import WorkerSettings


class Others(Protocol):
    """The other drains of one engine, and this one's part of it."""

    def share(self, capacity: Capacity) -> Capacity:
        """Return this drain's part of what the engine can take."""

    def of(self, amount: int) -> int:
        """Return this drain's part of a whole number."""

    def begin(self, engine: Engine) -> None:
        """Let them feed an engine that has started; returns at once."""

    async def end(self, *, died: bool) -> None:
        """Let them leave the engine, which is about to be shut down.

        If it died, what they had in it counts a death; else all is handed back. Ends in seconds.
        """

    async def pause(self) -> None:
        """Let them take nothing more; return when nothing of theirs is in flight."""

    def resume(self) -> None:
        """Let them go on."""

    async def ended(self) -> None:
        """Tell them to stop, if nobody has, and wait until they have ended."""


class Share:
    """One of `count` equal parts: `number` 0 is of the drain that has started the engine.

    Knows no other drains. By itself it is what each of the others has, and of 1 it is all.
    """

    def __init__(self, number: int = 0, count: int = 1) -> None:
        self.number = number
        self.count = count

    def share(self, capacity: Capacity) -> Capacity:
        """Return this part of what the engine can take; of a KV cache nobody has a part."""
        slots = self.of(capacity.max_num_seqs)
        return capacity if self.count == 1 else replace(capacity, max_num_seqs=slots)

    def of(self, amount: int) -> int:
        """Return this part of a whole number; all together are that number. No part is less than 1,
        so that none stands still."""
        return max(1, (amount + self.count - 1 - self.number) // self.count)

    def settings(self, settings: WorkerSettings) -> WorkerSettings:
        """Return the settings with this part of what limits a whole worker."""
        if self.count == 1:
            return settings
        parts = {"look_ahead": self.of(settings.look_ahead)} if settings.look_ahead else {}
        return settings.model_copy(update=parts)

    def begin(self, engine: Engine) -> None:
        """Tell nobody."""

    async def end(self, *, died: bool) -> None:
        """Tell nobody."""

    async def pause(self) -> None:
        """Wait for nobody."""

    def resume(self) -> None:
        """Tell nobody."""

    async def ended(self) -> None:
        """Wait for nobody."""
