"""An HTTP server that webhooks are sent to."""

from __future__ import annotations

import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from demo.stack import eventually


class Receiver:
    """An HTTP server that answers what `answers` says, and keeps what it was sent."""

    def __init__(self, answers: Callable[[int], int] = lambda _: 200, stays: float = 0) -> None:
        self.got: list[tuple[dict[str, str], bytes]] = []
        self.release = threading.Event()
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                receiver.got.append(({k.lower(): v for k, v in self.headers.items()}, body))
                status = answers(len(receiver.got))
                if stays:
                    receiver.release.wait(stays)
                self.send_response(status)
                if status == 302:
                    self.send_header("location", receiver.url)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/hook"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def __enter__(self) -> Receiver:
        return self

    def __exit__(self, *_: object) -> None:
        self.release.set()
        self._server.shutdown()
        self._server.server_close()

    def wait(self, count: int = 1, timeout_s: float = 30) -> None:
        """Wait until it was sent so many."""
        eventually(lambda: len(self.got) >= count, timeout_s, f"{count} deliveries")

    def ids(self) -> list[str]:
        """Return the id of each delivery, as it came."""
        return [headers["webhook-id"] for headers, _ in self.got]
