"""Files and objects that are written: they appear when they are complete, or not at all.

The parts of an object go up while it is written. Killed half-way it leaves nothing that anybody
sees; the parts that are left over are removed by the bucket's own rule for unfinished uploads.
"""

from __future__ import annotations

import errno
import filecmp
import hashlib
import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, Self

from contract.errors import BatchConflict, WarmqError
from producer.input.bucket import (
    bucket_errors,
    credentials,
    error_text,
    is_web,
    obstore,
    odd_name,
    open_bucket,
    redacted,
)

#: Written at once to a file that nobody reads before it is whole.
BUFFER_BYTES = 2**20
#: What a file's name ends with until it is complete.
UNFINISHED = ".part"
#: Bytes of a part of an object's upload at the least: S3 takes 5 MiB. So many are under way at
#: once, each held in memory.
_PART, _AT_ONCE = 8 * 2**20, 2
#: S3 takes 10,000 parts. Half of them are enough for what is expected: a table of results, which
#: has the texts twice, may be larger than the lines that it is made of.
_PARTS, _MIB = 5_000, 2**20


class OutputUnwritable(WarmqError):
    """A result file cannot be written: its owner must name another or give rights. The fact
    `why` is what the disk or the bucket says."""

    code = "output_unwritable"


class WriteFailed(OutputUnwritable):
    """Writing ended half-way, as on a full disk: its owner must make room and start again."""


def unwritable(path: str | Path, error: OSError) -> OutputUnwritable:
    """Return the error for a file that cannot be opened."""
    why = error.strerror or str(error)
    return OutputUnwritable(f"cannot write {path}: {why}", why=why)


def write_failed(path: str | Path, error: OSError) -> WriteFailed:
    """Return the error for a file that could be opened, and cannot be written to its end."""
    why = error.strerror or str(error)
    return WriteFailed(f"cannot write {path}: {why}; make room there, or name another", why=why)


def check_writable(path: Path) -> None:
    """Raise OutputUnwritable unless AtomicFile could write a file of that name; creates nothing."""
    if path.is_dir():
        raise OutputUnwritable(f"cannot write {path}: it is a folder; name a file in it")
    folder = Path(os.path.realpath(path)).parent
    if not folder.is_dir():
        raise OutputUnwritable(
            f"cannot write {path}: there is no folder {folder}; make it, or name another"
        )
    name = _beside(Path(os.path.realpath(path))).name
    if len(os.fsencode(name)) > os.pathconf(folder, "PC_NAME_MAX"):
        raise OutputUnwritable(f"cannot write {path}: File name too long")
    # A file is replaced by one that was written beside it; anything else is written to.
    needed = folder if not path.exists() or path.is_file() else path
    if not os.access(needed, os.W_OK | (os.X_OK if needed is folder else 0)):
        raise OutputUnwritable(f"cannot write {path}: Permission denied")


def _beside(path: Path) -> Path:
    """Return a name for a file until it is complete."""
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}{UNFINISHED}")


def _linked(complete: Path, path: Path) -> bool:
    """Give a file a second name that is new; False where the folder has no second names, and the
    name is taken by an empty file.

    Raises:
        FileExistsError: there is a file of that name.
    """
    try:
        path.hardlink_to(complete)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK):
            raise
        path.open("xb").close()
        return False
    return True


