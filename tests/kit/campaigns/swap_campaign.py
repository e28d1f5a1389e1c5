"""The fault campaign of swaps: three workers, five models, and each fault in a phase of a swap."""

from __future__ import annotations

import json
import time

import orjson
import psutil
from kit.campaigns import campaign_faults
from kit.campaigns.campaign import Campaign
from kit.campaigns.campaign_faults import Fault
from kit.campaigns.campaign_report import SwapReport
from kit.protocol.lessee import client_of
from kit.stacks.stage import Stage

from contract.redis import keys
from demo.stack import Worker, eventually

MODELS = ("alpha", "beta", "gamma", "delta", "epsilon")
#: Stays so short that each worker swaps all the time.
ENTRY = {"min_stay": "1s", "max_wait": "2s"}
#: Seconds that a simulated engine takes to start, and to end.
BUILD_S, END_S = 0.4, 0.2
#: The text of a worker's log with which each step of a swap begins.
STEPS = {
    "ready": "ready in ", "swapping": "swapping from model ", "ending": "drained: ",
    "starting": " is loaded, of ",
}  # fmt: skip
#: Phases of a swap: the step, and the seconds after its begin among which one is drawn.
PHASES = {
    "claiming": ("ready", 0.0),
    "stopping to pop": ("swapping", 0.0),
    "draining": ("swapping", 0.4),
    "ending the engine": ("ending", END_S / 2),
    "starting the engine": ("starting", BUILD_S),
    "announcing": ("ready", 0.0),
    "popping": ("ready", 0.5),
}  # fmt: skip


class Steps:
    """Reads in a worker's log which step of a swap it is at, and since when."""

    def __init__(self, worker: Worker) -> None:
        self.now, self.since, self.swaps = "", 0.0, 0
        self._log, self._read = worker.log_path, 0

    def look(self) -> str:
        """Return the last step that the log names."""
        with self._log.open("rb") as log:
            log.seek(self._read)
            new = log.read()
        whole = new[: new.rfind(b"\n") + 1]
        self._read += len(whole)
        for line in whole.splitlines():
            for step, text in STEPS.items():
                if text.encode() in line:
                    self.now, self.since = step, time.monotonic()
                    self.swaps += step == "swapping"
        return self.now


class SwapCampaign(Campaign):
    """Does each fault in each phase of a swap."""

    queues = tuple(f"warmq.{model}" for model in MODELS)
    phases = PHASES
    waiting = 60
    slots = 8
    step = 30
    late = 0.1
    large_batches = 0.0
    poisoned = 0.04
    sizes = (20, 90)
    #: Whether engines sleep between the stays of their models, or else stop.
    asleep = False

    def __init__(self, on: Stage, seed: int, faults: int, requests: int) -> None:
        super().__init__(on, seed, faults, requests)
        self.report: SwapReport = SwapReport(seed, "simulated-swaps")
        self.phase = ""
        #: Whether the present fault is done to an engine's processes.
        self.of_engine = False
        self._steps: dict[Worker, Steps] = {}
        self._fed = 0.0
        #: Of each queue how many requests had ended, and since when.
        self._ended: dict[str, tuple[int, float]] = {}

    def start_worker(self, **settings: object) -> Worker:
        """Start a worker of all models behind the proxy; its answers name the loaded one."""
        models = json.dumps(dict.fromkeys(MODELS, ENTRY))
        worker = super().start_worker(**{
            "models": models, "simulated_names_model": True, "simulated_slots": self.slots,
            "simulated_build_s": BUILD_S, "simulated_end_s": END_S, "simulated_latency_s": 0.3,
            "redis_url": self.proxy.url, **({"simulated_sleep": "well"} if self.asleep else {}),
        } | settings)  # fmt: skip
        self._steps[worker] = Steps(worker)
        return worker

    def model_of(self, batch_id: str) -> str:
        """Return the model that was asked."""
        return self.queue_of[batch_id].removeprefix("warmq.")

    def feed(self) -> None:
        """Keep the queues filled; look at most thrice a second."""
        if time.monotonic() > self._fed + 0.3:
            super().feed()
            self._fed = time.monotonic()

    def kinds(self) -> dict[str, Fault]:
        """Return each fault in each phase."""
        chosen = campaign_faults.kinds(simulated=self.simulated, clock=False)
        for name in ("kill_submit", "two_submits_at_once", "lose_replies", "delay_replies"):
            chosen.pop(name, None)
        chosen["cancel"] = cancel
        if self.asleep:
            chosen["hang_engine"] = hang_an_engine
        found = {f"{name}: {phase}": _in(phase, fault)
                 for name, fault in chosen.items() for phase in self.phases}  # fmt: skip
        return found | {"lose_claim": lose_claim}

    def victim(self) -> Worker:
        """Return a worker that is in the phase of the present fault."""
        after_s = self.random.uniform(0, self.phases[self.phase][1])
        claiming = self.phase == "claiming"
        if claiming:
            self.proxy.delay_reply(self.mark("swap_claim"), 1.0)

        def there() -> Worker | None:
            self.feed()
            return next((w for w in self.workers if self.arrived(w, after_s)), None)

        try:
            found = eventually(there, self.hang_s, f"a worker that is {self.phase}", 0.001)
        finally:
            if claiming:
                self.proxy.forget_marks()
        self.report.phases[self.phase] += 1
        return found

    def arrived(self, worker: Worker, after_s: float) -> bool:
        """Return whether a worker is in the phase of the present fault, so long after its begin."""
        steps = self._steps[worker]
        before, now = steps.now, steps.look()
        late_s = time.monotonic() - steps.since - after_s
        if self.phase == "claiming":
            just = self._claims(worker)
        else:
            just = 0 <= late_s < 0.1 if after_s else before != now
        return just and now == self.phases[self.phase][0]

    def look_for_starvation(self) -> None:
        """Raise TimeoutError if no request of a model's queue ended for so long.

        What tenants wait within a queue is their turns' matter, which the verdict judges.
        """
        now = time.monotonic()
        ended = dict.fromkeys(self.queues, 0)
        for batch in self.on.store.batches():
            ended[batch.fields["queue"]] += batch.terminal
        for queue, count in ended.items():
            seen, since = self._ended.get(queue, (-1, now))
            if count != seen:
                self._ended[queue] = count, now
            elif now - since > self.hang_s:
                raise TimeoutError(f"no request of {queue} ends")

    def loaded(self, worker: Worker) -> str:
        """Return the queue that a worker serves, '' if it has announced none."""
        return str(self.on.announced(worker).get("queue", ""))

    def by_wrong_model(self) -> int:
        """Return how many answers are by another model than the one that was asked."""
        found = 0
        for batch_id in self.failing:
            named = [_named(raw) for raw in self.on.store.results(self.on.ids(batch_id))]
            found += sum(name not in ("", self.model_of(batch_id)) for name in named)
        return found

    def _claims(self, worker: Worker) -> bool:
        claims = client_of(self.on.store).hkeys(keys.SWAP_CLAIMS)
        return any(name.split(b".")[-2] == str(worker.pid).encode() for name in claims)

    def _judge(self) -> None:
        report, store = self.report, self.on.store
        for steps in self._steps.values():
            steps.look()
        report.swaps = sum(steps.swaps for steps in self._steps.values())
        report.by_wrong_model = self.by_wrong_model()
        stopped = {str(worker.pid).encode() for worker in self.workers}
        claims = client_of(store).hkeys(keys.SWAP_CLAIMS)
        report.claims_left = sum(name.split(b".")[-2] in stopped for name in claims)
        super()._judge()


