"""What each route does, in one table; a test compares it with the application's routes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from contract.openai.body import LIMITS
from gateway.batches.anthropic.protocol import Deleted as MessageBatchDeleted
from gateway.batches.anthropic.protocol import MessageBatch, MessageBatchList
from gateway.batches.api.protocol import Batch, BatchCreate, BatchList
from gateway.files.protocol import (
    LEAST_LIFE_S,
    MOST_FILES,
    MOST_LIFE_S,
    OUTPUT_PURPOSE,
    PURPOSES,
    Deleted,
    File,
    FileList,
)
from gateway.files.uploads import Upload, UploadComplete, UploadCreate, UploadPart
from gateway.http.idempotency import ONLINE_BODY_TYPES
from gateway.online.models import Model, ModelList
from gateway.redis.fleet import Scale

Schema = dict[str, Any]
JSON, FORM, BYTES, LINES, EVENTS = (
    "application/json", "multipart/form-data", "application/octet-stream", "application/x-jsonl",
    "text/event-stream",
)  # fmt: skip


@dataclass(frozen=True)
class Operation:
    """One method of one path.

    `body` and `answer` are the types of what goes over the wire, or schemas where there is no
    type; None for nothing. `query` has the parameters' schemas by name.
    """

    route: str
    does: str
    answer: Any
    answers_as: str = JSON
    body: Any = None
    body_as: str = JSON
    query: dict[str, Schema] | None = None
    streams: bool = False
    partial: bool = False  # answers ranges, too
    open: bool = False  # without a key


_TEXT: Schema = {"type": "string"}
_AFTER = _TEXT | {"description": "The id after which the page begins."}
_FILE_BYTES: Schema = {"type": "string", "contentMediaType": BYTES}
#: An engine's own answer; OpenAI's schema of the same route holds for it.
_ENGINES: Schema = {"type": "object", "description": "The engine's answer, as vLLM gives it."}
_STATUS: Schema = {"type": "object", "properties": {"status": _TEXT}, "required": ["status"]}
_VERSION: Schema = {"type": "object", "properties": {"version": _TEXT}, "required": ["version"]}
_SECONDS: Schema = {"type": "integer", "minimum": LEAST_LIFE_S, "maximum": MOST_LIFE_S}
_FILE_FORM: Schema = {
    "type": "object",
    "required": ["file", "purpose"],
    "properties": {
        "file": _FILE_BYTES,
        "purpose": {"enum": list(PURPOSES)},
        "expires_after[anchor]": {"const": "created_at"},
        "expires_after[seconds]": _SECONDS,
    },
}
_PART_FORM: Schema = {
    "type": "object", "required": ["data"], "properties": {"data": _FILE_BYTES}
}  # fmt: skip
_PARTIAL: Schema = {"type": "boolean", "description": "Show the file of what has ended so far."}


def _limit(most: int, default: int) -> Schema:
    return {"type": "integer", "minimum": 1, "maximum": most, "default": default}


FILES = (
    Operation("POST /v1/files", "Upload a file.", File, body=_FILE_FORM, body_as=FORM),
    Operation(
        "GET /v1/files", "List files.", FileList,
        query={
            "after": _AFTER, "limit": _limit(MOST_FILES, MOST_FILES),
            "order": {"enum": ["asc", "desc"], "default": "desc"},
            "purpose": {"enum": [*PURPOSES, OUTPUT_PURPOSE]},
        },
    ),
    Operation("GET /v1/files/{file_id}", "Retrieve a file.", File),
    Operation("DELETE /v1/files/{file_id}", "Delete a file.", Deleted),
    Operation(
        "GET /v1/files/{file_id}/content", "Download a file, or a range of it.", _FILE_BYTES, BYTES,
        query={"offset": {"type": "integer", "minimum": 0}}, partial=True,
    ),
)  # fmt: skip
_UPLOAD = "/v1/uploads/{upload_id}"
UPLOADS = (
    Operation("POST /v1/uploads", "Begin an upload in parts.", Upload, body=UploadCreate),
    Operation(
        f"POST {_UPLOAD}/parts", "Add a part.", UploadPart, body=_PART_FORM, body_as=FORM
    ),
    Operation(f"POST {_UPLOAD}/complete", "Make the file.", Upload, body=UploadComplete),
    Operation(f"POST {_UPLOAD}/cancel", "Give the upload up.", Upload),
)  # fmt: skip
BATCHES = (
    Operation("POST /v1/batches", "Create a batch.", Batch, body=BatchCreate),
    Operation(
        "GET /v1/batches", "List batches.", BatchList,
        query={"after": _AFTER, "limit": _limit(100, 20)},
    ),
    Operation(
        "GET /v1/batches/{batch_id}", "Retrieve a batch.", Batch, query={"partial": _PARTIAL}
    ),
    Operation("POST /v1/batches/{batch_id}/cancel", "Cancel a batch.", Batch),
)  # fmt: skip
_MESSAGES = "/v1/messages/batches"
MESSAGE_BATCHES = (
    Operation(
        f"POST {_MESSAGES}", "Create a message batch.", MessageBatch,
        body={
            "type": "object", "required": ["requests"],
            "properties": {"requests": {"type": "array", "minItems": 1, "items": {
                "type": "object", "required": ["custom_id", "params"],
                "properties": {"custom_id": _TEXT, "params": {"type": "object"}},
            }}},
        },
    ),
    Operation(
        f"GET {_MESSAGES}", "List message batches.", MessageBatchList,
        query={"after_id": _AFTER, "before_id": _TEXT, "limit": _limit(1000, 20)},
    ),
    Operation(f"GET {_MESSAGES}/{{batch_id}}", "Retrieve a message batch.", MessageBatch),
    Operation(f"DELETE {_MESSAGES}/{{batch_id}}", "Delete a batch.", MessageBatchDeleted),
    Operation(f"POST {_MESSAGES}/{{batch_id}}/cancel", "Cancel a message batch.", MessageBatch),
    Operation(
        f"GET {_MESSAGES}/{{batch_id}}/results", "Download the results, a line each.", _TEXT, LINES
    ),
)  # fmt: skip
ONLINE = (
    *(
        Operation(
            f"POST {url}", "Ask a model, and wait for its answer.", _ENGINES, body=body,
            streams=url in LIMITS,
        )
        for url, body in ONLINE_BODY_TYPES.items()
    ),
    Operation("GET /v1/models", "List the models that may be asked.", ModelList),
    Operation("GET /v1/models/{model}", "Retrieve a model; its id may have slashes.", Model),
    Operation(
        "GET /warmq/v1/scale", "Tell an autoscaler what a model's queue holds.", Scale,
        query={"model": _TEXT | {"description": "Left out: the default queue."}},
    ),
)  # fmt: skip
OPEN = (
    Operation("GET /health", "Tell that the gateway runs.", _STATUS, open=True),
    Operation("GET /ready", "Tell that Redis answers, too.", _STATUS, open=True),
    Operation("GET /version", "Tell warmq's version.", _VERSION, open=True),
    Operation(
        "GET /metrics", "Tell Prometheus what lies in Redis.", _TEXT, "text/plain", open=True
    ),
    Operation("GET /openapi.json", "Return this document.", {"type": "object"}, open=True),
)
ALL = (*FILES, *UPLOADS, *BATCHES, *MESSAGE_BATCHES, *ONLINE, *OPEN)
