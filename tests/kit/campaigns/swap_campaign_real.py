"""The campaign of swaps with vLLM: three models, engines that stop between stays, no orphans."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping

import orjson
import psutil
from kit.campaigns.campaign_faults import Fault
from kit.campaigns.campaign_real import RealCampaign
from kit.campaigns.swap_campaign import ENTRY, PHASES, Steps, SwapCampaign
from kit.stacks.stage import Stage
from kit.stacks.three_models import BEFORE, entries_in

from demo.stack import Worker

#: vLLM takes some seconds to end, and half a minute to start on a machine of two cores.
END_S, START_S = 2.0, 20.0
#: Phases in which there is an engine that can be hung: one that starts has no watchdog yet.
RUNNING = ("claiming", "stopping to pop", "announcing", "popping")


class RealSwapCampaign(SwapCampaign, RealCampaign):
    """Two workers with vLLM, each with the three models."""

    queues = tuple(f"warmq.{model}" for model in BEFORE)
    phases = PHASES | {
        "ending the engine": ("ending", END_S), "starting the engine": ("starting", START_S),
    }  # fmt: skip
    simulated = False
    workers_wanted = 2
    slots = 32
    late = 0.0
    #: A model may have to wait for the swaps of both workers, of which one was just killed.
    hang_s = 900.0

    def __init__(self, on: Stage, seed: int, faults: int, requests: int) -> None:
        super().__init__(on, seed, faults, requests)
        self.report.engine = "vllm-swaps"
        self._entries = {name: entry | ENTRY for name, entry in entries_in(on.folder).items()}

    def start_worker(self, **settings: object) -> Worker:
        """Start a worker of all models behind the proxy.

        Lease and watchdog bear with two cores on which another engine starts.
        """
        worker = self.on.real_worker(**{
            "drain_timeout_s": 10, "models": json.dumps(self._entries), "lease_s": 10,
            "redis_url": self.proxy.url, "stall_timeout_s": 20,
        } | settings)  # fmt: skip
        self._steps[worker] = Steps(worker)
        return worker

    def kinds(self) -> dict[str, Fault]:
        """Return each fault in each phase in which it can be done."""
        return {
            name: fault for name, fault in super().kinds().items()
            if not name.startswith("hang_engine") or name.partition(": ")[2] in RUNNING
        }  # fmt: skip

    def victim(self) -> Worker:
        """Return a worker in the phase of the present fault; remember all engines' processes."""
        worker = super().victim()
        for each in self.workers:
            if each.process and each.process.poll() is None:
                self.seen.update(psutil.Process(each.pid).children(recursive=True))
        return worker

    def arrived(self, worker: Worker, after_s: float) -> bool:
        """Return whether a worker is in the phase, and has an engine if that is to be struck.

        How long vLLM takes until all its processes are there, or gone, depends on the machine.
        """
        if self.of_engine and self.phase == "starting the engine":
            now = self._steps[worker].look()
            return now == self.phases[self.phase][0] and bool(self.engine_parts_now(worker))
        ending = self.of_engine and self.phase == "ending the engine"
        return super().arrived(worker, 0.0 if ending else after_s)

    def by_wrong_model(self) -> int:
        """Return how many answers have another number of prompt tokens than their model makes."""
        tokens: dict[tuple[str, str], Counter[int]] = {}
        for batch_id in self.failing:
            for raw in self.on.store.results(self.on.ids(batch_id)):
                meta = orjson.loads(raw or b"{}")
                if usage := (meta.get("result") or {}).get("usage"):
                    place = self.model_of(batch_id), meta["warmq"]["custom_id"]
                    tokens.setdefault(place, Counter())[usage["prompt_tokens"]] += 1
        return by_other_models(tokens)


def by_other_models(tokens: Mapping[tuple[str, str], Counter[int]]) -> int:
    """Return how many answers are by another model, from their numbers of prompt tokens.

    `tokens` has these numbers by model and custom_id; each batch asks the same question under a
    custom_id, so one model's numbers are the same there, and those of a longer template higher.
    """
    usual = {place: counts.most_common(1)[0][0] for place, counts in tokens.items()}
    found = sum(counts.total() - counts[usual[place]] for place, counts in tokens.items())
    for custom_id in {custom_id for _, custom_id in tokens}:
        numbers = [usual[m, custom_id] for m in BEFORE if (m, custom_id) in usual]
        if sorted(set(numbers)) != numbers:
            found += sum(tokens[m, custom_id].total() for m in BEFORE if (m, custom_id) in tokens)
    return found
