"""Objects in buckets, through obstore: S3, Google Cloud Storage, Azure; and files behind HTTPS.

They are read by ranges: in order in large blocks, or here and there.

Credentials and endpoint come from where these services' own tools look (AWS_ACCESS_KEY_ID,
AWS_ENDPOINT_URL, GOOGLE_SERVICE_ACCOUNT, AZURE_STORAGE_ACCOUNT_KEY, ...); an endpoint without TLS
needs AWS_ALLOW_HTTP=true.
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
from producer.input.reader import FilePlace, InputUnreadable, Place

#: What can be written, and what can only be read.
_BUCKETS = ("s3", "gs", "az")
_WEB = ("https", "http")
#: obstore's own figures are 10 tries in 180 s.
RETRIES: Any = {"max_retries": 5, "retry_timeout": timedelta(seconds=20)}
#: Bytes of one request of what is read in order. None stays open while Redis is full.
_BLOCK = 8 * 2**20

#: Characters that no name of an object may have here, and obstore's words for a listed one that
#: has such, or `..`, in its name.
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_ODD_NAME = re.compile(r'invalid path: Error parsing Path "(.*)": ', re.DOTALL)
#: What may sign a URL, or be a password in it.
_SIGNED = re.compile(r"\?\S+|(?<=//)[^/\s@]*@")


class BadPlace(WarmqError):
    """A URL names no bucket, or one of a kind that nobody here knows."""

    code = "bad_place"


class ObjectMissing(InputUnreadable):
    """Nothing of that name is there: its bucket says so."""


def is_url(name: str) -> bool:
    """Whether a name is a URL, and no file's."""
    return "://" in name


def is_web(name: str) -> bool:
    """Whether it is a URL that can only be read."""
    return name.partition("://")[0].casefold() in _WEB


def redacted(name: str) -> str:
    """Return a name as messages and Redis may have it: a web page's without what signs it; so is
    one of a kind that nobody here knows, which may be a mistyped `https`."""
    if not is_url(name) or name.partition("://")[0].casefold() in _BUCKETS:
        return name
    scheme, _, rest = name.partition("?")[0].partition("://")
    host, slash, path = rest.partition("/")
    return f"{scheme}://{host.rpartition('@')[2]}{slash}{path}"


def obstore(name: str, module: str = "") -> Any:
    """Return obstore, or a module of it; what is named so needs it.

    Raises:
        ExtraMissing: it is not installed.
    """
    try:
        return importlib.import_module(f"obstore.{module}" if module else "obstore")
    except ImportError as error:
        raise ExtraMissing(
            f"{redacted(name)}: needs obstore ({error}): pip install 'warmq[buckets]'"
        ) from None


def bucket_errors() -> tuple[type[Exception], ...]:
    """Return what obstore raises where a bucket cannot be used."""
    # ValueError: of a name that its client does not take.
    return (obstore("a bucket", "exceptions").BaseError, OSError, ValueError)


def error_text(error: Exception) -> str:
    """Return an error of obstore in one line: what follows is its source code's."""
    lines = [line.strip() for line in str(error).splitlines()]
    return _SIGNED.sub("", next(filter(None, lines), type(error).__name__))[:300]


def odd_name(error: Exception) -> str:
    """Return the name of the object that obstore cannot list; '' of another error."""
    found = _ODD_NAME.search(str(error))
    return found[1] if found else ""


def split(url: str) -> tuple[str, str]:
    """Return the URL of the bucket and the object's key in it.

    Raises:
        BadPlace: it names no bucket, or there is no such kind.
    """
    scheme, _, rest = url.partition("://")
    bucket, _, key = rest.partition("/")
    if scheme.casefold() not in (*_BUCKETS, *_WEB):
        kinds = ", ".join(f"{kind}://" for kind in _BUCKETS)
        raise BadPlace(f"{redacted(url)}: give {kinds} and a bucket, https:// to read, or a file")
    if not bucket:
        what = "host" if is_web(url) else "bucket"
        raise BadPlace(f"{redacted(url)}: no {what} is named; give {scheme}://{what.upper()}/NAME")
    if not is_web(url):
        _check_key(url, key)
    # What follows the host of a web page is its own: it may have a query, which signs it.
    return (url, "") if is_web(url) else (f"{scheme.casefold()}://{bucket}", key)


def _check_key(url: str, key: str) -> None:
    """Refuse names that obstore cannot have. The last part may be empty: that is a folder."""
    if found := _CONTROL.search(key):
        raise BadPlace(f"{url!r}: its name has {found[0]!r}; write the name without it")
    *folders, name = key.split("/")
    for part in (*folders, name or "x"):
        if not part:
            raise BadPlace(f"{url}: its name has an empty part; write one / instead of //")
        if part in (".", ".."):
            raise BadPlace(f"{url}: its name has a part {part!r}; write the name without it")


def open_bucket(url: str) -> tuple[Any, str]:
    """Return the store of an object's bucket, and the object's key.

    Raises:
        BadPlace: it names no bucket, or its credentials are wrong in form.
        ExtraMissing: obstore is not installed.
    """
    bucket, key = split(url)
    store = obstore(url, "store")
    more = {"client_options": {"allow_http": True}} if is_web(url) else {}
    wrong: tuple[type[Exception], ...] = (*bucket_errors(), TypeError)
    try:
        return store.from_url(bucket, retry_config=RETRIES, **more), key
    except wrong as error:
        raise BadPlace(f"{redacted(url)}: {error_text(error)}; {credentials(url)}") from None


