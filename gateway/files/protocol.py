"""Defines files as OpenAI's API shows them: fields, purposes and expiry."""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from gateway.files.files import FileRecord
from gateway.http.errors import invalid

#: Purposes that a client may give. The gateway's own output files have OUTPUT_PURPOSE.
PURPOSES = ("assistants", "batch", "fine-tune", "vision", "user_data", "evals")
OUTPUT_PURPOSE = "batch_output"
#: Shortest and longest life of a file in seconds (`expires_after`).
LEAST_LIFE_S, MOST_LIFE_S = 3600, 2_592_000
#: Most files on a page of the list.
MOST_FILES = 10_000
_ANCHOR, _SECONDS = "expires_after[anchor]", "expires_after[seconds]"


class File(msgspec.Struct, kw_only=True):
    """A file."""

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
    """The answer to the DELETE of a file."""

    id: str
    object: Literal["file"] = "file"
    deleted: bool = True


class ExpiresAfter(msgspec.Struct):
    """When a file is removed: `seconds` after its creation."""

    anchor: Literal["created_at"]
    seconds: int


def file_object(record: FileRecord) -> File:
    return File(
        id=record.id, bytes=record.bytes, created_at=record.created_at, filename=record.filename,
        purpose=record.purpose, expires_at=record.expires_at or UNSET,
    )  # fmt: skip


def purpose_of(fields: dict[str, str]) -> str:
    """Return the purpose in a form; raise ApiError (400) if it is missing or unknown."""
    purpose, valid = fields.get("purpose"), ", ".join(PURPOSES)
    if purpose is None:
        message = f"purpose is missing; give one of {valid}"
        raise invalid(message, "purpose", "missing_required_parameter")
    if purpose not in PURPOSES:
        raise invalid(f"purpose {purpose[:60]!r} is unknown; use one of {valid}", "purpose")
    return purpose


def life_of(fields: dict[str, str]) -> int | None:
    """Return the seconds after which a file expires, or None; raise ApiError (400)."""
    anchor, seconds = fields.get(_ANCHOR), fields.get(_SECONDS)
    if as_json := fields.get("expires_after"):
        try:
            parsed = msgspec.json.decode(as_json, type=ExpiresAfter)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise invalid(f"expires_after: {error}", "expires_after") from None
        anchor, seconds = parsed.anchor, str(parsed.seconds)
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
