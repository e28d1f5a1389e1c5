"""Writes files and bucket objects that appear complete, or not at all.

An object is uploaded in parts while it is written. The parts that a killed process leaves are
invisible; the bucket's rule for unfinished uploads removes them.
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
    invalid_listed_name,
    is_web,
    obstore,
    open_bucket,
    redacted,
)

#: Bytes of a file's write buffer.
BUFFER_BYTES = 2**20
#: Ending of a file's name until the file is complete.
UNFINISHED = ".part"
#: Bytes of the smallest upload part (S3 requires 5 MiB), and most upload parts in flight, which are
#: in memory.
_PART_BYTES, _PARTS_IN_FLIGHT = 8 * 2**20, 2
#: Most upload parts of an upload of the expected size. This is half of what S3 allows, because a
#: table of results has the texts twice and may be larger than expected.
_MOST_PARTS, _MIB = 5_000, 2**20
#: Error numbers of a file system without hard links, or with no more links for a file.
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK)


class OutputUnwritable(WarmqError):
    """An output cannot be written. `facts["why"]` is the error text of the disk or bucket."""

    code = "output_unwritable"


class WriteFailed(OutputUnwritable):
    """Writing failed after it had begun, for example on a full disk."""


def unwritable(path: str | Path, error: OSError) -> OutputUnwritable:
    """Return the error for a file that cannot be opened for writing."""
    why = error.strerror or str(error)
    return OutputUnwritable(f"cannot write {path}: {why}", why=why)


def write_failed(path: str | Path, error: OSError) -> WriteFailed:
    """Return the error for a write to an open file that failed."""
    why = error.strerror or str(error)
    return WriteFailed(
        f"cannot write {path}: {why}; free some space there, or name another file", why=why
    )


def check_writable(path: Path) -> None:
    """Raise OutputUnwritable if AtomicFile could not write this file; create nothing."""
    if path.is_dir():
        raise OutputUnwritable(f"cannot write {path}: it is a folder; name a file in it")
    target = Path(os.path.realpath(path))
    folder = target.parent
    if not folder.is_dir():
        raise OutputUnwritable(
            f"cannot write {path}: there is no folder {folder}; create it, or name another folder"
        )
    if len(os.fsencode(_unfinished_path(target).name)) > os.pathconf(folder, "PC_NAME_MAX"):
        raise OutputUnwritable(f"cannot write {path}: File name too long")
    # A regular file is replaced, which takes write access to its folder.
    needed = folder if not path.exists() or path.is_file() else path
    if not os.access(needed, os.W_OK | (os.X_OK if needed is folder else 0)):
        raise OutputUnwritable(f"cannot write {path}: Permission denied")


def _unfinished_path(path: Path) -> Path:
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}{UNFINISHED}")


def _conflict(name: str | Path) -> BatchConflict:
    return BatchConflict(
        f"{name} was written by another process meanwhile, and was left unchanged; move it, and "
        "run the same command again to write the results there"
    )


class _Output:
    """Context manager that commits the output, or discards it after an error."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.commit()
        else:
            self.discard()

    def commit(self) -> None:
        """Let the complete output appear under its name."""
        raise NotImplementedError

    def discard(self) -> str:
        """Remove the output; return the error text if that failed, else ''."""
        raise NotImplementedError


class AtomicFile(_Output):
    """A file written under a temporary name in its folder, and renamed by `commit`.

    A pipe or device (/dev/stdout) is written directly. With `new`, `commit` raises BatchConflict if
    a file of that name has other content. Of two writers one succeeds, because the file system
    creates a name only once; this needs no locks, which some network folders do not have. With
    `durable`, the name too is on disk when `commit` returns.
    """

    def __init__(self, name: str | Path, *, new: bool = False, durable: bool = False) -> None:
        self.path = Path(os.path.realpath(name))  # replaces a link's target
        self._new, self._durable = new, durable
        #: Never reset, so that `commit` sees that another thread's `discard` removed the file.
        self._temporary: Path | None = None
        self._file: BinaryIO
        try:
            mode = self.path.stat().st_mode if self.path.exists() else None
            if mode is not None and not stat.S_ISREG(mode):
                self._file = self.path.open("wb")
                return
            temporary = _unfinished_path(self.path)
            try:
                self._file = temporary.open("xb", BUFFER_BYTES)
                self._temporary = temporary
                if mode is not None:
                    temporary.chmod(stat.S_IMODE(mode))
            except (KeyboardInterrupt, SystemExit):  # a signal after the file was created
                temporary.unlink(missing_ok=True)
                raise
        except OSError as error:
            if self._temporary is not None:
                self.discard()
            raise unwritable(self.path, error) from None

    def write(self, data: bytes) -> None:
        try:
            self._file.write(data)
        except OSError as error:
            raise write_failed(self.path, error) from None

    def sync(self) -> None:
        """Flush to disk; raise WriteFailed if there is no space."""
        try:
            self._file.flush()
            if self._temporary is not None:
                os.fsync(self._file.fileno())
        except OSError as error:
            raise write_failed(self.path, error) from None

    def commit(self) -> None:
        """Rename the file to its final name; raise WriteFailed if another thread discards it."""
        try:
            self.sync()  # on disk before it is visible
            self._file.close()
            if self._temporary is not None:
                self._publish(self._temporary)
            if self._durable:
                _sync_folder(self.path.parent)
        except OSError as error:
            raise write_failed(self.path, error) from None
        finally:
            self.discard()

    def _publish(self, complete: Path) -> None:
        try:
            if self._new and _link(complete, self.path):
                return
        except FileExistsError:
            if filecmp.cmp(complete, self.path, shallow=False):
                return  # an earlier commit of this content was killed after it had linked the file
            raise _conflict(self.path) from None
        complete.replace(self.path)

    def discard(self) -> str:
        """Remove what was written; return ''."""
        if self._temporary is not None:
            self._temporary.unlink(missing_ok=True)
        with suppress(OSError):  # unflushed data is not needed
            self._file.close()
        return ""


