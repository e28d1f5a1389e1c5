"""Objects in buckets, through obstore: S3, Google Cloud Storage, Azure; and files behind HTTPS.

Credentials and endpoint come from where these services' own tools look (AWS_ACCESS_KEY_ID,
AWS_ENDPOINT_URL, GOOGLE_SERVICE_ACCOUNT, AZURE_STORAGE_ACCOUNT_KEY, ...); an endpoint without TLS
needs AWS_ALLOW_HTTP=true.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

from contract.errors import ExtraMissing, WarmqError

#: What can be written, and what can only be read.
_BUCKETS = ("s3", "gs", "az")
_WEB = ("https", "http")
#: obstore's own figures are 10 tries in 180 s.
_RETRIES: Any = {"max_retries": 5, "retry_timeout": timedelta(seconds=20)}


#: Characters that no name of an object may have here, and obstore's words for a listed one that
#: has such, or `..`, in its name.
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_ODD_NAME = re.compile(r'invalid path: Error parsing Path "(.*)": ', re.DOTALL)
#: What may sign a URL, or be a password in it.
_SIGNED = re.compile(r"\?\S+|(?<=//)[^/\s@]*@")


class BadPlace(WarmqError):
    """A URL names no bucket, or one of a kind that nobody here knows."""

    code = "bad_place"


def is_url(name: str) -> bool:
    """Whether a name is a URL, and no file's."""
    return "://" in name


def is_web(name: str) -> bool:
    """Whether it is a URL that can only be read."""
    return name.partition("://")[0].casefold() in _WEB


def shown(name: str) -> str:
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
            f"{shown(name)}: needs obstore ({error}): pip install 'warmq[buckets]'"
        ) from None


def errors_of_bucket() -> tuple[type[Exception], ...]:
    """Return what obstore raises where a bucket cannot be used."""
    # ValueError: of a name that its client does not take.
    return (obstore("a bucket", "exceptions").BaseError, OSError, ValueError)


def told(error: Exception) -> str:
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
        raise BadPlace(f"{shown(url)}: give {kinds} and a bucket, https:// to read, or a file")
    if not bucket:
        what = "host" if is_web(url) else "bucket"
        raise BadPlace(f"{shown(url)}: no {what} is named; give {scheme}://{what.upper()}/NAME")
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
    try:
        return store.from_url(bucket, retry_config=_RETRIES, **more), key
    except _wrong() as error:
        raise BadPlace(f"{shown(url)}: {told(error)}; {credentials(url)}") from None


def _wrong() -> tuple[type[Exception], ...]:
    return (*errors_of_bucket(), ValueError, TypeError)


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
    except errors_of_bucket() as error:
        if odd := odd_name(error):
            raise BadPlace(
                f"{url} cannot be listed: there is an object {odd!r}, whose name cannot be used; "
                "rename it, or give the name of one file"
            ) from None
        raise BadPlace(f"{url} cannot be listed: {told(error)}; {credentials(url)}") from None
    yield from (f"{bucket}/{path}" for path in found)
