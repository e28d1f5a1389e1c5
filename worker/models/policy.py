"""Decides which of a worker's models is loaded next; uses no clock, no Redis and no engine.

A worker has one model loaded at a time, or one main model with its companions (companions.py). A
swap unloads it and loads another one. Each second the worker passes what waits in the queue of each
of its models, and what the other workers serve, to `choose`.

1. While its own queue has work, a model stays at least `min_stay_s`.
2. After that, another model may displace it for an urgent reason. In order of urgency: its queue
   would miss a deadline; an online request has waited there for `max_online_wait_s`; any request
   has waited there for `max_wait_s`, and no other worker serves the queue. None of these counts if
   the queue's other workers have a slot for each waiting request.
3. If tenants of several queues wait, the worker may move to a queue with a tenant that was served
   less than those of its own queue, by weight and over all queues (shares.py): it must be behind by
   a stay's tokens, and the queue's other workers must have fewer slots than its tenants' part.
4. The worker may also move to a queue that takes longer to empty than its own, if other workers
   serve its own queue, too, and the longer of the two times becomes shorter by a factor of GAIN.
   These times are of tokens that are multiplied by the tenants' weights.
5. A worker without work takes, after `pause_s`, a queue with an urgent reason, else one with an
   online request and no other worker, else the one with the most waiting tokens for each slot, by
   weight. The latter must have no other worker, or so much work that help is worth a swap
   (HELP_FOR_SWAP).

So with M models whose queues always have work, a request waits at most `max_wait_s` and M - 1 stays
and swaps of the other models before its model is loaded, and no stay with work is shorter than
`min_stay_s`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

#: A move to another queue must shorten the longer of the two queues' times by this factor.
GAIN = 1.5
#: `min_stay_s` is by default the measured seconds of a swap times this, so that swaps take at most
#: 5 % of the time.
STAY_FOR_SWAP = 20.0
#: The shortest default of `min_stay_s`.
LEAST_STAY_S = 60.0
#: A worker joins the workers of a queue if these need longer than the seconds of a swap times this.
HELP_FOR_SWAP = 12.0
#: A worker without work waits the seconds of a swap times this between two swaps.
PAUSE_FOR_SWAP = 1.0


@dataclass(frozen=True, slots=True)
class Terms:
    """The limits of one model's stays and waits, in seconds.

    `slot_rate` is the measured number of tokens per second of one slot, 0 if it is not known yet.
    """

    swap_s: float
    min_stay_s: float
    max_wait_s: float = 600.0
    max_online_wait_s: float = 30.0
    slot_rate: float = 0.0

    @property
    def pause_s(self) -> float:
        """The least seconds between two swaps of a worker without work."""
        return min(self.min_stay_s, PAUSE_FOR_SWAP * self.swap_s)


def default_stay_s(swap_s: float) -> float:
    """Return the default of `min_stay_s` for a measured swap of `swap_s` seconds."""
    return max(LEAST_STAY_S, STAY_FOR_SWAP * swap_s)


@dataclass(frozen=True, slots=True)
class Demand:
    """The work of one model's queue; ages in seconds.

    `tokens` is the estimate for the requests that wait. `oldest_s` is the age of the oldest of
    them, `online_s` that of the oldest online request (None: none waits). `slack_s`: the seconds
    until the work of the earliest deadline must begin. `slots` are those of all other workers that
    serve the queue or swap to it.

    `weight` is the mean of the tokens' tenants. If tenants of several queues wait, `served` is what
    the least served tenant of this queue was served in all queues (Share), and `due` is the part of
    all slots that the weights give to this queue; otherwise both are 0.
    """

    requests: int = 0
    tokens: float = 0.0
    oldest_s: float = 0.0
    online_s: float | None = None
    slack_s: float = math.inf
    slots: int = 0
    weight: float = 1.0
    served: float = 0.0
    due: float = 0.0

    @property
    def weighted(self) -> float:
        """The tokens, multiplied by the weights of their tenants."""
        return self.tokens * self.weight


@dataclass(frozen=True, slots=True)
class Stay:
    """The loaded model, the seconds since it was loaded, and whether it has work.

    `model` is None before the first load. A model has work while requests wait or run. `slots` are
    this worker's.
    """

    model: str | None
    seconds: float = 0.0
    has_work: bool = False
    slots: int = 1


@dataclass(frozen=True, slots=True)
class Swap:
    """The decision to load `model`; `reason` is for people."""

    model: str
    reason: str


def choose(stay: Stay, demands: Mapping[str, Demand], terms: Mapping[str, Terms]) -> Swap | None:
    """Return the swap that should begin now, or None while the loaded model stays."""
    waiting = {
        model: demand
        for model, demand in demands.items()
        if model != stay.model and demand.requests
    }
    if not waiting:
        return None
    if stay.model is None:
        return _first(waiting, terms, stay.slots)
    own = terms[stay.model]
    if not stay.has_work:
        if stay.seconds < own.pause_s:
            return None
        short = _short_of_workers(waiting, terms)
        return _urgent(waiting, terms) or _first(short, terms, stay.slots)
    if stay.seconds < own.min_stay_s:
        return None
    return (
        _urgent(waiting, terms)
        or _behind(stay, demands, waiting, own)
        or _balanced(stay, demands, _short_of_workers(waiting, terms))
    )


def _short_of_workers(
    waiting: Mapping[str, Demand], terms: Mapping[str, Terms]
) -> dict[str, Demand]:
    """Return the queues without a worker, and those whose workers need several swaps' time."""
    return {m: demand for m, demand in waiting.items() if _needs_one_more(demand, terms[m])}


