"""A server that streams one answer to every request, written beforehand: it costs next to nothing.

`canned.py PORT` serves until it is killed; it looks like vLLM's, whose answers come in CHUNKS of
PER_CHUNK tokens each.
"""

from __future__ import annotations

import asyncio
import sys

import orjson

CHUNKS, PER_CHUNK = 16, 16
TOKENS = CHUNKS * PER_CHUNK
MODEL = "canned"
METRICS = b"""vllm:num_requests_running{engine="0"} 1.0
vllm:num_requests_waiting{engine="0"} 0.0
vllm:kv_cache_usage_perc{engine="0"} 0.1
"""


def plain(body: bytes) -> bytes:
    """Return a response of status 200."""
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)


def pieces() -> list[bytes]:
    """Return the streamed answer, each event in a chunk of HTTP's."""
    frame = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": MODEL}
    chunks = []
    for n in range(CHUNKS):
        end = "stop" if n == CHUNKS - 1 else None
        delta = {"content": "word " * PER_CHUNK} | ({"role": "assistant"} if n == 0 else {})
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": end}
        chunks.append({**frame, "choices": [choice]})
    usage = {"prompt_tokens": 16, "completion_tokens": TOKENS, "total_tokens": 16 + TOKENS}
    chunks.append({**frame, "choices": [], "usage": usage})
    events = [b"data: " + orjson.dumps(chunk) + b"\n\n" for chunk in chunks]
    events.append(b"data: [DONE]\n\n")
    head = (
        b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n"
    )
    framed = [b"%x\r\n%b\r\n" % (len(event), event) for event in events]
    return [head + framed[0], *framed[1:-1], framed[-1] + b"0\r\n\r\n"]


MODELS = {"object": "list", "data": [{"id": MODEL, "owned_by": "vllm", "max_model_len": 4096}]}
PAGES = {b"/v1/models": plain(orjson.dumps(MODELS)), b"/metrics": plain(METRICS)}
ANSWER = pieces()


class Canned(asyncio.Protocol):
    """One connection."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep it."""
        assert isinstance(transport, asyncio.Transport)
        self._transport, self._got = transport, b""

    def data_received(self, data: bytes) -> None:
        """Answer each request that is whole."""
        self._got += data
        while (end := self._got.find(b"\r\n\r\n")) >= 0:
            head = self._got[:end].lower()
            _, found, after = head.partition(b"content-length:")
            size = end + 4 + (int(after.split(b"\r\n", 1)[0]) if found else 0)
            if len(self._got) < size:
                return
            self._got = self._got[size:]
            if head.startswith(b"post"):
                self._stream(0)
            else:
                self._transport.write(PAGES.get(head.split(b" ", 2)[1], plain(b"")))

    def _stream(self, n: int) -> None:
        """Send the pieces in turns of the loop, as tokens come: several reads for the client."""
        if self._transport.is_closing():
            return
        self._transport.write(b"".join(ANSWER[n : n + 4]))
        if n + 4 < len(ANSWER):
            asyncio.get_running_loop().call_later(0.01, self._stream, n + 4)


async def serve(port: int) -> None:
    """Serve for ever."""
    server = await asyncio.get_running_loop().create_server(Canned, "127.0.0.1", port, backlog=1024)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1])))
