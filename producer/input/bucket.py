"""Reads objects in buckets (S3, Google Cloud Storage, Azure) and files at https:// URLs.

The library is obstore. Credentials and endpoint come from the environment variables of the
services' own tools (AWS_ACCESS_KEY_ID, AWS_ENDPOINT_URL, GOOGLE_SERVICE_ACCOUNT,
AZURE_STORAGE_ACCOUNT_KEY, ...); an endpoint without TLS also needs AWS_ALLOW_HTTP=true.
"""

from __future__ import annotations

import importlib
import io
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cached_property
from typing import Any

from contract.errors import ExtraMissing, WarmqError
from producer.input.reader import FilePlace, InputUnreadable

#: Schemes of URLs for reading and writing.
_BUCKETS = ("s3", "gs", "az")
#: Schemes of URLs for reading only.
_WEB = ("https", "http")
#: Retries of one request to a bucket; obstore's default is 10 in 180 s.
RETRIES: Any = {"max_retries": 5, "retry_timeout": timedelta(seconds=20)}
#: Bytes that one request reads when an object is read in order.
_BLOCK = 8 * 2**20
#: Characters that obstore refuses in names.
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
#: Pattern of obstore's error for a listed object whose name has such characters or `..`.
_INVALID_PATH = re.compile(r'invalid path: Error parsing Path "(.*)": ', re.DOTALL)
#: Pattern of a signature or password in a URL.
_SIGNED = re.compile(r"\?\S+|(?<=//)[^/\s@]*@")
#: Scheme -> environment variables with the credentials for it.
_CREDENTIALS = {
    "s3": "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_REGION and, for servers other than "
    "Amazon's, AWS_ENDPOINT_URL",
    "gs": "GOOGLE_SERVICE_ACCOUNT or GOOGLE_APPLICATION_CREDENTIALS",
    "az": "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
}


class BadPlace(WarmqError):
    """A URL of a bucket that cannot be used: malformed, refused, or without valid credentials."""

    code = "bad_place"


class ObjectMissing(InputUnreadable):
    """The bucket has no object of that name."""


def is_url(name: str) -> bool:
    """Whether a name is a URL and not a file's name."""
    return "://" in name


def is_web(name: str) -> bool:
    """Whether a name is a read-only URL (http or https)."""
    return _scheme(name) in _WEB


def _scheme(url: str) -> str:
    return url.partition("://")[0].casefold()


def redacted(name: str) -> str:
    """Return a name without the signature and password that a web URL may have.

    URLs of unknown schemes count as web URLs, because the scheme may be a mistyped `https`.
    """
    if not is_url(name) or _scheme(name) in _BUCKETS:
        return name
    scheme, _, rest = name.partition("?")[0].partition("://")
    host, slash, path = rest.partition("/")
    return f"{scheme}://{host.rpartition('@')[2]}{slash}{path}"


def obstore(name: str, module: str = "") -> Any:
    """Return obstore or its `module`.

    Raises ExtraMissing if obstore is not installed; the message begins with `name`.
    """
    try:
        return importlib.import_module(f"obstore.{module}" if module else "obstore")
    except ImportError as error:
        raise ExtraMissing(
            f"{redacted(name)}: needs obstore ({error}): pip install 'warmq[buckets]'"
        ) from None


def bucket_errors() -> tuple[type[Exception], ...]:
    """Return the exceptions of obstore for a bucket that cannot be used."""
    # ValueError is for names that obstore's client refuses.
    return (obstore("a bucket", "exceptions").BaseError, OSError, ValueError)


def error_text(error: Exception) -> str:
    """Return an obstore error's first line without secrets; the other lines are source code."""
    lines = [line.strip() for line in str(error).splitlines()]
    return _SIGNED.sub("", next(filter(None, lines), type(error).__name__))[:300]


def invalid_listed_name(error: Exception) -> str:
    """Return the name of the object that obstore cannot list; '' for another error."""
    found = _INVALID_PATH.search(str(error))
    return found[1] if found else ""


def split_url(url: str) -> tuple[str, str]:
    """Return the bucket's URL and the object's key; a web URL has no key."""
    scheme, _, rest = url.partition("://")
    bucket, _, key = rest.partition("/")
    if _scheme(url) not in (*_BUCKETS, *_WEB):
        kinds = ", ".join(f"{kind}://BUCKET/NAME" for kind in _BUCKETS)
        raise BadPlace(
            f"{redacted(url)}: give an object ({kinds}), a URL to read (https://…), or a file"
        )
    if not bucket:
        what = "host" if is_web(url) else "bucket"
        raise BadPlace(f"{redacted(url)}: no {what} is named; give {scheme}://{what.upper()}/NAME")
    if is_web(url):  # the path may have a query, which signs it
        return url, ""
    _check_key(url, key)
    return f"{scheme.casefold()}://{bucket}", key


def _check_key(url: str, key: str) -> None:
    """Raise BadPlace for a key that obstore refuses. The key of a folder ends with `/`."""
    if found := _CONTROL.search(key):
        raise BadPlace(f"{url!r}: its name has {found[0]!r}; write the name without it")
    *folders, name = key.split("/")
    for part in (*folders, name or "x"):  # a folder's key has no name after the last `/`
        if not part:
            raise BadPlace(f"{url}: its name has an empty part; write one / instead of //")
        if part in (".", ".."):
            raise BadPlace(f"{url}: its name has a part {part!r}; write the name without it")


