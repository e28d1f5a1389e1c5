"""uvicorn and Starlette alone: JSON in, JSON out. What every gateway on them costs at least.

bare_server.py PORT
"""

from __future__ import annotations

import sys

import orjson
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

ANSWER = orjson.dumps({
    "id": "chatcmpl-1", "object": "chat.completion", "model": "small",
    "choices": [{"index": 0, "finish_reason": "stop",
                 "message": {"role": "assistant", "content": "simulated 0123456789abcdef"}}],
    "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
})  # fmt: skip


async def answer(request: Request) -> Response:
    """Answer a chat."""
    orjson.loads(await request.body())
    return Response(ANSWER, media_type="application/json")


if __name__ == "__main__":
    uvicorn.run(
        Starlette(routes=[Route("/v1/chat/completions", answer, methods=["POST"])]),
        port=int(sys.argv[1]), loop="uvloop", http="httptools", access_log=False,
        log_level="warning",
    )  # fmt: skip