def credentials(url: str) -> str:
    """Return where the credentials of a URL's service are looked for."""
    names = {
        "s3": "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_REGION and, beside Amazon's, "
        "AWS_ENDPOINT_URL",
        "gs": "GOOGLE_SERVICE_ACCOUNT or GOOGLE_APPLICATION_CREDENTIALS",
        "az": "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
    }
    found = names.get(url.partition("://")[0].casefold())
    return f"set {found} in the environment" if found else "check the address"


def keys_under(url: str) -> Iterator[str]:
    """Yield the URLs of the objects whose names begin with a URL's, sorted.

    Raises:
        BadPlace: the bucket cannot be listed.
    """
    store, key = open_bucket(url)
    bucket, _ = split(url)
    try:
        pages = obstore(url).list(store, prefix=key.rstrip("/") or None)
        found = sorted(meta["path"] for page in pages for meta in page)
    except bucket_errors() as error:
        if odd := odd_name(error):
            raise BadPlace(
                f"{url} cannot be listed: there is an object {odd!r}, whose name cannot be used; "
                "rename it, or give the name of one file"
            ) from None
        raise BadPlace(f"{url} cannot be listed: {error_text(error)}; {credentials(url)}") from None
    yield from (f"{bucket}/{path}" for path in found)


def place_of(name: str) -> Place:
    """Return the place that a name stands for; raises as ObjectPlace does."""
    return ObjectPlace(name) if is_url(name) else FilePlace(name)


class ObjectPlace:
    """The object at a URL.

    Raises:
        BadPlace, ExtraMissing: as `open_bucket` does.
    """

    def __init__(self, url: str) -> None:
        self.name = redacted(url)
        self._url = url
        self._store, self._key = open_bucket(url)

    @cached_property
    def _meta(self) -> dict[str, Any]:
        return self._looked_up()

    def _looked_up(self) -> dict[str, Any]:
        """Ask what there is. A URL that is signed for GET refuses HEAD."""
        try:
            with self._worded():
                return dict(obstore(self.name).head(self._store, self._key))
        except InputUnreadable:
            if not is_web(self.name):
                raise
        with self._worded():
            return dict(obstore(self.name).get(self._store, self._key).meta)

    def anew(self) -> ObjectPlace:
        """Return the same, as it is now."""
        return ObjectPlace(self._url)

    @contextmanager
    def _worded(self) -> Iterator[None]:
        """Tell what obstore raises as what cannot be read."""
        try:
            yield
        except obstore(self.name, "exceptions").PreconditionError:
            raise InputUnreadable(f"{self.name} has changed while it was read") from None
        except FileNotFoundError:
            raise ObjectMissing(f"cannot read {self.name}: there is no such object") from None
        except bucket_errors() as error:
            raise InputUnreadable(f"cannot read {self.name}: {error_text(error)}") from None

    def size(self) -> int:
        """Return its size in bytes."""
        return int(self._meta["size"])

    def fingerprint(self) -> str:
        """Return size and what the bucket says of its content, or when it was written."""
        now = self._looked_up()
        tag = now.get("e_tag") or now["last_modified"].isoformat()
        return f"{now['size']}-{tag}"

    def open(self, *, in_order: bool) -> Any:
        """Return a stream over it; of a server that knows no ranges, over a copy in a file."""
        if self.size() and not self._has_ranges():
            return self._copy()
        return _ObjectStream(self, _BLOCK if in_order else 0)

    def _has_ranges(self) -> bool:
        not_supported = obstore(self.name, "exceptions").NotSupportedError
        try:
            obstore(self.name).get_range(self._store, self._key, start=0, length=1)
        except not_supported:
            return False
        except bucket_errors():
            return True  # what is wrong is told when it is read
        return True

    def _copy(self) -> Any:
        copy = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 - who reads it closes it
        try:
            with self._worded():
                for piece in obstore(self.name).get(self._store, self._key).stream():
                    copy.write(piece)
        except InputUnreadable:
            copy.close()
            raise
        copy.seek(0)
        return copy

    def read(self, start: int, end: int) -> bytes:
        """Return some of its bytes, of the object that was there when it was opened.

        Raises:
            InputUnreadable: it is gone or another, or the bucket cannot be reached.
        """
        options: dict[str, Any] = {"range": (start, end)}
        tag = self._meta.get("e_tag")
        if tag and not tag.startswith("W/"):  # a weak one matches nothing, says RFC 9110
            options["if_match"] = tag
        with self._worded():  # a connection may be cut within what it brings
            answer = obstore(self.name).get(self._store, self._key, options=options)
            found = bytes(answer.bytes())
        if len(found) != end - start or _plain(answer.meta.get("e_tag") or tag) != _plain(tag):
            raise InputUnreadable(f"{self.name} has changed while it was read")
        return found


def _plain(tag: str | None) -> str | None:
    return tag and tag.removeprefix("W/")


class _ObjectStream(io.RawIOBase):
    """Reads an object. `block` bytes are fetched at least, which is for what is read in order."""

    def __init__(self, place: ObjectPlace, block: int) -> None:
        self._place, self._block = place, block
        self._size, self._at = place.size(), 0
        self._start, self._held = 0, b""

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
        if not self._start <= self._at < self._start + len(self._held):
            until = min(self._size, max(end, self._at + self._block))
            self._start, self._held = self._at, self._place.read(self._at, until)
        begin = self._at - self._start
        found = self._held[begin : begin + end - self._at]
        buffer[: len(found)] = found
        self._at += len(found)
        return len(found)
