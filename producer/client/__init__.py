"""The library for Python programs: `from producer import Client`.

These names are stable; all other modules of `producer` may change with every version.
"""

from producer.client.asynchronous import AsyncBatch, AsyncClient
from producer.client.batch import Batch, BatchStatus, Result, ResultError
from producer.client.client import Client, SubmitOptions

__all__ = [
    "AsyncBatch",
    "AsyncClient",
    "Batch",
    "BatchStatus",
    "Client",
    "Result",
    "ResultError",
    "SubmitOptions",
]
