"""An S3 server in a process of its own, and what is in it; also for Google's client, whose XML
interface speaks like S3 but for who it says it is."""

from __future__ import annotations

import http.server
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from kit.gateways.gateway_process import free_port

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


#: Who asks, as S3 is told; moto looks up whose objects these are, and checks no signature.
_WHO = "AWS4-HMAC-SHA256 Credential=id/20260101/us-east-1/s3/aws4_request, Signature=0"


def google_credentials(url: str, folder: Path) -> dict[str, str]:
    """Return the environment that leads `gs://` to a `Gate`; a file of it goes into a folder."""
    path = folder / "google.json"
    empty = dict.fromkeys(("client_email", "private_key", "private_key_id"), "")
    path.write_text(json.dumps(empty | {"gcs_base_url": url, "disable_oauth": True}))
    return {"GOOGLE_SERVICE_ACCOUNT": str(path)}


def unfinished(url: str) -> int:
    """Return how many uploads were begun and not ended."""
    return httpx.get(f"{url}/warmq?uploads").text.count("<UploadId>")


def there(url: str) -> list[str]:
    """Return the names of the objects."""
    text = httpx.get(f"{url}/warmq").text
    return [part.partition("<")[0] for part in text.split("<Key>")[1:]]


class Gate:
    """A server before an S3 server. It holds what completes an object: the request, so that it is
    never done, or the answer, so that it is done and nobody hears of it. It refuses to let objects
    be read, as it is told."""

    def __init__(self, behind: str, name: str = "") -> None:
        self._behind, self.name = behind, name
        #: The status that GET and HEAD of an object get; 0: they pass.
        self.refuses = 0
        #: `request`, `answer`, or `` to hold nothing.
        self.holds = ""
        #: Whether something was held.
        self.held = threading.Event()
        #: What was asked, as `PUT /warmq/name`, and the status that a method gets without asking.
        self.asked: list[str] = []
        self.answers: dict[str, int] = {}
        self._open = threading.Event()

    def __enter__(self) -> Gate:
        gate = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: object) -> None:
                pass

            def __getattr__(self, name: str) -> Any:
                if name.startswith("do_"):
                    return lambda: gate._pass(self)
                raise AttributeError(name)

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._client = httpx.Client(timeout=60)
        return self

    def __exit__(self, *_: object) -> None:
        self.let_go()
        self._server.shutdown()
        self._server.server_close()
        self._client.close()

    def let_go(self) -> None:
        """Answer nobody who is held, and hold nothing any more."""
        self.holds = ""
        self._open.set()

    def hold(self, what: str) -> None:
        """Hold the next one."""
        self.held.clear()
        self._open.clear()
        self.holds = what

    def _pass(self, asked: http.server.BaseHTTPRequestHandler) -> None:
        body = asked.rfile.read(int(asked.headers.get("content-length") or 0))
        path, _, query = asked.path.partition("?")
        self.asked.append(f"{asked.command} {path}")
        if (status := self.answers.get(asked.command)) is not None:
            asked.send_response(status)
            asked.send_header("content-length", "0")
            return asked.end_headers()
        completes = path == f"/warmq/{self.name}" and (
            (asked.command == "POST" and query.startswith("uploadId="))
            or (asked.command == "PUT" and not query)
        )
        if completes and self.holds == "request":
            return self._keep(asked)
        if self.refuses and asked.command in ("GET", "HEAD") and path.startswith("/warmq/"):
            asked.send_response(self.refuses)
            asked.send_header("content-length", "0")
            return asked.end_headers()
        headers = {k.lower(): v for k, v in asked.headers.items() if k.lower() != "host"}
        if not headers.get("authorization", "").startswith("AWS4"):  # of Google's client
            headers["authorization"] = _WHO
        found = self._client.request(
            asked.command, self._behind + asked.path, headers=headers, content=body
        )
        if completes and self.holds == "answer":
            return self._keep(asked)
        asked.send_response(found.status_code)
        for name, value in found.headers.items():
            if name.lower() not in ("transfer-encoding", "connection", "content-length"):
                asked.send_header(name, value)
        size = found.headers.get("content-length") if asked.command == "HEAD" else None
        asked.send_header("content-length", size or str(len(found.content)))
        asked.end_headers()
        asked.wfile.write(b"" if asked.command == "HEAD" else found.content)
        return None

    def _keep(self, asked: http.server.BaseHTTPRequestHandler) -> None:
        self.held.set()
        self._open.wait(60)
        asked.close_connection = True