class SleepCampaign(SwapCampaign):
    """The same with engines that sleep: each worker keeps the processes of all its models."""

    asleep = True

    def __init__(self, on: Stage, seed: int, faults: int, requests: int) -> None:
        super().__init__(on, seed, faults, requests)
        self.report.engine = "simulated-sleeps"

    def engine_parts_now(self, worker: Worker) -> list[psutil.Process]:
        """Return any one of the worker's engines first, awake or asleep."""
        found = super().engine_parts_now(worker)
        self.random.shuffle(found)
        return found


def _named(raw: bytes | None) -> str:
    """Return the model that an answer names as the one that was loaded; '' without an answer."""
    result = orjson.loads(raw or b"{}").get("result") or {}
    words = str(result["choices"][0]["message"]["content"]).split() if "choices" in result else []
    return words[1] if len(words) == 3 else ""


def _in(phase: str, fault: Fault) -> Fault:
    """Return the fault, done in a phase of a swap."""

    def done(c: Campaign) -> int:
        assert isinstance(c, SwapCampaign)
        c.phase, c.of_engine = phase, fault.__name__ in OF_ENGINE
        if fault.__name__ in AT_ANY_WORKER:
            c.victim()
        return fault(c)

    return done


#: Faults that are done to an engine's processes.
OF_ENGINE = {"kill_engine", "kill_engine_worker", "hang_engine", "hang_an_engine"}
#: Faults that look for no victim.
AT_ANY_WORKER = {
    "kill_all_workers", "drop_connections", "flush_scripts", "pause_redis", "restart_redis",
    "kill_redis", "change_terms",
}  # fmt: skip


def cancel(c: Campaign) -> int:
    """Cancel the batches of the model that a worker has loaded, or is loading."""
    assert isinstance(c, SwapCampaign)
    queue = c.loaded(c.victim())
    for batch in c.on.store.batches():
        if c.queue_of.get(batch.id) == queue and batch.sealed and not batch.finished:
            c.cancelled.add(batch.id)
            c.report.cancelled += c.on.store.cancel(batch)
    return 0


def hang_an_engine(c: Campaign) -> int:
    """Stop the process of an engine; one that sleeps is missed only when its model is loaded."""
    with campaign_faults.frozen(c, engine=True) as (victim,):
        c.engine_parts_now(victim)[0].suspend()
    return campaign_faults.HELD


def lose_claim(c: Campaign) -> int:
    """Lose the reply to a claim that Redis has made."""
    c.proxy.drop_reply(c.mark("swap_claim"))

    def lost() -> bool:
        c.feed()
        return c.proxy.dropped.is_set()

    eventually(lost, c.hang_s, "a claim")
    return 0
