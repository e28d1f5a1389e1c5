"""A `producer run` from bucket to bucket that is killed at chosen moments, and what it leaves."""

from __future__ import annotations

import hashlib
import subprocess
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import obstore
import orjson
import pyarrow as pa
import pyarrow.parquet as pq
from kit.commands.support import producer_command, producer_env
from obstore.store import from_url

#: Of each answer: enough that an object of some thousand has several parts.
_WORDS = "lorem ipsum dolor sit amet consectetur adipiscing elit sed do eiusmod tempor "
MAP = ("--map", "prompt={text}", "--map", "custom_id=id")


def text_of(number: int) -> str:
    """Return the prompt of one row; no two are alike, and none is packed well."""
    return f"{hashlib.sha256(b'%d' % number).hexdigest()} {_WORDS}{number}"


def write_table(path: Path, rows: int) -> None:
    """Write a parquet file with columns id, text and one that nobody reads."""
    schema = pa.schema([("id", pa.string()), ("text", pa.string()), ("unread", pa.int64())])
    with pq.ParquetWriter(path, schema) as writer:
        for start in range(0, rows, 50_000):
            numbers = range(start, min(start + 50_000, rows))
            columns = [[f"r{n}" for n in numbers], [text_of(n) for n in numbers], list(numbers)]
            writer.write_table(pa.table(columns, schema=schema))


def write_same_lines(path: Path, rows: int) -> None:
    """Write the file of lines that says the same."""
    with path.open("wb") as file:
        for number in range(rows):
            file.write(orjson.dumps({"custom_id": f"r{number}", "prompt": text_of(number)}) + b"\n")


def upload(path: Path, name: str) -> None:
    """Put a file into the bucket."""
    with path.open("rb") as file:
        obstore.put(from_url("s3://warmq"), name, file)


class _Answers:
    """How many answers there are, and the digest of who asked and what was answered."""

    def __init__(self) -> None:
        self._count, self._digest = 0, hashlib.sha256()

    def add(self, custom_id: str, line: int, body: bytes | str) -> None:
        """Take one; times and ids in the response are of each run."""
        choices = orjson.loads(body)["choices"]
        self._digest.update(orjson.dumps([custom_id, line, choices]))
        self._count += 1

    def told(self) -> tuple[int, str]:
        return self._count, self._digest.hexdigest()


def answers_of_lines(lines: Iterable[bytes]) -> tuple[int, str]:
    """Return number and digest of the answers in lines of results."""
    answers = _Answers()
    for raw in lines:
        line = orjson.loads(raw)
        body = orjson.dumps(line["response"]["body"])
        answers.add(line["custom_id"], line["warmq"]["line"], body)
    return answers.told()


def answers_of_table(data: bytes) -> tuple[int, str]:
    """Return the same of a table of results."""
    answers, table = _Answers(), pq.ParquetFile(pa.BufferReader(data))
    for batch in table.iter_batches(1000, columns=["custom_id", "line", "response"]):
        for row in batch.to_pylist():
            answers.add(row["custom_id"], row["line"], row["response"])
    return answers.told()


def answers_in(name: str) -> tuple[int, str] | None:
    """Return the same of an object, None if there is none."""
    try:
        data = bytes(obstore.get(from_url("s3://warmq"), name).bytes())
    except FileNotFoundError:
        return None
    if name.endswith(".parquet"):
        return answers_of_table(data)
    return answers_of_lines(data.splitlines())


class BucketRun:
    """One process of the producer, in the folder where a run's journal is."""

    def __init__(self, folder: Path, redis_url: str, *args: str | Path) -> None:
        self._told = folder / "run.err"
        with self._told.open("ab") as told:
            self.process = subprocess.Popen(
                producer_command(*args), env=producer_env(redis_url), cwd=folder,
                stdout=subprocess.DEVNULL, stderr=told,
            )  # fmt: skip
        #: The most memory that it has had, in MB.
        self.peak_mb = 0.0

    def look(self) -> bool:
        """Note its memory; return whether it still runs."""
        try:
            status = Path(f"/proc/{self.process.pid}/status").read_text()
        except OSError:
            status = ""
        for line in status.splitlines():
            if line.startswith("VmHWM:"):
                self.peak_mb = max(self.peak_mb, int(line.split()[1]) / 1024)
        return self.process.poll() is None

    def until(self, moment: Callable[[], bool], timeout_s: float) -> bool:
        """Wait for a moment; return False if it has ended before."""
        deadline = time.monotonic() + timeout_s
        while self.look():
            if moment():
                return True
            if time.monotonic() > deadline:
                raise TimeoutError(f"the run goes on: {self.told()}")
            time.sleep(0.02)
        return False

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def ended(self, timeout_s: float) -> int:
        """Return its exit status."""
        self.until(lambda: False, timeout_s)
        return self.process.wait()

    def told(self) -> str:
        return self._told.read_text(errors="replace")[-2000:]
