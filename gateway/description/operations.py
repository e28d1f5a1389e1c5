"""The table of the gateway's operations, from which document.py makes the OpenAPI document.

A test compares the table with the application's routes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, get_args

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
from gateway.online.responses.record import Status as ResponseStatus
from gateway.redis.fleet import QueueLoad

Schema = dict[str, Any]
JSON, FORM, BYTES, LINES, EVENTS = (
    "application/json", "multipart/form-data", "application/octet-stream", "application/x-jsonl",
    "text/event-stream",
)  # fmt: skip


@dataclass(frozen=True)
class Operation:
    """One method of one path.

    `body` and `answer` are types, schemas where there is no type, or None. `query` has the schemas
    of the parameters by name. `ranges`: it also answers requests for a range. `open`: it needs no
    key.
    """

    route: str
    summary: str
    answer: Any
    answer_type: str = JSON
    body: Any = None
    body_type: str = JSON
    query: dict[str, Schema] | None = None
    streams: bool = False
    ranges: bool = False
    open: bool = False


_TEXT: Schema = {"type": "string"}
_AFTER = _TEXT | {"description": "The id after which the page begins."}
_FILE_BYTES: Schema = {"type": "string", "contentMediaType": BYTES}
#: The schema of an engine's answer, without details: the API that has the route defines them.
_ENGINE_ANSWER: Schema = {"type": "object", "description": "The engine's answer, as vLLM gives it."}
_SECONDS: Schema = {"type": "integer", "minimum": LEAST_LIFE_S, "maximum": MOST_LIFE_S}
_PARTIAL: Schema = {"type": "boolean", "description": "Show the file with the results so far."}


def _limit(most: int, default: int) -> Schema:
    return {"type": "integer", "minimum": 1, "maximum": most, "default": default}


def _object(required: list[str], **properties: Schema) -> Schema:
    return {"type": "object", "required": required, "properties": properties}


_STATUS = _object(["status"], status=_TEXT)
_RESPONSE = _object(
    ["id", "object", "created_at", "status", "model", "output"],
    id=_TEXT, object={"const": "response"}, created_at={"type": "integer"},
    status={"enum": list(get_args(ResponseStatus))}, model=_TEXT,
    output={"type": "array", "items": {"type": "object"}},
)  # fmt: skip
_RESPONSE_DELETED = _object(
    ["id", "object", "deleted"], id=_TEXT, object={"const": "response"}, deleted={"const": True}
)
_ITEMS = _object(
    ["object", "data", "first_id", "last_id", "has_more"],
    object={"const": "list"}, data={"type": "array", "items": {"type": "object"}}, first_id=_TEXT,
    last_id=_TEXT, has_more={"type": "boolean"},
)  # fmt: skip
_FILE_FORM = _object(
    ["file", "purpose"],
    **{
        "file": _FILE_BYTES,
        "purpose": {"enum": list(PURPOSES)},
        "expires_after[anchor]": {"const": "created_at"},
        "expires_after[seconds]": _SECONDS,
    },
)
_PART_FORM = _object(["data"], data=_FILE_BYTES)
_MESSAGE_REQUEST = _object(["custom_id", "params"], custom_id=_TEXT, params={"type": "object"})
_MESSAGE_REQUESTS = {"type": "array", "minItems": 1, "items": _MESSAGE_REQUEST}
_UPLOAD, _MESSAGES = "/v1/uploads/{upload_id}", "/v1/messages/batches"
_ONE_RESPONSE = "/v1/responses/{response_id}"

ONLINE = [
    Operation(
        f"POST {url}", "Send a request to a model and wait for its answer.", _ENGINE_ANSWER,
        body=body, streams=url in LIMITS,  # only generated answers have limits of tokens
    )
    for url, body in ONLINE_BODY_TYPES.items()
]  # fmt: skip
OPERATIONS = (
    Operation("POST /v1/files", "Upload a file.", File, body=_FILE_FORM, body_type=FORM),
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
        query={"offset": {"type": "integer", "minimum": 0}}, ranges=True,
    ),
    Operation("POST /v1/uploads", "Begin an upload in parts.", Upload, body=UploadCreate),
    Operation(f"POST {_UPLOAD}/parts", "Add a part.", UploadPart, body=_PART_FORM, body_type=FORM),
    Operation(f"POST {_UPLOAD}/complete", "Make the file.", Upload, body=UploadComplete),
    Operation(f"POST {_UPLOAD}/cancel", "Cancel the upload.", Upload),
    Operation("POST /v1/batches", "Create a batch.", Batch, body=BatchCreate),
    Operation(
        "GET /v1/batches", "List batches.", BatchList,
        query={"after": _AFTER, "limit": _limit(100, 20)},
    ),
    Operation(
        "GET /v1/batches/{batch_id}", "Retrieve a batch.", Batch, query={"partial": _PARTIAL}
    ),
    Operation("POST /v1/batches/{batch_id}/cancel", "Cancel a batch.", Batch),
    Operation(
        f"POST {_MESSAGES}", "Create a message batch.", MessageBatch,
        body=_object(["requests"], requests=_MESSAGE_REQUESTS),
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
    *ONLINE,
    Operation(f"GET {_ONE_RESPONSE}", "Retrieve a background response.", _RESPONSE),
    Operation(f"DELETE {_ONE_RESPONSE}", "Delete a background response.", _RESPONSE_DELETED),
    Operation(f"POST {_ONE_RESPONSE}/cancel", "Cancel a background response.", _RESPONSE),
    Operation(
        f"GET {_ONE_RESPONSE}/input_items", "List a background response's input items.", _ITEMS,
        query={
            "after": _AFTER, "limit": _limit(100, 20),
            "order": {"enum": ["asc", "desc"], "default": "desc"},
        },
    ),
    Operation("GET /v1/models", "List the models that are served.", ModelList),
    Operation("GET /v1/models/{model}", "Retrieve a model; its id may have slashes.", Model),
    Operation(
        "GET /warmq/v1/scale", "Return the load of a model's queue, for an autoscaler.", QueueLoad,
        query={"model": _TEXT | {"description": "Default: the model of the default queue."}},
    ),
    Operation("GET /health", "Return 200 while the gateway runs.", _STATUS, open=True),
    Operation("GET /ready", "Return 200 while Redis answers.", _STATUS, open=True),
    Operation(
        "GET /version", "Return warmq's version.", _object(["version"], version=_TEXT), open=True
    ),
    Operation("GET /metrics", "Return Prometheus series.", _TEXT, "text/plain", open=True),
    Operation("GET /openapi.json", "Return this document.", {"type": "object"}, open=True),
)  # fmt: skip
