"""A web server with one file, that knows ranges and cuts connections as it is told."""

from __future__ import annotations

import http.server
import threading
from typing import Any, Self

#: A smaller answer is never cut.
_SMALL = 1000


class WebServer:
    """Serves `data` at `url`, whatever the name, with `tag` as its ETag.

    The next `cuts` answers break off half-way. If-Match is held strictly, as RFC 9110 wants it: a
    weak tag matches nothing.
    """

    def __init__(self, data: bytes, *, tag: str = '"a"', ranges: bool = True) -> None:
        self.data, self.tag, self.ranges = data, tag, ranges
        self.cuts = 0
        #: The ranges that were asked for.
        self.asked: list[str | None] = []

    def __enter__(self) -> Self:
        web = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: object) -> None:
                pass

            def do_HEAD(self) -> None:
                web._answer(self)

            def do_GET(self) -> None:
                web._answer(self)

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _answer(self, asked: Any) -> None:
        wanted = asked.headers.get("range") if self.ranges else None
        match, body, more = asked.headers.get("if-match"), self.data, {}
        status = 200
        if match and (match != self.tag or match.startswith("W/")):
            status, body = 412, b""
        elif wanted:
            start, _, end = wanted.removeprefix("bytes=").partition("-")
            status, body = 206, self.data[int(start) : int(end or len(self.data)) + 1]
            more["content-range"] = f"bytes {start}-{end}/{len(self.data)}"
        asked.send_response(status)
        more |= {"etag": self.tag, "last-modified": "Mon, 23 Nov 2026 00:00:00 GMT"}
        for name, value in (more | {"content-length": str(len(body))}).items():
            asked.send_header(name, value)
        asked.end_headers()
        if asked.command == "GET":
            self.asked.append(wanted)
            self._send(asked, body)

    def _send(self, asked: Any, body: bytes) -> None:
        if self.cuts and len(body) > _SMALL:
            self.cuts -= 1
            body, asked.close_connection = body[: len(body) // 2], True
        try:
            asked.wfile.write(body)
        except OSError:
            asked.close_connection = True  # who has asked wants no more
