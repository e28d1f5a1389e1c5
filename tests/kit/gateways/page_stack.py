"""Batches to look at on the gateway's page, and all its pages."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import orjson
from kit.gateways.live_stack import MODEL, Stack

from demo.stack import eventually

ENDED = ("completed", "failed", "expired", "cancelled")


def lines(users: Iterable[str], model: str = MODEL, **body: object) -> bytes:
    """Return a file of chats, the `user` of each its fate."""
    return b"\n".join(
        orjson.dumps({
            "custom_id": f"request-{number}",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {"model": model, "user": user,
                     "messages": [{"role": "user", "content": f"What is {number} + 1?"}]} | body,
        })
        for number, user in enumerate(users)
    )  # fmt: skip


def send(stack: Stack, file: bytes, name: str = "questions.jsonl", client: Any = None) -> str:
    """Send a file as a batch; return the batch's id."""
    client = client or stack.client
    made = client.files.create(file=(name, file), purpose="batch")
    batch = client.batches.create(
        input_file_id=made.id, endpoint="/v1/chat/completions", completion_window="24h"
    )
    return str(batch.id)


def ended(stack: Stack, batch_id: str, client: Any = None) -> Any:
    """Return a batch when it has ended."""

    def look() -> Any:
        found = (client or stack.client).batches.retrieve(batch_id)
        return found if found.status in ENDED else None

    return eventually(look, 60, f"{batch_id} ends")


def pages(batch_id: str, custom_id: str, file_id: str) -> dict[str, str]:
    """Return the paths of all pages by name."""
    return {
        "overview": "/ui",
        "batches": "/ui/batches",
        "batch": f"/ui/batches/{batch_id}",
        "request": f"/ui/batches/{batch_id}/request?id={custom_id}",
        "workers": "/ui/workers",
        "tenants": "/ui/tenants",
        "dead": "/ui/dead",
        "submit": "/ui/submit",
        "plan": f"/ui/submit?file={file_id}",
        "missing": "/ui/batches/none",
    }
