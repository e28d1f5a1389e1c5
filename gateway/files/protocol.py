"""Files as OpenAI's clients see them."""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from gateway.files.files import FileRecord
from gateway.http.errors import invalid

#: What an upload may be for; output files have the last one.
PURPOSES = ("assistants", "batch", "fine-tune", "vision", "user_data", "evals")
OUTPUT_PURPOSE = "batch_output"
#: Seconds that a file may be told to live.
LEAST_LIFE_S, MOST_LIFE_S = 3600, 2_592_000
#: Files of a page, and the codes of a number that is beyond.
MOST_FILES = 10_000
_ANCHOR, _SECONDS = "expires_after[anchor]", "expires_after[seconds]"


class File(msgspec.Struct, kw_only=True):
    """A file, as OpenAI writes it."""

    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    filename: str
    purpose: str
    status: Literal["uploaded", "processed", "error"] = "processed"
    expires_at: int | UnsetType | None = UNSET
    status_details: str | UnsetType | None = UNSET


class FileList(msgspec.Struct, kw_only=True):
    """A page of files."""

    object: Literal["list"] = "list"
    data: list[File]
    first_id: str
    last_id: str
    has_more: bool


class Deleted(msgspec.Struct, kw_only=True):
    """What a DELETE answers."""

    id: str
    object: Literal["file"] = "file"
    deleted: bool = True


class ExpiresAfter(msgspec.Struct):
    """After how long a file is removed, from when it is there."""

    anchor: Literal["created_at"]
    seconds: int


def shown(record: FileRecord) -> File:
    """Return a file as clients see it."""
    return File(
        id=record.id, bytes=record.bytes, created_at=record.created_at, filename=record.filename,
        purpose=record.purpose, expires_at=record.expires_at or UNSET,
    )  # fmt: skip


def purpose_of(fields: dict[str, str]) -> str:
    """Return the purpose in a form.

    Raises:
        ApiError: 400, it is missing or unknown.
    """
    purpose = fields.get("purpose")
    if purpose is None:
        raise invalid(
            f"purpose is missing; give one of {', '.join(PURPOSES)}", "purpose",
            "missing_required_parameter",
        )  # fmt: skip
    if purpose not in PURPOSES:
        raise invalid(
            f"purpose {purpose[:60]!r} is unknown; use one of {', '.join(PURPOSES)}", "purpose"
        )
    return purpose


def life_of(fields: dict[str, str]) -> int | None:
    """Return after how many seconds a file expires, None for never.

    Clients send two fields in brackets, or one with JSON.

    Raises:
        ApiError: 400, naming the field.
    """
    anchor, seconds = fields.get(_ANCHOR), fields.get(_SECONDS)
    if whole := fields.get("expires_after"):
        try:
            told = msgspec.json.decode(whole, type=ExpiresAfter)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise invalid(f"expires_after: {error}", "expires_after") from None
        anchor, seconds = told.anchor, str(told.seconds)
    if anchor is None and seconds is None:
        return None
    if anchor != "created_at":
        raise invalid("expires_after[anchor] must be created_at", _ANCHOR)
    text = seconds or ""
    if not (text.isascii() and text.isdigit() and LEAST_LIFE_S <= int(text[:12]) <= MOST_LIFE_S):
        raise invalid(
            f"expires_after[seconds] must be a whole number from {LEAST_LIFE_S} to {MOST_LIFE_S}",
            _SECONDS,
        )
    return int(text)
