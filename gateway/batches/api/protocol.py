"""Batches as they go over the wire: field names and types of OpenAI's, and what warmq adds."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from gateway.batches.api.record import Status

#: Least and most seconds that a file may be kept by `expires_after` and `output_expires_after`.
SHORTEST_KEPT_S, LONGEST_KEPT_S = 3_600, 2_592_000

MetadataKey = Annotated[str, Meta(max_length=64)]
MetadataValue = Annotated[str, Meta(max_length=512)]
Metadata = Annotated[dict[MetadataKey, MetadataValue], Meta(max_length=16)]
Seconds = Annotated[int, Meta(ge=SHORTEST_KEPT_S, le=LONGEST_KEPT_S)]


class OutputExpiresAfter(Struct):
    """How long output and error files are kept, counted from when they are written."""

    anchor: Literal["created_at"]
    seconds: Seconds


class BatchCreate(Struct, kw_only=True):
    """Body of `POST /v1/batches`. Fields that are not named here are ignored, as clients of other
    gateways send some. `order`, `once` and `priority` are warmq's (`extra_body` of the SDKs)."""

    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: Metadata | None = None
    output_expires_after: OutputExpiresAfter | None = None
    order: Literal["input", "prefix", "auto"] | None = None
    once: bool | None = None
    priority: Annotated[int, Meta(ge=0, le=9)] | None = None


class BatchError(Struct, kw_only=True):
    """One reason why a whole file was refused; `line` counts from 1."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


class BatchErrors(Struct, kw_only=True):
    """The list of reasons."""

    object: Literal["list"] = "list"
    data: list[BatchError]


class RequestCounts(Struct, kw_only=True):
    """Requests by outcome; never null."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class InputDetails(Struct, kw_only=True):
    """What of the input tokens came from the prefix cache; known once the batch has ended."""

    cached_tokens: int = 0


class OutputDetails(Struct, kw_only=True):
    """What of the output tokens was reasoning; known once the batch has ended."""

    reasoning_tokens: int = 0


class BatchUsage(Struct, kw_only=True):
    """Tokens of all answers."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class Batch(Struct, kw_only=True):
    """A batch. What is not known yet is null, except `model`, which is left out."""

    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    model: str | UnsetType = UNSET
    errors: BatchErrors | None = None
    input_file_id: str
    completion_window: str
    status: Status
    output_file_id: str | None = None
    error_file_id: str | None = None
    created_at: int
    in_progress_at: int | None = None
    expires_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: RequestCounts = msgspec.field(default_factory=RequestCounts)
    usage: BatchUsage
    metadata: dict[str, str] | None = None


class BatchList(Struct, kw_only=True):
    """A page of batches, newest first."""

    object: Literal["list"] = "list"
    data: list[Batch]
    first_id: str | None
    last_id: str | None
    has_more: bool