class AtomicFile:
    """Written beside its place and renamed by `commit`, or at the end of `with`; a failure leaves
    the place as it was.

    What is no regular file (a pipe, /dev/stdout) is written to directly. A `new` one replaces no
    file: its folder decides which of two writers is the first, where locks do not reach, too. Then
    `commit` raises BatchConflict, unless what is there has the same content. Of a `durable` one the
    name is on disk, too, when it returns.
    """

    def __init__(self, name: str | Path, *, new: bool = False, durable: bool = False) -> None:
        self.path = Path(os.path.realpath(name))  # a link stays, its target is replaced
        self._new, self._durable = new, durable
        #: Where it is until it is complete. It stays: `commit` and `discard` may come from two
        #: threads at once, and what one has removed the other must miss.
        self._temporary: Path | None = None
        self._file: BinaryIO
        try:
            mode = self.path.stat().st_mode if self.path.exists() else None
            if mode is not None and not stat.S_ISREG(mode):
                self._file = self.path.open("wb")
                return
            beside = _beside(self.path)
            try:
                self._file = beside.open("xb", BUFFER_BYTES)
                self._temporary = beside
                if mode is not None:
                    beside.chmod(stat.S_IMODE(mode))
            except (KeyboardInterrupt, SystemExit):  # a signal, which came when it was there
                beside.unlink(missing_ok=True)
                raise
        except OSError as error:
            if self._temporary is not None:
                self.discard()
            raise unwritable(self.path, error) from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.commit()
        else:
            self.discard()

    def commit(self) -> None:
        """Bring it to its place; WriteFailed if another thread discards it meanwhile."""
        try:
            self.sync()  # on disk before it is visible in its place
            self._file.close()
            if self._temporary is not None:
                self._appear(self._temporary)
            if self._durable:
                _sync_folder(self.path.parent)
        except OSError as error:
            raise write_failed(self.path, error) from None
        finally:
            self.discard()  # nothing is left to be discarded if all went well

    def _appear(self, complete: Path) -> None:
        try:
            if self._new and _linked(complete, self.path):
                return
        except FileExistsError:
            if filecmp.cmp(complete, self.path, shallow=False):
                return  # written before, and killed before anybody was told
            raise BatchConflict(
                f"{self.path} was written by somebody else meanwhile, and is left as it is; move "
                "it away, and the same command brings its results there"
            ) from None
        complete.replace(self.path)

    def write(self, data: bytes) -> None:
        """Append to the file."""
        try:
            self._file.write(data)
        except OSError as error:
            raise write_failed(self.path, error) from None

    def sync(self) -> None:
        """Bring what was written to disk; what can fail for want of room fails here."""
        try:
            self._file.flush()
            if self._temporary is not None:
                os.fsync(self._file.fileno())
        except OSError as error:
            raise write_failed(self.path, error) from None

    def discard(self) -> None:
        """Leave the place as it was; what was written is lost."""
        if self._temporary is not None:
            self._temporary.unlink(missing_ok=True)
        try:
            self._file.close()
        except OSError:
            return  # what could not be flushed was to be thrown away


