"""Makes the command that starts a worker of a queue."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from pathlib import PurePath
from typing import Any

from contract import naming
from contract.redis.announced_models import models_of


def start_command(
    queue: str, default: str, announced: Iterable[Mapping[str, Any]], unknown: str = ""
) -> str:
    """Return the command that starts a worker of a queue.

    It names the model of the queue's worker that was seen last among those `announced`, also dead
    ones; without any, the model is `unknown`, or left out. `default` is the default queue.
    """
    model = queue.removeprefix(f"{default}.")
    base, of_model = (queue, False) if model == queue else (default, True)
    environment = {"WARMQ_QUEUE": base} if base != naming.DEFAULT_QUEUE else {}
    environment |= {"WARMQ_SERVED_MODEL_NAME": model} if of_model else {}
    words = [f"{name}={shlex.quote(value)}" for name, value in environment.items()]
    served = _last_model(one for one in announced if one["queue"] == queue)
    if served or unknown:
        words.insert(0, f"WARMQ_MODEL={served or unknown}")
    return " ".join([*words, "warmq-worker"])


def _last_model(announced: Iterable[Mapping[str, Any]]) -> str:
    """Return WARMQ_MODEL of the worker that was seen last, as a shell takes it; '' if unknown.

    The path of a folder is not shown, only its name.
    """
    last = min(announced, key=lambda one: float(one["silent_s"]), default=None)
    if last is None or models_of(last):  # WARMQ_MODELS has the models of the latter
        return ""
    model = str(last.get("model") or "")
    if not model.isprintable():  # it could change the terminal's state
        return ""
    path = PurePath(model)
    return f"…/{shlex.quote(path.name)}" if path.is_absolute() else model and shlex.quote(model)
