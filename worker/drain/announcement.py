"""What a worker tells producers of itself every second, and when it ends because it failed."""

import orjson
from pydantic import SecretStr

from contract.redis.connect import credentials_of
from contract.version import PROTOCOL, version
from worker.drain.drain import Drain
from worker.drain.lifecycle import State
from worker.settings import WorkerSettings

#: Most characters of a reason.
REASON_CHARACTERS = 300
#: Most characters of a device's name.
DEVICE_CHARACTERS = 100
#: Most batch sizes that are told.
BUCKETS = 32
_VERSION = version()


def announcement(drain: Drain) -> bytes:
    """Return it as JSON: state, why (absent where the engine runs), queue, model, load, means."""
    state, why = drain.lifecycle.state, drain.supervisor.why
    if drain.lifecycle.stopping and drain.supervisor.failed:
        state = State.STOPPED
    reason = {"why": shown(why, drain.settings)} if why else {}
    return orjson.dumps({
        "state": state.value,
        **reason,
        "version": _VERSION,
        "protocol": PROTOCOL,
        **({"part_of": part_of} if (part_of := drain.leases.part_of) else {}),
        "queue": drain.leases.queue,
        "model": drain.settings.model,
        "served": drain.served,
        **({"adapters": adapters} if (adapters := drain.adapters) else {}),
        "in_flight": len(drain.in_flight),
        "limit": drain.limits.limit,
        "done": _done(drain),
        "deaths": drain.supervisor.deaths,
        **_engine(drain),
    })  # fmt: skip


def _done(drain: Drain) -> dict[str, int]:
    """Return totals since the worker started: whoever reads two announcements knows the rates."""
    counts = drain.counts
    return {
        "completed": counts.completed,
        "other": counts.ended - counts.completed,
        "prompt_tokens": counts.prompt_tokens,
        "completion_tokens": counts.completion_tokens,
        "cached_tokens": drain.supervisor.cached_prompt_tokens(),
        "handed_back": counts.handed_back,
    }


def _engine(drain: Drain) -> dict[str, object]:
    """Return what is known of the engine once it has started, as far as its adapter tells it:
    on what it runs, and the batch sizes for which an NPU's model was compiled, largest first."""
    able = drain.supervisor.capacity
    if able is None:
        return {}
    told = {
        "device": str(able.details.get("device") or "")[:DEVICE_CHARACTERS],
        "buckets": list(able.details.get("buckets", ()))[:BUCKETS],
    }
    known = {"kv_tokens": able.kv_tokens, "prefix_caching": able.prefix_caching}
    return {
        **{name: value for name, value in told.items() if value},
        "slots": able.max_num_seqs,
        **{name: value for name, value in known.items() if value is not None},
        **drain.means.as_json(),
    }


def shown(why: str, settings: WorkerSettings) -> str:
    """Return the first line, not too long and without any secret of the settings.

    Whoever may read the queue's state sees it, and an engine's library may quote what it was given.
    """
    line = next(iter(why.strip().splitlines()), "")
    for secret in _secrets(settings):
        line = line.replace(secret, "***")
    return line if len(line) <= REASON_CHARACTERS else line[: REASON_CHARACTERS - 1] + "…"


def _secrets(settings: WorkerSettings) -> list[str]:
    values = [getattr(settings, name) for name in type(settings).model_fields]
    texts = [one.get_secret_value() for one in values if isinstance(one, SecretStr)]
    texts.append(credentials_of(settings.redis_url.get_secret_value())[1])
    return sorted(filter(None, texts), key=len, reverse=True)