def open_bucket(url: str) -> tuple[Any, str]:
    """Return obstore's store for a URL's bucket, and the object's key.

    Raises BadPlace also for malformed credentials; ExtraMissing without obstore.
    """
    bucket, key = split_url(url)
    store = obstore(url, "store")
    more = {"client_options": {"allow_http": True}} if is_web(url) else {}
    errors: tuple[type[Exception], ...] = (*bucket_errors(), TypeError)
    try:
        return store.from_url(bucket, retry_config=RETRIES, **more), key
    except errors as error:
        raise BadPlace(f"{redacted(url)}: {error_text(error)}; {credentials(url)}") from None


def credentials(url: str) -> str:
    """Return a remedy: the names of the variables for a service's credentials."""
    names = _CREDENTIALS.get(_scheme(url))
    return f"set {names} in the environment" if names else "check the address"


def urls_under(url: str) -> Iterator[str]:
    """Yield the URLs of the objects in the folder at `url`, sorted."""
    store, key = open_bucket(url)
    bucket, _ = split_url(url)
    try:
        pages = obstore(url).list(store, prefix=key.rstrip("/") or None)
        paths = sorted(meta["path"] for page in pages for meta in page)
    except bucket_errors() as error:
        if name := invalid_listed_name(error):
            raise BadPlace(
                f"{url} cannot be listed: there is an object {name!r}, whose name cannot be used; "
                "rename it, or give the name of one file"
            ) from None
        raise BadPlace(f"{url} cannot be listed: {error_text(error)}; {credentials(url)}") from None
    yield from (f"{bucket}/{path}" for path in paths)


def place_of(name: str) -> FilePlace | ObjectPlace:
    """Return the file or object with this name."""
    return ObjectPlace(name) if is_url(name) else FilePlace(name)


class ObjectPlace:
    """The object at a URL. Raises the errors of `open_bucket`."""

    def __init__(self, url: str) -> None:
        self.name = redacted(url)
        self._url = url
        self._store, self._key = open_bucket(url)
        self._obs, self._exceptions = obstore(url), obstore(url, "exceptions")

    @cached_property
    def _meta(self) -> dict[str, Any]:
        return self._fetch_meta()

    def _fetch_meta(self) -> dict[str, Any]:
        try:
            with self._as_unreadable():
                return dict(self._obs.head(self._store, self._key))
        except InputUnreadable:
            if not is_web(self.name):
                raise
        with self._as_unreadable():  # a URL that is signed for GET does not allow HEAD
            return dict(self._obs.get(self._store, self._key).meta)

    @contextmanager
    def _as_unreadable(self) -> Iterator[None]:
        """Raise obstore's errors as InputUnreadable."""
        try:
            yield
        except self._exceptions.PreconditionError:
            raise self._changed() from None
        except FileNotFoundError:
            raise ObjectMissing(f"cannot read {self.name}: there is no such object") from None
        except bucket_errors() as error:
            raise InputUnreadable(f"cannot read {self.name}: {error_text(error)}") from None

    def _changed(self) -> InputUnreadable:
        return InputUnreadable(f"{self.name} has changed while it was read")

    def reopen(self) -> ObjectPlace:
        """Return the object as it is now."""
        return ObjectPlace(self._url)

    def size(self) -> int:
        return int(self._meta["size"])

    def fingerprint(self) -> str:
        """Return the size with the ETag, or with the time of the last change."""
        meta = self._fetch_meta()
        tag = meta.get("e_tag") or meta["last_modified"].isoformat()
        return f"{meta['size']}-{tag}"

    def open(self, *, in_order: bool) -> Any:
        """Return a stream; from a server without range requests, a stream over a local copy."""
        if self.size() and not self._has_ranges():
            return self._copy()
        return _ObjectStream(self, _BLOCK if in_order else 0)

    def _has_ranges(self) -> bool:
        try:
            self._obs.get_range(self._store, self._key, start=0, length=1)
        except self._exceptions.NotSupportedError:
            return False
        except bucket_errors():
            return True  # reading raises the error
        return True

    def _copy(self) -> Any:
        copy = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 - the caller closes it
        try:
            with self._as_unreadable():
                for piece in self._obs.get(self._store, self._key).stream():
                    copy.write(piece)
        except InputUnreadable:
            copy.close()
            raise
        copy.seek(0)
        return copy

    def read(self, start: int, end: int) -> bytes:
        """Return the bytes from `start` to before `end`; InputUnreadable if the object changed."""
        options: dict[str, Any] = {"range": (start, end)}
        tag = self._meta.get("e_tag")
        if tag and not tag.startswith("W/"):  # a weak tag never matches (RFC 9110)
            options["if_match"] = tag
        with self._as_unreadable():  # the connection may be cut within the answer
            answer = self._obs.get(self._store, self._key, options=options)
            data = bytes(answer.bytes())
        if len(data) != end - start or _strong(answer.meta.get("e_tag") or tag) != _strong(tag):
            raise self._changed()
        return data


def _strong(tag: str | None) -> str | None:
    """Return an ETag without the prefix of a weak one, so that ETags can be compared."""
    return tag and tag.removeprefix("W/")


class _ObjectStream(io.RawIOBase):
    """A seekable stream over an object; fetches at least `block` bytes at a time."""

    def __init__(self, place: ObjectPlace, block: int) -> None:
        self._place, self._block = place, block
        self._size, self._at = place.size(), 0
        self._start, self._buffer = 0, b""

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        self._at = max(0, base + offset)
        return self._at

    def readinto(self, buffer: Any) -> int:
        end = min(self._at + len(buffer), self._size)
        if self._at >= end:
            return 0
        if not self._start <= self._at < self._start + len(self._buffer):
            until = min(self._size, max(end, self._at + self._block))
            self._start, self._buffer = self._at, self._place.read(self._at, until)
        begin = self._at - self._start
        data = self._buffer[begin : begin + end - self._at]
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)
