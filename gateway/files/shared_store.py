"""All gateways of one Redis keep their files in one store: told at the start, by a mark in both."""

from __future__ import annotations

import logging
import secrets
from pathlib import Path

from contract.errors import StoreFull
from gateway.http.services import Services
from gateway.store import StoreFailed

log = logging.getLogger(__name__)

#: Names of marks in the store begin so: an empty content each.
MARK = "warmq-store-"


def check_shared(services: Services) -> None:
    """Return if this gateway's store is that of the others; the first one marks it.

    Raises:
        StoreFailed: it is another one: half of the files would be missing here and there.
    """
    mark = services.objects.store_mark()
    if mark is None:
        made = f"{MARK}{secrets.token_hex(12)}"
        with services.store.write(made) as writer:
            writer.commit()
        try:
            mark = services.objects.mark_store(made)
        except StoreFull:  # the next start does it
            mark = made
        if mark != made:
            services.store.delete(made)
    if services.store.size(mark) is None:
        raise StoreFailed(
            f"WARMQ_GATEWAY_STORE: {_named(services.settings.gateway_store)} is not the store of "
            "the other gateways of this Redis, and files of one would be missing at the other; "
            "give all of them one bucket, or one folder that they share. If the old store is lost, "
            f"or was moved without its file {mark}, remove warmq:gateway:store from Redis"
        )


def _named(store: str) -> str:
    """Return a store as it was given, a relative folder with where it is, too."""
    whole = store if "://" in store else str(Path(store).absolute())
    return store if whole == store else f"{store} ({whole})"
