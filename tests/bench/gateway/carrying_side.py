"""One side of the carrying benchmark: what the carrier does with one file, in a process.

carrying_side.py look FILE BATCH | write BATCH
"""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path

from contract.redis.due import Claim
from contract.settings import load
from gateway.batches.api.record import BatchRecord, encode
from gateway.batches.runner.claimed import ClaimedBatch
from gateway.batches.runner.input_file import validate_input
from gateway.batches.runner.outputs import all_lines, write_files
from gateway.batches.runner.queueing import create_part, parts_for, submit_part
from gateway.http.services import Services
from gateway.redis.leases import Lease
from gateway.served_models import ServedModels
from gateway.settings import GatewaySettings
from producer.heap import keep_free_memory

ENDPOINT = "/v1/completions"


def main(what: str, batch_id: str, path: str = "") -> None:
    """Look a file through and queue it, or write the files of a batch that has ended."""
    keep_free_memory()
    services = Services.open(load(GatewaySettings), "bench-carrying")
    now, base = int(time.time()), services.settings.queue
    record = BatchRecord(
        id=batch_id, tenant="default", endpoint=ENDPOINT, input_file_id="file-x",
        completion_window="24h", created_at=now, expires_at=now + 86_400,
    )  # fmt: skip
    record.parts = parts_for(batch_id, [""], ServedModels.of((), base, f"{base}="), None)
    if what == "look":
        looked = validate_input(Path(path), ENDPOINT, services.settings.max_line_bytes, 0)
        assert looked.requests and not looked.problems, looked.problems
        create_part(services, record, record.parts[0])
        submit_part(services, record, 0, Path(path), lambda summary: None)
    else:
        batch = services.batches.batch(batch_id)
        assert batch is not None
        services.objects.create("batch", record.tenant, record.id, now, encode(record))
        stored = services.objects.get("batch", record.tenant, record.id)
        assert stored is not None
        held = Lease(Claim("batch", record.id, "bench"), lease_s=3600)
        carried = ClaimedBatch(services, held, stored, threading.Event())
        lines = all_lines(services, record, [batch], None)
        written = write_files(carried, lines, lambda: None)
        assert written["counts"].completed == written["counts"].total == batch.number("total")
    services.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
