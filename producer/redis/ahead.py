"""Reads results ahead: Redis looks the next ones up while the caller uses the last ones."""

from collections.abc import Sequence
from typing import Any

from redis.exceptions import RedisError

from contract.redis import keys
from contract.redis.batches import BatchStore


class ResultsAhead:
    """Asks for one set of results at a time, on a connection of its own.

    If that connection fails, the same results are read through the store, which waits a few
    seconds for a Redis that is away and raises its errors.
    """

    def __init__(self, store: BatchStore) -> None:
        self._store = store
        self._pool = store._client.connection_pool
        self._asked: Sequence[str] = ()
        self._connection: Any = None

    def ask(self, request_ids: Sequence[str]) -> None:
        """Ask for the results of these requests; the `answer` before must have been taken."""
        self._asked = request_ids
        try:
            if self._connection is None:
                self._connection = self._pool.get_connection()
            self._connection.send_command("MGET", *map(keys.result_key, request_ids))
        except RedisError:
            self.close()

    def answer(self) -> list[bytes | None]:
        """Return the stored results, None where there is none (yet).

        Raises:
            StoreUnavailable: Redis cannot be used.
        """
        asked = self._asked
        if self._connection is not None:
            try:
                found: list[bytes | None] = self._connection.read_response()
                self._asked = ()
                return found
            except RedisError:
                self.close()
        return self._store.results(asked)

    def close(self) -> None:
        """Give the connection back to the pool; one with an unread reply is closed first."""
        if self._connection is not None:
            if self._asked:
                self._connection.disconnect()
            self._pool.release(self._connection)
            self._connection = None
