"""How many replicas KEDA and its HorizontalPodAutoscaler give a Deployment, on any clock.

Written from their documentation: KEDA decides between none and one, the autoscaler above that.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

#: Seconds from one decision of the autoscaler to the next, and the ratio that it calls the same.
EVERY_S, TOLERANCE = 15.0, 0.1
#: Its own policy up, where none is given: the more of 4 pods and as many again, in 15 s.
UP_PODS, UP_SHARE = 4, 1.0


@dataclass
class Scaler:
    """The rule of one ScaledObject's `spec` with one trigger. Times are seconds on any clock."""

    spec: dict[str, Any]
    replicas: int = 0
    _active_at: float = -math.inf
    _wishes: list[tuple[float, int]] = field(default_factory=list)
    _removed: list[float] = field(default_factory=list)

    def decide(self, now: float, value: float) -> int:
        """Return how many replicas there are to be, `value` being what the trigger reads."""
        metadata = self.spec["triggers"][0]["metadata"]
        if value > float(metadata["activationTargetValue"]):
            self._active_at = now
        least, most = self.spec["minReplicaCount"], self.spec["maxReplicaCount"]
        if self.replicas == 0:
            if self._active_at == now:
                self.replicas = max(1, least)
            return self.replicas
        if least == 0 and now - self._active_at >= self.spec["cooldownPeriod"]:
            self.replicas = 0
            self._wishes.clear()
            return 0
        self.replicas = self._horizontal(now, value / float(metadata["targetValue"]), least, most)
        return self.replicas

    def _horizontal(self, now: float, wanted: float, least: int, most: int) -> int:
        behaviour = self.spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]["scaleDown"]
        wish = math.ceil(wanted)
        if abs(wanted / self.replicas - 1) <= TOLERANCE:
            wish = self.replicas
        wish = min(max(wish, least, 1), most)
        window_s = behaviour["stabilizationWindowSeconds"]
        self._wishes = [(at, w) for at, w in self._wishes if now - at < window_s] + [(now, wish)]
        if wish >= self.replicas:
            return min(wish, self.replicas + max(UP_PODS, int(self.replicas * UP_SHARE)))
        wish = min(self.replicas, max(w for _, w in self._wishes))
        (policy,) = behaviour["policies"]
        self._removed = [at for at in self._removed if now - at < policy["periodSeconds"]]
        removed = min(self.replicas - wish, policy["value"] - len(self._removed))
        self._removed += [now] * removed
        return self.replicas - removed
