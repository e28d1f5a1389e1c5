"""Pictures for chats: as data URLs, and from a web server on this machine."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

from PIL import Image


def png(colour: str, width: int = 28, height: int = 28) -> bytes:
    """Return a picture: this colour on a gradient, so that it is more than one value."""
    picture = Image.linear_gradient("L").resize((width, height)).convert("RGB")
    picture.paste(colour, (0, 0, width // 2, height // 2))
    file = io.BytesIO()
    picture.save(file, "PNG")
    return file.getvalue()


def data_url(content: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(content).decode()}"


def part(url: str, **more: str) -> dict[str, Any]:
    """Return the part of a message that shows a picture."""
    return {"type": "image_url", "image_url": {"url": url, **more}}


@contextmanager
def site(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """Serve a folder; yield its address and what was asked for so far, as "/path status"."""
    came: list[str] = []

    class Handler(SimpleHTTPRequestHandler):
        def log_request(self, code: Any = "-", size: Any = "-") -> None:
            came.append(f"{self.path} {int(code)}")

        def log_error(self, *_: Any) -> None:
            """Say nothing: log_request has noted it."""

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=folder)) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", came
        finally:
            server.shutdown()
            thread.join()
