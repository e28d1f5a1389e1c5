"""Which adapter is loaded when, over an engine that notes what it is asked to load and to drop."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from contract.errors import EngineDead, RequestRejected
from worker.engine.vllm.adapter_folder import AdapterFolder, Stamp
from worker.engine.vllm.adapters import Adapters, refused


class Loads:
    """Notes loads (`+a`) and drops (`-a`); a load of an adapter in `broken` fails."""

    def __init__(self, root: Path, most: int, names: str = "abcd") -> None:
        for name in names:
            (root / name).mkdir()
            (root / name / "adapter_config.json").write_text(json.dumps({"r": 8}))
            (root / name / "adapter_model.safetensors").touch()
        self.root, self.done, self.broken, self.dead = root, list[str](), set[str](), False
        self.hangs = asyncio.Event()
        self.hangs.set()
        self.adapters = Adapters(
            AdapterFolder(str(root)), most, 16, self.load, self.unload, lambda: self.dead, {"base"}
        )

    async def load(self, name: str, path: Path, stamp: Stamp) -> int:
        assert path == self.root / name
        await self.hangs.wait()
        self.done.append(f"+{name}")
        if name in self.broken:
            raise refused(name, "the test says so", "Change the test")
        return len(self.done)

    async def unload(self, name: str, number: int) -> None:
        assert self.done[number - 1] == f"+{name}"
        self.done.append(f"-{name}")

    def ask(self, name: str) -> Asked:
        return Asked(self.adapters, name)


class Asked:
    """A request of an adapter that runs until it is told to end."""

    def __init__(self, adapters: Adapters, name: str) -> None:
        self.entered, self.end = asyncio.Event(), asyncio.Event()
        self.task = asyncio.create_task(self._run(adapters, name))

    async def _run(self, adapters: Adapters, name: str) -> None:
        async with adapters.using(name):
            self.entered.set()
            await self.end.wait()

    async def runs(self) -> Asked:
        await asyncio.wait_for(self.entered.wait(), 10)
        return self

    async def ended(self) -> None:
        self.end.set()
        await asyncio.wait_for(self.task, 10)


async def until(look: Callable[[], object]) -> None:
    """Return when `look` returns a truthy value."""
    while not look():  # noqa: ASYNC110 - what is looked at has no event
        await asyncio.sleep(0.001)


async def until_waits(loads: Loads, name: str, count: int = 1) -> None:
    """Return when requests of an adapter wait for it."""
    await until(lambda: len(loads.adapters._waiting.get(name, ())) >= count)


async def test_an_adapter_is_loaded_once_and_other_models_never(tmp_path: Path) -> None:
    loads = Loads(tmp_path, 2)
    asked = [loads.ask(name) for name in ("a", "a", "base", "", "a", "base")]
    for each in asked:
        await (await each.runs()).ended()
    await (await loads.ask("a").runs()).ended()
    assert loads.done == ["+a"]


async def test_the_least_recently_used_one_leaves(tmp_path: Path) -> None:
    loads = Loads(tmp_path, 2)
    for name in "abac":
        await (await loads.ask(name).runs()).ended()
    assert loads.done == ["+a", "+b", "-b", "+c"]


async def test_one_in_use_stays_and_takes_no_more_while_another_waits(tmp_path: Path) -> None:
    loads = Loads(tmp_path, 1)
    first = await loads.ask("a").runs()
    second = loads.ask("b")
    await until_waits(loads, "b")
    third = loads.ask("a")
    await until_waits(loads, "a")
    assert loads.done == ["+a"] and not second.entered.is_set() and not third.entered.is_set()
    await first.ended()
    await second.runs()
    assert loads.done == ["+a", "-a", "+b"] and not third.entered.is_set()
    await second.ended()
    await (await third.runs()).ended()
    assert loads.done == ["+a", "-a", "+b", "-b", "+a"]


async def test_the_waiting_requests_of_an_adapter_enter_together(tmp_path: Path) -> None:
    """Of alternating requests, those of one adapter become a run; each adapter has its turn."""
    loads = Loads(tmp_path, 1)
    first = await loads.ask("a").runs()
    asked = [loads.ask(name) for _ in range(10) for name in "bcd"]
    for name in "bcd":
        await until_waits(loads, name, 10)
    for each in (first, *asked):
        each.end.set()
    await asyncio.gather(*(each.task for each in asked))
    assert sorted(each for each in loads.done if each[0] == "+") == ["+a", "+b", "+c", "+d"]
    assert len(loads.done) == 4 + 3


async def test_a_wrong_or_unusable_one_waits_for_nobody_and_drops_nobody(tmp_path: Path) -> None:
    loads = Loads(tmp_path, 1)
    first = await loads.ask("a").runs()
    second = loads.ask("b")
    await until_waits(loads, "b")
    (tmp_path / "c" / "adapter_config.json").write_text("{")
    for name in ("c", "x", "../a"):
        with pytest.raises(RequestRejected):
            await asyncio.wait_for(loads.ask(name).task, 10)
    assert loads.done == ["+a"]
    await first.ended()
    await (await second.runs()).ended()


async def test_one_that_vllm_refuses_is_loaded_again_only_when_it_has_changed(
    tmp_path: Path,
) -> None:
    loads = Loads(tmp_path, 2)
    loads.broken = {"b"}
    kept = await loads.ask("a").runs()
    for _ in range(3):
        with pytest.raises(RequestRejected, match="the adapter b cannot be loaded") as raised:
            await loads.ask("b").task
        assert raised.value.code == "adapter_unusable"
    assert loads.done == ["+a", "+b"]
    (tmp_path / "b" / "adapter_model.safetensors").write_bytes(b"changed")
    loads.broken = set()
    await (await loads.ask("b").runs()).ended()
    await kept.ended()
    assert loads.done == ["+a", "+b", "+b"]


async def test_cancelled_requests_leave_nothing_behind(tmp_path: Path) -> None:
    loads = Loads(tmp_path, 1)
    first = await loads.ask("a").runs()
    waits = [loads.ask("b"), loads.ask("b"), loads.ask("c")]
    await until_waits(loads, "b", 2)
    await until_waits(loads, "c")
    for each in waits:
        each.task.cancel()
    await asyncio.gather(*(each.task for each in waits), return_exceptions=True)
    assert loads.adapters._waiting == {}
    await (await loads.ask("a").runs()).ended()  # nobody waits, so it enters beside the first
    loads.hangs.clear()
    first.task.cancel()
    during = loads.ask("b")
    await until_waits(loads, "b")
    during.task.cancel()  # while it is loaded
    loads.hangs.set()
    await (await loads.ask("d").runs()).ended()
    assert loads.adapters._users == {"d": 0}


async def test_one_cancelled_in_the_moment_in_which_it_enters_does_not_hold_it(
    tmp_path: Path,
) -> None:
    loads = Loads(tmp_path, 1)
    loads.hangs.clear()
    asked = loads.ask("a")
    await until_waits(loads, "a")
    (turn,) = loads.adapters._waiting["a"]
    turn.add_done_callback(lambda _: asked.task.cancel())
    loads.hangs.set()
    with pytest.raises(asyncio.CancelledError):
        await asked.task
    await (await loads.ask("b").runs()).ended()
    assert loads.done == ["+a", "-a", "+b"]


async def test_a_dead_engine_ends_those_that_wait(tmp_path: Path) -> None:
    loads = Loads(tmp_path, 1)
    loads.hangs.clear()  # vLLM's call never returns
    asked = [loads.ask("a"), loads.ask("b")]
    await until_waits(loads, "a")
    loads.dead = True
    for each in asked:
        with pytest.raises(EngineDead) as raised:
            await asyncio.wait_for(each.task, 20)
        assert not raised.value.inside


async def test_a_folder_that_cannot_be_read_keeps_its_names(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root, moved = tmp_path / "root", tmp_path / "moved"
    root.mkdir()
    loads = Loads(root, 1)
    looking = asyncio.create_task(loads.adapters.look())
    await until(lambda: loads.adapters.names)
    assert loads.adapters.listed() == ("a", "b", "c", "d")
    looking.cancel()
    root.rename(moved)
    looking = asyncio.create_task(loads.adapters.look())
    await until(lambda: "No such file" in caplog.text)
    assert loads.adapters.listed() == ("a", "b", "c", "d")
    with pytest.raises(RequestRejected):
        await loads.ask("a").task
    moved.rename(root)
    await (await loads.ask("a").runs()).ended()
    looking.cancel()