def _link(complete: Path, path: Path) -> bool:
    """Link a complete file to its name; return whether that was possible.

    Returns False on a file system without hard links, where an empty file reserves the name. Raises
    FileExistsError if the name is taken.
    """
    try:
        path.hardlink_to(complete)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        path.open("xb").close()
        return False
    return True


def _sync_folder(folder: Path) -> None:
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def part_bytes(expected: int) -> int:
    """Return the bytes of an upload part for an upload of about `expected` bytes."""
    return max(_PART_BYTES, -(-expected // (_MOST_PARTS * _MIB)) * _MIB)


def check_object(url: str) -> None:
    """Raise OutputUnwritable if the bucket of this URL does not answer; create nothing."""
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
        if invalid_listed_name(error):
            return  # the error names another object, so the bucket answers
        raise OutputUnwritable(
            f"cannot write {url}: {error_text(error)}; {credentials(url)}"
        ) from None


class ObjectFile(_Output):
    """A bucket object, uploaded in parts and completed by `commit`.

    `expected` is its size in bytes; it is needed above 40 GB, because all upload parts have one
    size and S3 allows 10,000. With an `owner` (the name of the run that writes the object), it does
    not replace an object with other content. `opened` is the result of `open_bucket`, if the caller
    has it. `at_once` is the number of upload parts in flight.
    """

    def __init__(
        self, url: str, expected: int = 0, *, owner: str = "",
        opened: tuple[Any, str] | None = None, at_once: int = _PARTS_IN_FLIGHT,
    ) -> None:  # fmt: skip
        self._name, self._at_once = url, at_once
        self._store, self._key = opened or open_bucket(url)
        self._expected, self._owner = expected, owner
        self._errors = bucket_errors()
        self._obs = obstore(url)
        self._buffer, self._size, self._digest = bytearray(), 0, hashlib.sha256()
        self._upload: Any = None if owner else self._open_upload()
        #: Equals ObjectPlace.fingerprint(). `commit` sets it if `owner` is given.
        self.fingerprint = ""

    def _open_upload(self) -> Any:
        size = part_bytes(self._expected)
        return self._obs.open_writer(
            self._store, self._key, buffer_size=size, max_concurrency=self._at_once
        )

    def write(self, data: bytes) -> None:
        try:
            if self._owner:
                self._size += len(data)
                self._digest.update(data)
            if self._upload is None:
                self._buffer += data
                if len(self._buffer) <= _PART_BYTES:
                    return
                self._upload, data = self._open_upload(), bytes(self._buffer)
                self._buffer = bytearray()
            self._upload.write(data)
        except self._errors as error:
            raise self._failed(error) from None

    def sync(self) -> None:
        """Do nothing: nothing is visible before `commit`."""

    def commit(self) -> None:
        """Complete the object; raise WriteFailed if it did not appear.

        With an owner, raises BatchConflict if an object with other content exists, or if another
        run writes one.
        """
        try:
            if not self._owner:
                self._upload.close()
            elif self._upload is None:
                self._put_new()
            else:
                self._complete()
        except BatchConflict:
            self.discard()
            raise
        except self._errors as error:
            raise self._failed(error) from None
        self._upload = None

    def _exists_error(self) -> Any:
        return obstore(self._name, "exceptions").AlreadyExistsError

    def _put_new(self) -> None:
        """Put a small object; the bucket accepts it only if no object has its name."""
        try:
            meta = self._obs.put(
                self._store, self._key, bytes(self._buffer), mode="create", use_multipart=False
            )
        except self._exists_error():
            meta = self._check_same()  # an earlier, killed commit may have put it
        self.fingerprint = f"{self._size}-{meta['e_tag']}"

    def _complete(self) -> None:
        """Complete an upload in parts, protected by a lock object.

        A bucket cannot check a condition when it completes an upload, but it lets only one run
        create the lock object. A run that was killed finds its own name in the lock object.
        """
        lock, name = f"{self._key}.writing", self._owner.encode()
        try:
            self._obs.put(self._store, lock, name, mode="create", use_multipart=False)
        except self._exists_error():
            if bytes(self._obs.get(self._store, lock).bytes()) != name:
                raise BatchConflict(
                    f"another run is writing {self._name}: there is {self._name}.writing; wait for "
                    "that run, or remove the object if it was killed; then run the same command "
                    "again"
                ) from None
        try:
            with suppress(FileNotFoundError):
                self._check_same()
            self._upload.close()
            self.fingerprint = f"{self._size}-{self._obs.head(self._store, self._key)['e_tag']}"
        finally:
            with suppress(*self._errors):  # without the right to delete, our lock object stays
                self._obs.delete(self._store, lock)

    def _check_same(self) -> Any:
        """Return the existing object's metadata; raise BatchConflict if its content differs."""
        existing, digest = self._obs.get(self._store, self._key), hashlib.sha256()
        if existing.meta["size"] == self._size:
            for piece in existing.stream():
                digest.update(piece)
        if digest.digest() != self._digest.digest():
            raise _conflict(self._name)
        return existing.meta

    def discard(self) -> str:
        """Abort the upload; return the error text if that failed, else ''."""
        if self._upload is None:
            return ""
        try:
            self._upload.__exit__(WriteFailed, WriteFailed("discarded"), None)  # aborts it
        except self._errors as error:
            return error_text(error)
        return ""

    def _failed(self, error: Exception) -> WriteFailed:
        why = error_text(error)
        return WriteFailed(f"cannot write {self._name}: {why}; {credentials(self._name)}", why=why)
