"""The library for Python programs: `from producer import Client`.

These names are stable; all other modules of `producer` may change with every version.
"""

from contract.errors import (
    BatchConflict,
    BatchNotFound,
    ExtraMissing,
    ProtocolMismatch,
    StoreForbidden,
    StoreFull,
    StoreRefused,
    StoreUnavailable,
    StoreUnreachable,
    WarmqError,
)
from contract.settings import SettingsError
from producer.batch_watch import BatchChanged, WritesLost
from producer.client.asynchronous import AsyncBatch, AsyncClient
from producer.client.batch import Batch, BatchStatus, Result, ResultError
from producer.client.client import Client, SubmitOptions
from producer.client.trial import Trial
from producer.input.bucket import BadPlace, ObjectMissing
from producer.input.files import OutputUnwritable, WriteFailed
from producer.input.options import BadOption
from producer.input.reader import InputUnreadable, NotJsonLines
from producer.run.trial import TriedRow

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
