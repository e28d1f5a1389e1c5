"""Workers that lack one of the guards of the promise, to see that the observers notice."""

from __future__ import annotations

import shutil
from pathlib import Path

from demo.stack import ROOT

Mutation = tuple[str, str, str]
#: File, the guard, and what stands there without it.
NX: Mutation = ("common.lua", "redis.call('SET', RESULT .. id, meta, 'NX')",
                "redis.call('SET', RESULT .. id, meta)")  # fmt: skip
OWNED: Mutation = ("done.lua", "named[n], ends[n], records[n]", "named[n], '1', records[n]")
GRACE: Mutation = ("sweep.lua", "hold = now + lease_ms end", "hold = 0 end")
#: What keeps turns fair; the model of turns (turns_model.py) sees where one is missing.
WEIGHT: Mutation = ("turns.lua", "ended and ended.share or tokens", "tokens")
NEWCOMER: Mutation = ("turns.lua", "if not start or score >= start then return score end",
                      "do return score end")  # fmt: skip
ZERO: Mutation = ("done.lua", "if outcome == 'completed' then return cost_of_size(size) end",
                  "if outcome == 'completed' then return 0 end")  # fmt: skip
URGENT: Mutation = ("pop.lua", "then list = each end", "then list = nil end")
GOES_ON: Mutation = ("pop.lua", "and (urgent[turn] or not urgent[ring .. '\\6' .. tenant])", "")
MARK: Mutation = ("turns.lua", "  redis.call('ZREM', turns_key(queue) .. ':deadlines', list)", "")
TURNS = {"refund-by-its-weight": WEIGHT, "newcomer": NEWCOMER, "zero-tokens": ZERO,
         "urgent": URGENT, "urgent-goes-on": GOES_ON, "deadline-mark": MARK}  # fmt: skip
CHARGE: Mutation = ("done.lua", "return math.max(1, cost)", "return 0")
GUARDS = {"NX": NX, "the-lease": OWNED, "the-grace": GRACE, "the-charge": CHARGE}


class BrokenPromise(AssertionError):
    """An observer saw what must not be."""


def root_with(folder: Path, mutation: Mutation) -> Path:
    """Return a folder with worker and contract, of whose scripts one lacks a guard."""
    name, guard, without = mutation
    (script,) = ROOT.glob(f"*/lua/{name}")
    return changed_root(folder, (str(script.relative_to(ROOT)), guard, without))


def changed_root(folder: Path, mutation: Mutation) -> Path:
    """Return a folder with the product, of which one file, by its path, has something else."""
    path, old, new = mutation
    root = folder / "mutant"
    root.mkdir()
    for package in ("contract", "worker", "producer", "gateway"):
        shutil.copytree(ROOT / package, root / package)
    text = (root / path).read_text()
    assert text.count(old) == 1, f"{path} no longer has {old}"
    (root / path).write_text(text.replace(old, new))
    return root