def _needs_one_more(demand: Demand, terms: Terms) -> bool:
    if not demand.slots:
        return True
    rate = demand.slots * terms.slot_rate
    takes_long = not rate or demand.tokens / rate > HELP_FOR_SWAP * terms.swap_s
    return demand.requests > demand.slots and takes_long


def _urgent(waiting: Mapping[str, Demand], terms: Mapping[str, Terms]) -> Swap | None:
    """Return the swap to the queue that cannot wait longer, if there is one."""
    # Urgency (0 is the highest), seconds that are left (negative if late), model, reason.
    urgent: list[tuple[int, float, str, str]] = []
    for model, demand in waiting.items():
        limits = terms[model]
        if 0 < demand.requests <= demand.slots:
            continue  # the workers of this queue take its requests now
        if demand.slack_s <= limits.swap_s:
            urgent.append((0, demand.slack_s, model, "a deadline needs it"))
        elif demand.online_s is not None and demand.online_s >= limits.max_online_wait_s:
            left_s = limits.max_online_wait_s - demand.online_s
            urgent.append((1, left_s, model, f"an online request waits {demand.online_s:.0f} s"))
        elif demand.oldest_s >= limits.max_wait_s and not demand.slots:
            left_s = limits.max_wait_s - demand.oldest_s
            urgent.append((2, left_s, model, f"a request waits {demand.oldest_s:.0f} s"))
    return Swap(*min(urgent)[2:]) if urgent else None


def _first(waiting: Mapping[str, Demand], terms: Mapping[str, Terms], slots: int) -> Swap | None:
    """Return the swap of a worker that has nothing else to do."""
    if urgent := _urgent(waiting, terms):
        return urgent
    online = {m: d.online_s for m, d in waiting.items() if d.online_s is not None and not d.slots}
    if online:
        model = max(online, key=lambda each: (online[each], each))
        return Swap(model, "an online request waits")
    if not waiting:
        return None
    model = max(waiting, key=lambda m: (waiting[m].weighted / (waiting[m].slots + slots), m))
    return Swap(model, f"{waiting[model].requests} requests wait")


def _behind(
    stay: Stay, demands: Mapping[str, Demand], waiting: Mapping[str, Demand], limits: Terms
) -> Swap | None:
    """Return the swap to the queue with the tenant that was served least for its weight."""
    own = demands.get(stay.model or "", Demand())
    stay_s = max(limits.min_stay_s, STAY_FOR_SWAP * limits.swap_s)
    step = limits.slot_rate * stay.slots * stay_s
    if not own.due or not step:
        return None
    slots = _all_slots(stay, demands)
    behind = [
        (demand.served, model)
        for model, demand in waiting.items()
        if demand.requests > demand.slots
        and demand.slots < demand.due * slots
        and own.served - demand.served > step
    ]
    return (
        Swap(min(behind)[1], "its tenants were served less for their weights") if behind else None
    )


def _all_slots(stay: Stay, demands: Mapping[str, Demand]) -> int:
    return stay.slots + sum(demand.slots for demand in demands.values())


def _balanced(
    stay: Stay, demands: Mapping[str, Demand], waiting: Mapping[str, Demand]
) -> Swap | None:
    """Return a move that lets the slower of two queues end sooner; other workers stay with ours."""
    own = demands.get(stay.model or "", Demand())
    if not own.slots or own.slots < own.due * _all_slots(stay, demands):
        return None
    own_after = own.weighted / own.slots  # without this worker's slots
    best: tuple[float, str] | None = None
    for model, demand in waiting.items():
        before = demand.weighted / demand.slots if demand.slots else math.inf
        after = max(demand.weighted / (demand.slots + stay.slots), own_after)
        gain = before / after if after else math.inf
        if gain >= GAIN and (best is None or (gain, model) > best):
            best = gain, model
    if best is None:
        return None
    return Swap(best[1], f"{waiting[best[1]].requests} requests wait, other workers go on here")
