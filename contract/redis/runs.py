"""Creates and changes the records of runs; Reads returns them joined with their windows."""

from __future__ import annotations

import secrets
from collections.abc import Mapping

from contract.batch import Batch
from contract.errors import BatchConflict
from contract.redis import keys
from contract.redis.reads import Reads


class Runs(Reads):
    """Writes records of runs in one Redis. Calls raise StoreUnavailable.

    A record is a batch without requests of its own (contract/lua/run_state.lua).
    """

    def begin(self, run: str, seed: str, fields: Mapping[str, str | int]) -> Batch:
        """Create a run's record unless it exists; return it without the counts of its windows."""
        flat = [part for pair in fields.items() for part in pair]
        # `sealed`: no submit adds lines. It also lets the record be created in a full Redis.
        args = (run, secrets.token_urlsafe(12), seed, "", "sealed", 1, *flat)
        while self._run("create", *args)[0] < 0:
            self._run("delete_chunk", run, b"")  # completes an interrupted delete
        raw = self._client.hgetall(keys.batch_key(run))
        if not raw:
            raise BatchConflict(f"run {run} was deleted meanwhile")
        return Batch(run, {name.decode(): value.decode() for name, value in raw.items()})

    def note(self, run: Batch, fields: Mapping[str, str | int], *, ends: bool = False) -> None:
        """Set fields of a run's record, unless it was deleted; with `ends` the run has ended."""
        flat = [part for pair in fields.items() for part in pair]
        self._run("run_note", run.id, run.life, int(ends), *flat)

    def cancelled(self, run: str) -> bool:
        """Return whether a run was cancelled."""
        return bool(self._client.hexists(keys.batch_key(run), "cancelling"))
