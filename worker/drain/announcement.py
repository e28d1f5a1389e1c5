"""Makes the announcement: a worker's state in Redis, written every second for producers.

A worker that fails writes a last announcement, with the reason.
"""

from functools import cache
from pathlib import Path
from typing import Any

import orjson
from pydantic import SecretStr

from contract.redis.connect import credentials_of
from contract.version import PROTOCOL, version
from worker.drain.drain import Drain
from worker.drain.lifecycle import State
from worker.settings import WorkerSettings

#: Most characters of the announced reason why a worker runs no requests.
REASON_CHARACTERS = 300
#: Most characters of the announced name of a device.
DEVICE_CHARACTERS = 100
#: Most announced batch sizes of an NPU.
BUCKETS = 32
_VERSION = version()


def announcement(drain: Drain) -> bytes:
    """Return this worker's state, load and averages as JSON (docs/reference/redis-keys.md)."""
    supervisor, all_counts = drain.supervisor, (drain.counts, *drain.earlier)
    state, why = drain.lifecycle.state, supervisor.why
    if drain.lifecycle.swapping:
        why = drain.swap_reason
    elif drain.lifecycle.stopping and supervisor.failed and not drain.models:
        state = State.STOPPED
    return orjson.dumps({
        "state": state.value,
        **({"why": without_secrets(why, drain.settings)} if why else {}),
        "version": _VERSION,
        "protocol": PROTOCOL,
        **({"part_of": part_of} if (part_of := drain.leases.part_of) else {}),
        "queue": drain.leases.queue,
        "model": drain.settings.model,
        **({"folder": folder} if (folder := _folder_of(drain.settings.model)) else {}),
        "name": drain.served if drain.models else drain.settings.model_name,
        "served": drain.served,
        **({"adapters": adapters} if (adapters := drain.adapters) else {}),
        **{name: value for name, value in drain.models.items() if value},
        "in_flight": len(drain.in_flight),
        "limit": drain.limits.limit,
        "done": {  # totals since the start: two announcements give a rate
            "completed": sum(counts.completed for counts in all_counts),
            "other": sum(counts.ended - counts.completed for counts in all_counts),
            "prompt_tokens": sum(counts.prompt_tokens for counts in all_counts),
            "completion_tokens": sum(counts.completion_tokens for counts in all_counts),
            "cached_tokens": supervisor.cached_prompt_tokens(),
            "handed_back": sum(counts.handed_back for counts in all_counts),
        },
        "deaths": supervisor.deaths,
        **_engine(drain),
    })  # fmt: skip


@cache
def _folder_of(model: str) -> str:
    """Return the absolute path of a model's folder, '' for the name of a model on the hub."""
    return str(Path(model).absolute()) if model and Path(model).is_dir() else ""


def _engine(drain: Drain) -> dict[str, object]:
    """Return the started engine's fields; `buckets` are the batch sizes compiled for an NPU."""
    capacity = drain.supervisor.capacity
    if capacity is None:
        return {}
    device = str(capacity.details.get("device") or "")[:DEVICE_CHARACTERS]
    buckets = list(capacity.details.get("buckets", ()))[:BUCKETS]
    offers = drain.offers
    identity = offers.identity if offers is not None else ""
    reuse = {"identity": identity, "known_answers": offers.most} if offers and identity else {}
    known = {"kv_tokens": capacity.kv_tokens, "prefix_caching": capacity.prefix_caching}
    return {
        **({"device": device} if device else {}),
        **({"buckets": buckets} if buckets else {}),
        **({"shared": shared} if (shared := shared_servers_of(drain)) else {}),
        "slots": capacity.max_num_seqs,
        **{name: value for name, value in known.items() if value is not None},
        **reuse,
        **drain.averages.as_json(),
    }


def shared_servers_of(drain: Drain) -> list[dict[str, Any]]:
    """Return the servers that the engine shares with people, each with its limit and the reason."""
    capacity = drain.supervisor.capacity
    servers = capacity.details.get("servers") if capacity is not None else None
    rows = servers.items() if isinstance(servers, dict) else ()
    return [
        {"server": name, **row["shared"]}
        for name, row in sorted(rows)
        if isinstance(row, dict) and "shared" in row
    ]


def without_secrets(text: str, settings: WorkerSettings) -> str:
    """Return a text's first line, shortened and without the settings' secrets."""
    line = next(iter(text.strip().splitlines()), "")
    for secret in _secrets(settings):
        line = line.replace(secret, "***")
    return line if len(line) <= REASON_CHARACTERS else line[: REASON_CHARACTERS - 1] + "…"


def _secrets(settings: WorkerSettings) -> list[str]:
    values = [getattr(settings, name) for name in type(settings).model_fields]
    texts = [one.get_secret_value() for one in values if isinstance(one, SecretStr)]
    texts.append(credentials_of(settings.redis_url.get_secret_value())[1])
    return sorted(filter(None, texts), key=len, reverse=True)
