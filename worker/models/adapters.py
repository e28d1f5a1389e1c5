"""Finds the adapters of a worker's models, also of those that are not loaded."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping

from worker.engine.catalogue import find_engine
from worker.models.config import Model

log = logging.getLogger(__name__)

#: Most names of adapters of all models together that a worker announces each second.
MOST_NAMES = 500
#: Seconds between two looks at the models' files.
LOOK_EVERY_S = 10.0


class ModelAdapters:
    """The names of the adapters of each model, read again from time to time."""

    def __init__(self, models: Mapping[str, Model]) -> None:
        self._models = models
        self._looked_at: float | None = None
        #: By model, the last error that was logged.
        self._errors: dict[str, str] = {}

    def look(self) -> dict[str, list[str]] | None:
        """Return the names by model, at most MOST_NAMES; None if the last look was just now.

        A model's folder that cannot be read has no names, and its log has the reason once.
        """
        now = time.monotonic()
        if self._looked_at is not None and now < self._looked_at + LOOK_EVERY_S:
            return None
        self._looked_at = now
        found, left = {}, MOST_NAMES
        for name, model in self._models.items():
            names = self._names(name, model)[:left]
            left -= len(names)
            if names:
                found[name] = names
        return found

    def _names(self, name: str, model: Model) -> list[str]:
        try:
            names = list(find_engine(model.settings.engine).adapters(model.settings))
        except OSError as error:
            reason = str(error.strerror or error)
            if self._errors.get(name) != reason:
                self._errors[name] = reason
                log.warning("model %s: its adapters cannot be read: %s", name, reason,
                            extra={"action": "adapters_gone", "model": name})  # fmt: skip
            return []
        self._errors.pop(name, None)
        return names
