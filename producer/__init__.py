"""Submits requests, watches batches and collects results: a library and a command line.

from producer import Client
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from producer.client import (
        AsyncBatch,
        AsyncClient,
        BadOption,
        BadPlace,
        Batch,
        BatchChanged,
        BatchConflict,
        BatchNotFound,
        BatchStatus,
        Client,
        ExtraMissing,
        InputUnreadable,
        NotJsonLines,
        ObjectMissing,
        OutputUnwritable,
        ProtocolMismatch,
        Result,
        ResultError,
        SettingsError,
        StoreForbidden,
        StoreFull,
        StoreRefused,
        StoreUnavailable,
        StoreUnreachable,
        SubmitOptions,
        Trial,
        TriedRow,
        WarmqError,
        WriteFailed,
        WritesLost,
    )

__all__ = [
    "AsyncBatch",
    "AsyncClient",
    "BadOption",
    "BadPlace",
    "Batch",
    "BatchChanged",
    "BatchConflict",
    "BatchNotFound",
    "BatchStatus",
    "Client",
    "ExtraMissing",
    "InputUnreadable",
    "NotJsonLines",
    "ObjectMissing",
    "OutputUnwritable",
    "ProtocolMismatch",
    "Result",
    "ResultError",
    "SettingsError",
    "StoreForbidden",
    "StoreFull",
    "StoreRefused",
    "StoreUnavailable",
    "StoreUnreachable",
    "SubmitOptions",
    "Trial",
    "TriedRow",
    "WarmqError",
    "WriteFailed",
    "WritesLost",
]


def __getattr__(name: str) -> Any:
    """Import the client on its first use: the commands do not need it."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from producer import client  # noqa: PLC0415 - see above

    return getattr(client, name)
