"""Reads the memory and the last log lines that workers have written for the page."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import msgspec

from contract.redis import keys
from contract.redis.reads import Reads


class Machine(msgspec.Struct):
    """A worker's report: used and total bytes of memory; time, level and text of log lines."""

    host: tuple[int, int] | None = None
    device: tuple[int, int] | None = None
    log: list[tuple[float, str, str]] = []


_decode = msgspec.json.Decoder(Machine).decode


class MachineReads(Reads):
    """Reads workers' reports. Calls raise StoreUnavailable."""

    def reports(self, workers: Sequence[str]) -> dict[str, dict[str, Any]]:
        """Return the reports by worker; an empty one for a worker without a report."""
        raws = self._each("get", [keys.machine_key(worker) for worker in workers])
        reports = {}
        for worker, raw in zip(workers, raws, strict=True):
            report = Machine()
            with suppress(msgspec.DecodeError):  # another program's value
                report = _decode(raw) if raw else report
            reports[worker] = msgspec.structs.asdict(report)
        return reports
