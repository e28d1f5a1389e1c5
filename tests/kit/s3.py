"""An S3 server in a process of its own, and what is in it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
from gateway_process import free_port

from demo.stack import eventually


@contextmanager
def s3_server() -> Iterator[str]:
    """Give the URL of an S3 server that has the bucket `warmq`."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    server = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-p", str(port)],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip

    def made() -> bool:
        try:
            return httpx.put(f"{url}/warmq").is_success
        except httpx.TransportError:
            return False

    try:
        eventually(made, 60, "the S3 server answers")
        yield url
    finally:
        server.kill()
        server.wait()


def credentials(url: str) -> dict[str, str]:
    """Return the environment that leads to a server."""
    names = {
        "ACCESS_KEY_ID": "id", "SECRET_ACCESS_KEY": "secret", "ENDPOINT_URL": url,
        "REGION": "us-east-1", "ALLOW_HTTP": "true",
    }  # fmt: skip
    return {f"AWS_{name}": value for name, value in names.items()}


def unfinished(url: str) -> int:
    """Return how many uploads were begun and not ended."""
    return httpx.get(f"{url}/warmq?uploads").text.count("<UploadId>")


def there(url: str) -> list[str]:
    """Return the names of the objects."""
    text = httpx.get(f"{url}/warmq").text
    return [part.partition("<")[0] for part in text.split("<Key>")[1:]]
