"""One file of 2,000,000 lines and a gigabyte through the gateway: upload, batch, output, download.

The gateway and its carrier are looked at all the time: how much memory they have at most. While
lines are queued the one worker there holds a single request, so that all of the machine queues;
`producer submit` of the same file has the same. Then a worker with the simulated engine drains all.
"""

from __future__ import annotations

import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import redis
from bench.common import report
from bench.producer_cost.submission import PRODUCER, peak_kb_of, timed, write_file
from kit.gateways.gateway_process import GatewayProcess

from contract.redis.batches import BatchStore
from demo.stack import RedisServer, Worker, eventually

TITLE = "a gigabyte through the gateway"
EXPECTED = {
    "written": "before the first run",
    "queued_to_submit": 0.9,
    "peak_mb": 150,
    "why": "a line is read once more; what is kept of each is 16 bytes, above 200,000 in a file",
}
BARS = {"queued_to_submit": 0.9, "peak_mb": 200}
ENDPOINT = "/v1/completions"


class Peaks:
    """The most memory that a process, and those that it has started, had one by one."""

    def __init__(self, pid: int) -> None:
        self.mb: dict[str, float] = {}
        self._process = psutil.Process(pid)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> Peaks:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._over.wait(0.2):
            for process in [self._process, *self._process.children(recursive=True)]:
                try:
                    name = "carrier" if "runner" in " ".join(process.cmdline()) else "gateway"
                    peak = peak_kb_of(process.pid) / 1024
                except (psutil.NoSuchProcess, FileNotFoundError):
                    continue
                self.mb[name] = max(peak, self.mb.get(name, 0))


@contextmanager
def blocked_worker(url: str, log: Path, store: BatchStore) -> Iterator[None]:
    """Run a worker with one slot, in which a request takes an hour."""
    engine = {"simulated_slots": 1, "simulated_latency_s": 3600, "drain_timeout_s": 1}
    with Worker(url, log, engine="simulated", **engine):
        eventually(lambda: any(w["state"] == "ready" for w in store.announcements()), 60)
        yield


def submitted(path: Path, folder: Path) -> float:
    """Return the seconds that `producer submit` takes."""
    folder.mkdir()
    with RedisServer(folder / "redis") as server, server.client() as client:
        store = BatchStore(client, ttl_ms=3_600_000)
        with blocked_worker(server.url, folder / "worker.log", store):
            return timed([str(PRODUCER), "submit", str(path)], server.url)["wall_s"]


def uploaded(url: str, path: Path) -> str:
    """Upload a file as the SDKs do, in one form; return its id."""
    form = ["-F", "purpose=batch", "-F", f"file=@{path}"]
    done = subprocess.run(
        ["curl", "-sS", "--fail-with-body", *form, f"{url}/v1/files"],
        capture_output=True, check=True,
    )  # fmt: skip
    file_id: str = httpx.Response(200, content=done.stdout).json()["id"]
    return file_id


def carried(path: Path, folder: Path, lines: int, *, whole: bool) -> dict[str, float]:
    """Upload a file and have it queued; if `whole`, have it drained and written, too, and download
    what came of it."""
    found: dict[str, float] = {}
    folder.mkdir()
    with (
        RedisServer(folder / "redis") as server,
        server.client() as client,
        GatewayProcess(server.url, folder, gateway_max_file_bytes=4 * 2**30) as gateway,
    ):
        assert gateway.process is not None
        store = BatchStore(client, ttl_ms=3_600_000)
        with Peaks(gateway.process.pid) as peaks:
            clock = _Clock(found)
            file_id = uploaded(gateway.url, path)
            clock.lap("upload_s")
            with blocked_worker(server.url, folder / "blocked.log", store):
                clock.lap("")
                batch_id = _begun(gateway.url, file_id)
                eventually(lambda: _sealed(client, batch_id), 900, "all lines are queued")
                clock.lap("queued_s")
            if not whole:
                return found
            settings = {"simulated_slots": 256, "simulated_latency_s": 0}
            with Worker(server.url, folder / "worker.log", engine="simulated", **settings):
                eventually(lambda: _state(gateway.url, batch_id) != "in_progress", 1800, "drained")
                clock.lap("drained_s")
                eventually(lambda: _state(gateway.url, batch_id) == "completed", 900, "written")
                clock.lap("written_s")
            got = _downloaded(gateway.url, batch_id)
            clock.lap("download_s")
        assert got == lines, got
    return found | {f"{name}_peak_mb": mb for name, mb in peaks.mb.items()}


class _Clock:
    def __init__(self, found: dict[str, float]) -> None:
        self._found, self._at = found, time.monotonic()

    def lap(self, name: str) -> None:
        now = time.monotonic()
        if name:
            self._found[name] = now - self._at
        self._at = now


def _begun(url: str, file_id: str) -> str:
    body = {"input_file_id": file_id, "endpoint": ENDPOINT, "completion_window": "24h"}
    batch_id: str = httpx.post(f"{url}/v1/batches", json=body).raise_for_status().json()["id"]
    return batch_id


def _sealed(client: redis.Redis, batch_id: str) -> bool:
    batch = BatchStore(client, ttl_ms=3_600_000).batch(batch_id)
    return batch is not None and batch.sealed


def _state(url: str, batch_id: str) -> str:
    answer = httpx.get(f"{url}/v1/batches/{batch_id}", timeout=60).raise_for_status().json()
    assert answer["status"] in ("in_progress", "finalizing", "completed"), answer
    return str(answer["status"])


def _downloaded(url: str, batch_id: str) -> int:
    """Return how many lines the output has."""
    batch = httpx.get(f"{url}/v1/batches/{batch_id}").json()
    assert batch["error_file_id"] is None
    lines = 0
    path = f"{url}/v1/files/{batch['output_file_id']}/content"
    with httpx.stream("GET", path, timeout=60) as answer:
        for piece in answer.raise_for_status().iter_bytes():
            lines += piece.count(b"\n")
    return lines


def measure(quick: bool) -> dict[str, Any]:
    """Run both, in turn, and all of it in the last round; return the part's figures."""
    lines, rounds = (100_000, 1) if quick else (2_000_000, 3)
    found: dict[str, list[float]] = {}
    for number in range(rounds):
        with tempfile.TemporaryDirectory(prefix="warmq-bench-") as name:
            path, folder = Path(name) / "file.jsonl", Path(name)
            write_file(path, lines)
            megabytes = path.stat().st_size / 1e6
            alone_s = submitted(path, folder / "first") if number % 2 == 0 else 0.0
            figures = carried(path, folder / "gateway", lines, whole=number == rounds - 1)
            alone_s = alone_s or submitted(path, folder / "second")
        figures["queued_to_submit"] = alone_s / figures["queued_s"]
        figures["lines_per_s_queued"] = lines / figures["queued_s"]
        figures["lines_per_s_submit"] = lines / alone_s
        for key, value in figures.items():
            found.setdefault(key, []).append(value)
    found["peak_mb"] = [max(found["gateway_peak_mb"][-1], found["carrier_peak_mb"][-1])]
    return {
        "lines": lines, "file_mb": megabytes,
        "reached": {name: report.spread(values, 3) for name, values in found.items()},
    }  # fmt: skip
