"""Observers outside the code under test: what Redis wrote, and what the engines computed.

Redis's append-only file holds every write that took effect, in order, also those of
scripts (each script's effects stand between MULTI and EXEC), over restarts of Redis and
deaths of everybody else. So no commit can escape, and a refused `SET ... NX` is not one.
"""

from __future__ import annotations

import itertools
import mmap
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from kit.protocol.snapshot import request_of

from contract import naming
from contract.redis import keys

#: Options of a Redis whose append-only file is to be read: one plain file, never rewritten.
WATCHED = (
    "--appendonly", "yes", "--aof-use-rdb-preamble", "no", "--auto-aof-rewrite-percentage", "0",
)  # fmt: skip
_RESULT = naming.RESULT_PREFIX.encode()
_WORKER = keys.worker_key("").encode()
_LEASES = keys.LEASES.encode()
#: What changes how long a result lives, not what it says.
_LIFE = (b"EXPIRE", b"PEXPIRE", b"PEXPIREAT", b"EXPIREAT", b"PERSIST")
_FAILED = b'{"status":"FAILURE"'


@dataclass
class Writes:
    """What became of result keys. `commits` counts writes of each request's result."""

    commits: Counter[str] = field(default_factory=Counter)
    #: Results that were written over, or changed in another way, while they were visible.
    changed: list[str] = field(default_factory=list)
    #: Failures written by a worker that did not hold the request's lease.
    usurped: list[str] = field(default_factory=list)
    #: How often a lease was given for each request.
    leased: Counter[str] = field(default_factory=Counter)
    #: How many leases were taken from each worker because they had expired.
    swept: Counter[str] = field(default_factory=Counter)


def commands(folder: Path) -> Iterator[list[bytes]]:
    """Yield the commands in a Redis's append-only file; one cut short at the end is left out."""
    single = folder / "appendonly.aof"
    files = [single] if single.exists() else sorted((folder / "appendonlydir").glob("*.incr.aof"))
    for file in files:
        if not file.stat().st_size:
            continue
        # A campaign with large messages writes gigabytes.
        with file.open("rb") as opened:
            data = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
        at = 0
        while at < len(data):
            end = data.find(b"\r\n", at)
            if end < 0:
                return
            count, at, words = int(data[at + 1 : end]), end + 2, []
            for _ in range(count):
                end = data.find(b"\r\n", at)
                if end < 0:
                    return
                size = int(data[at + 1 : end])
                words.append(data[end + 2 : end + 2 + size])
                at = end + 4 + size
            if at > len(data):
                return
            yield words


def scripts(folder: Path) -> Iterator[list[list[bytes]]]:
    """Yield what each script has changed, as commands; one that nobody ran in a script, alone."""
    script: list[list[bytes]] | None = None
    for words in commands(folder):
        name = words[0].upper()
        if name == b"MULTI":
            script = []
        elif name == b"EXEC":
            yield script or []
            script = None
        elif script is not None:
            script.append(words)
        else:
            yield [words]


def read_writes(folder: Path) -> Writes:
    """Return what the append-only file in Redis's folder tells about results."""
    reader = _Reader()
    for script in scripts(folder):
        reader.take(script)
    return reader.writes


class _Reader:
    def __init__(self) -> None:
        self.writes = Writes()
        self._visible: set[str] = set()
        self._request_of: dict[bytes, str] = {}
        self._returning: set[bytes] = set()

    def take(self, script: list[list[bytes]]) -> None:
        """Apply one script's effects, or one command."""
        named = {(words[0].upper(), words[1]) for words in script if len(words) > 1}
        # Failures need no lease where Redis itself decides: bad lines and dead letters.
        free = any(key.endswith(b":index") for _, key in named) or (b"HSET", b"warmq:dead") in named
        ended = [lease for words in script
                 if words[0].upper() == b"ZREM" and words[1] == _LEASES
                 for lease in words[2:]]  # fmt: skip
        owned = {self._request_of.get(lease) for lease in ended}
        # A negative score says that a lease is on its way back; the message may follow later.
        scored = [words for words in script if words[:2] == [b"ZADD", keys.LEASES.encode()]]
        sent = {
            lease
            for words in scored
            for score, lease in itertools.pairwise(words[2:])
            if score.startswith(b"-")
        }
        if (b"HSET", keys.SWEEP.encode()) in named:
            taken = sent | (set(ended) - self._returning)
            self.writes.swept.update(lease.decode().rpartition("/")[0] for lease in taken)
        self._returning = (self._returning | sent) - set(ended)
        for words in script:
            self._command(words, owned, free)

    def _command(self, words: list[bytes], owned: set[str | None], free: bool) -> None:
        name = words[0].upper()
        if name in (b"DEL", b"UNLINK"):
            self._visible -= {_request(key) for key in words[1:] if key.startswith(_RESULT)}
        elif name in (b"HSET", b"HMSET") and words[1].startswith(_WORKER):
            for lease, record in zip(words[2::2], words[3::2], strict=True):
                self._lease(lease, record)
        elif name in _LIFE:
            return
        elif len(words) > 1 and words[1].startswith(_RESULT):
            self._result(words, owned, free)

    def _lease(self, lease: bytes, record: bytes) -> None:
        if lease in self._request_of:
            return  # its record is only marked anew
        request = self._request_of[lease] = request_of(record)
        self.writes.leased[request] += 1

    def _result(self, words: list[bytes], owned: set[str | None], free: bool) -> None:
        request = _request(words[1])
        if words[0].upper() != b"SET" or request in self._visible:
            self.writes.changed.append(request)
        self.writes.commits[request] += 1
        self._visible.add(request)
        if words[2].startswith(_FAILED) and not free and request not in owned:
            self.writes.usurped.append(request)


def _request(key: bytes) -> str:
    return key[len(_RESULT) :].decode()


@dataclass
class Computed:
    """What the simulated engines' log says: starts and ends by request, pids by request."""

    starts: Counter[str] = field(default_factory=Counter)
    ends: Counter[str] = field(default_factory=Counter)
    pids: dict[str, list[int]] = field(default_factory=dict)

    @property
    def again(self) -> int:
        """How many computations were begun that had been begun before."""
        return sum(count - 1 for count in self.starts.values())

    def began_on(self, pid: int) -> set[str]:
        """Return what a worker began."""
        return {request for request, pids in self.pids.items() if pid in pids}


class EngineLog:
    """Reads the log that simulated engines append to; each look reads only what is new."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read = 0
        self._computed = Computed()

    def look(self) -> Computed:
        """Return what the engines have computed so far."""
        if not self._path.exists():
            return self._computed
        with self._path.open("rb") as file:
            file.seek(self._read)
            new = file.read()
        whole = new[: new.rfind(b"\n") + 1]
        self._read += len(whole)
        for line in whole.decode().splitlines():
            what, request, pid = line.split()
            if what == "start":
                self._computed.starts[request] += 1
                self._computed.pids.setdefault(request, []).append(int(pid))
            else:
                self._computed.ends[request] += 1
        return self._computed
