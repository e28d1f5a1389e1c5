"""How much one worker takes at once."""

from __future__ import annotations

from dataclasses import dataclass

from worker.engine import Capacity, places_of_many
from worker.settings import WorkerSettings


@dataclass(frozen=True, slots=True)
class Room:
    """Requests: `slots` run in the engine, `limit` are in flight at most, and the loop asks Redis
    for more once `low_water` of them are free. `context` is in tokens, 0 where it is not known."""

    slots: int = 0
    limit: int = 0
    low_water: int = 1
    context: int = 0

    @classmethod
    def of(cls, capacity: Capacity, settings: WorkerSettings) -> Room:
        """Return the room of an engine under these settings."""
        slots, look_ahead = capacity.max_num_seqs, settings.look_ahead
        if look_ahead is None:
            # Where all slots are free at once, those of the next step wait already while others
            # are fetched; with a quarter of them every other step would be a quarter full.
            look_ahead = max(8, 2 * slots if capacity.one_step else slots // 4)
        limit = slots + look_ahead
        # Refilling in groups of half the look-ahead halves the POPs at no loss of occupancy.
        low_water = max(1, min(look_ahead // 2, limit))
        return cls(slots, limit, low_water, capacity.max_model_len)

    @property
    def slots_of_many(self) -> int:
        """The slots that requests of many sequences may take: a single one soon finds another."""
        return places_of_many(self.slots)

    @property
    def preparing_each(self) -> int:
        """Of a tenant of which so many requests are being prepared no more are leased: they are
        next, and those of others pass. They are in no slot, and are as many as the look-ahead."""
        return max(1, self.limit - self.slots)

    @property
    def many_waiting(self) -> int:
        """How many requests of many sequences may wait here for slots; a quarter of those that
        wait, so that single ones are leased, too."""
        return max(1, (self.limit - self.slots) // 4)