def _sync_folder(folder: Path) -> None:
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def part_bytes(expected: int) -> int:
    """Return the size of the parts of an object of about so many bytes."""
    return max(_PART, -(-expected // (_PARTS * _MIB)) * _MIB)


def check_object(url: str) -> None:
    """Ask the bucket for an object of that name, which need not be there.

    Raises:
        OutputUnwritable: the bucket is not there or refuses, or the URL can only be read.
        BadPlace, ExtraMissing: as `open_bucket` does.
    """
    if is_web(url):
        raise OutputUnwritable(
            f"cannot write {redacted(url)}: give s3://, gs:// or az://, or a file"
        )
    store, key = open_bucket(url)
    if not key or key.endswith("/"):
        raise OutputUnwritable(f"cannot write {url}: it names no object; add its name")
    try:
        list(obstore(url).list(store, prefix=key, chunk_size=1))
    except bucket_errors() as error:
        if odd_name(error):
            return  # of another object, which is nothing to this one: the bucket answers
        raise OutputUnwritable(
            f"cannot write {url}: {error_text(error)}; {credentials(url)}"
        ) from None


class ObjectFile:
    """Written part by part and completed at the end; a failure leaves the place as it was.

    `expected` says of what may have more than 40 GB how many bytes those are: the parts of an
    upload are all of one size (obstore), and S3 takes so many of them. One with an `owner`, the
    name of a run, must not replace an object that has other content. `opened` is what `open_bucket`
    returns, where it is known.
    """

    def __init__(
        self, url: str, expected: int = 0, *, owner: str = "",
        opened: tuple[Any, str] | None = None, at_once: int = _AT_ONCE,
    ) -> None:  # fmt: skip
        self._name, self._at_once = url, at_once
        self._store, self._key = opened or open_bucket(url)
        self._expected, self._owner = expected, owner
        self._errors = bucket_errors()
        self._held, self._size, self._digest = bytearray(), 0, hashlib.sha256()
        self._file: Any = None if owner else self._opened()
        #: Of one with an owner that is complete: what ObjectPlace.fingerprint says of it.
        self.fingerprint = ""

    def _opened(self) -> Any:
        return obstore(self._name).open_writer(
            self._store,
            self._key,
            buffer_size=part_bytes(self._expected),
            max_concurrency=self._at_once,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.commit()
        else:
            self.discard()

    def commit(self) -> None:
        """Complete it.

        Raises:
            WriteFailed: nothing has appeared.
            BatchConflict: of one with an owner, there is another object, or another is written.
        """
        try:
            if not self._owner:
                self._file.close()
            elif self._file is None:
                self._create()
            else:
                self._complete()
        except BatchConflict:
            self.discard()
            raise
        except self._errors as error:
            raise self._failed(error) from None
        self._file = None

    def write(self, data: bytes) -> None:
        """Append to the object."""
        try:
            if self._owner:
                self._size += len(data)
                self._digest.update(data)
            if self._file is None:
                self._held += data
                if len(self._held) <= _PART:
                    return
                self._file, data, self._held = self._opened(), bytes(self._held), bytearray()
            self._file.write(data)
        except self._errors as error:
            raise self._failed(error) from None

    def _create(self) -> None:
        """Write what one request takes under the condition that nothing is there, which the bucket
        decides. There may be what the same delivery wrote, killed before it said so.

        Raises:
            BatchConflict: there is another object.
        """
        obs, exists = obstore(self._name), obstore(self._name, "exceptions").AlreadyExistsError
        content = bytes(self._held)
        try:
            made = obs.put(self._store, self._key, content, mode="create", use_multipart=False)
        except exists:
            made = self._own()
        self.fingerprint = f"{self._size}-{made['e_tag']}"

    def _complete(self) -> None:
        """Complete an upload in parts. Buckets do that without a condition, so whoever does it has
        made an object beside it first, which only one can; who was killed finds its own name there.

        Raises:
            BatchConflict: there is another object, or somebody else is writing it.
        """
        obs, claim = obstore(self._name), f"{self._key}.writing"
        exists = obstore(self._name, "exceptions").AlreadyExistsError
        name = self._owner.encode()
        try:
            obs.put(self._store, claim, name, mode="create", use_multipart=False)
        except exists:
            if bytes(obs.get(self._store, claim).bytes()) != name:
                raise BatchConflict(
                    f"another run is writing {self._name}: there is {self._name}.writing; wait for "
                    "it, or remove that object if it was killed; then the same command goes on"
                ) from None
        try:
            with suppress(FileNotFoundError):
                self._own()
            self._file.close()
            self.fingerprint = f"{self._size}-{obs.head(self._store, self._key)['e_tag']}"
        finally:
            with suppress(*self._errors):  # without the right to delete it stays, and says whose
                obs.delete(self._store, claim)

    def _own(self) -> Any:
        """Return the metadata of what is there if it has this content.

        Raises:
            BatchConflict: it has another one.
        """
        obs = obstore(self._name)
        found, digest = obs.get(self._store, self._key), hashlib.sha256()
        if found.meta["size"] == self._size:
            for piece in found.stream():
                digest.update(piece)
        if digest.digest() != self._digest.digest():
            raise BatchConflict(
                f"{self._name} was written by somebody else meanwhile, and is left as it is; move "
                "it away, and the same command brings its results there"
            )
        return found.meta

    def sync(self) -> None:
        """Do nothing: nothing is there before its end."""

    def discard(self) -> str:
        """Leave the place as it was; the bucket forgets the parts. Return why it does not: it is
        away, and its own rule removes them."""
        if self._file is None:
            return ""
        gone = WriteFailed("discarded")
        try:
            self._file.__exit__(WriteFailed, gone, None)  # with an error it ends, and keeps nothing
        except self._errors as error:
            return error_text(error)
        return ""

    def _failed(self, error: Exception) -> WriteFailed:
        why = error_text(error)
        return WriteFailed(f"cannot write {self._name}: {why}; {credentials(self._name)}", why=why)
