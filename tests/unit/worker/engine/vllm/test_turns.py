"""Requests of many prompts take turns: with others' prompts, and with others on the loop."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from worker.engine.vllm.fastpath.texts import SHORT_PROMPT
from worker.engine.vllm.turns import AT_ONCE, TOKENIZER_METHODS, begin, take_turns

PLACES, PROMPTS = 40, 300
NAME = "vllm.entrypoints.made_for_a_test"


async def merge_all(*iterators: Any) -> AsyncGenerator[Any, None]:
    """Stand where vLLM's function is."""
    for place, iterator in enumerate(iterators):
        async for output in iterator:
            yield place, output


@pytest.fixture
def serving() -> Iterator[Any]:
    """Return a serving module of vLLM's that merges."""
    module: Any = ModuleType(NAME)
    module.merge_async_iterators = merge_all
    sys.modules[NAME] = module
    yield module
    del sys.modules[NAME]


class Engine:
    """Prompts that end when they are told to; who runs, and what has ended how."""

    def __init__(self) -> None:
        self.running, self.most = set[int](), 0
        self.given_up: list[int] = []
        self.ends = asyncio.Event()

    async def prompt(self, place: int, error: Exception | None = None) -> Any:
        self.running.add(place)
        self.most = max(self.most, len(self.running))
        try:
            await self.ends.wait()
            if error is not None:
                raise error
            yield f"answer {place}"
        except asyncio.CancelledError:
            self.given_up.append(place)
            raise
        finally:
            self.running.remove(place)


def renderer(make: Any) -> Any:
    return SimpleNamespace(**dict.fromkeys(TOKENIZER_METHODS, make))


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_many_prompts_are_begun_as_places_are_free_and_all_are_answered(serving: Any) -> None:
    engine = Engine()
    take_turns(renderer(None), PLACES)
    take_turns(renderer(None), PLACES)  # the engine was built again
    found = serving.merge_async_iterators(*(engine.prompt(n) for n in range(PROMPTS)))
    reading = asyncio.create_task(collect(found))
    await turns(2)
    assert len(engine.running) == AT_ONCE  # the loop has its turn before there are more
    await turns(20)
    assert engine.most == PLACES
    engine.ends.set()
    assert await reading == {n: f"answer {n}" for n in range(PROMPTS)}
    assert engine.most == PLACES
    assert not engine.running


async def collect(found: Any) -> dict[int, Any]:
    return {place: output async for place, output in found}


async def test_a_request_that_is_given_up_gives_up_a_few_prompts_in_each_turn(serving: Any) -> None:
    engine = Engine()
    take_turns(renderer(None), PLACES)
    found = serving.merge_async_iterators(*(engine.prompt(n) for n in range(PROMPTS)))
    reading = asyncio.create_task(collect(found))
    await turns(20)
    reading.cancel()
    before = 0
    while not reading.done():
        await turns(1)
        assert len(engine.given_up) - before <= AT_ONCE
        before = len(engine.given_up)
    assert sorted(engine.given_up) == list(range(PLACES))
    assert not engine.running
    assert reading.cancelled()


async def test_the_error_of_one_prompt_ends_the_others(serving: Any) -> None:
    engine = Engine()
    take_turns(renderer(None), PLACES)
    bad = ValueError("of the third")
    prompts = (engine.prompt(n, bad if n == 2 else None) for n in range(PROMPTS))
    found = serving.merge_async_iterators(*prompts)
    engine.ends.set()
    with pytest.raises(ValueError, match="of the third"):
        await collect(found)
    assert not engine.running


async def test_few_prompts_are_merged_as_vllm_does_it(serving: Any) -> None:
    take_turns(renderer(None), PLACES)
    engine = Engine()
    engine.ends.set()
    found = serving.merge_async_iterators(*(engine.prompt(n) for n in range(AT_ONCE)))
    assert found.__name__ == "merge_all"
    assert len(await collect(found)) == AT_ONCE


class Thread:
    """In the place of the thread that makes tokens: what was asked of it, in order."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self._one = asyncio.Lock()

    def make(self, prompt: Any, *_: Any) -> asyncio.Task[str]:
        text = prompt["prompt"] if isinstance(prompt, dict) else prompt
        self.asked.append(text)
        return asyncio.create_task(self._work(text))

    async def _work(self, text: str) -> str:
        async with self._one:
            await turns(3)
            return text


@pytest.mark.parametrize("use", TOKENIZER_METHODS)
async def test_a_small_request_waits_for_one_prompt_of_each_large_one(use: str) -> None:
    thread = Thread()
    made = renderer(thread.make)
    take_turns(made, PLACES)
    given: Any = (
        (lambda text: {"prompt": text}) if use == TOKENIZER_METHODS[0] else (lambda text: text)
    )

    async def request(name: str, count: int) -> list[str]:
        begin(count)
        prompts = (getattr(made, use)(given(f"{name} {n}")) for n in range(count))
        return list(await asyncio.gather(*prompts))

    large = [asyncio.create_task(request(name, 100)) for name in ("a", "b")]
    await turns(5)
    small = await asyncio.create_task(request("small", 1))
    assert small == ["small 0"]
    assert thread.asked[:3] == ["a 0", "b 0", "small 0"]
    assert len(thread.asked) <= 6
    assert await asyncio.gather(*large) == [[f"{x} {n}" for n in range(100)] for x in "ab"]


async def test_long_prompts_of_many_requests_go_one_by_one() -> None:
    thread = Thread()
    made = renderer(thread.make)
    take_turns(made, PLACES)
    text = "x" * (SHORT_PROMPT + 1)
    long = [asyncio.create_task(made._tokenize_prompt_async({"prompt": text})) for _ in range(50)]
    await turns(3)
    assert await made._tokenize_prompt_async({"prompt": "small"}) == "small"
    assert thread.asked[:2] == [text, "small"]
    assert await asyncio.gather(*long) == [text] * 50


async def test_texts_to_pool_take_turns_by_what_is_read_of_them() -> None:
    thread = Thread()
    processor = SimpleNamespace(render_async=lambda given: thread.make(name_of(given)))
    take_turns(renderer(None), PLACES, [SimpleNamespace(io_processor=processor)])
    text = "x" * (SHORT_PROMPT + 1)
    long: list[Any] = [
        {"prompts": {"prompt": text}}, {"data_1": "y", "data_2": text},
        {"conversations": [{"role": "user", "content": text}]},
    ]  # fmt: skip
    waiting = [asyncio.create_task(processor.render_async(given)) for given in long]
    await turns(3)
    await processor.render_async({"prompts": {"prompt": "small"}})
    assert thread.asked[:2] == ["prompts", "small"]
    await asyncio.gather(*waiting)


def name_of(given: Any) -> str:
    small = given.get("prompts", {}).get("prompt") == "small"
    return "small" if small else next(iter(given))
