"""Prompts of many requests templated and tokenized in one call, in the thread where vLLM does so.

vLLM hands each prompt to that thread by itself: a future, two switches of threads and the
tokenizer's preparations for each. Here all prompts that come while the thread is busy go together,
and the tokenizer releases Python's lock while it works on them.
"""

import asyncio
from collections.abc import Sequence
from typing import Any

#: Most prompts, and characters, of one call.
AT_ONCE, CHARACTERS = 128, 262_144

Wanted = tuple[Any, Any, "asyncio.Future[Any]"]


class Together:
    """The prompts that wait; used on one loop.

    Its thread is vLLM's own, for a tokenizer takes one call at a time.
    """

    def __init__(self, renderer: Any) -> None:
        self._renderer = renderer
        self._waiting: list[Wanted] = []
        self._busy = False

    def tokens(self, plan: Any, prompt: Any) -> "asyncio.Future[Any]":
        """Return the tokens of a prompt, or of messages; None if vLLM should tell what is wrong."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        self._waiting.append((plan, prompt, future))
        if not self._busy:
            self._busy = True
            loop.call_soon(self._hand_over, loop)  # those of this turn of the loop go together
        return future

    def _hand_over(self, loop: asyncio.AbstractEventLoop) -> None:
        taken: list[Wanted] = []
        size = 0
        for wanted in self._waiting:
            if len(taken) == AT_ONCE or size > CHARACTERS:
                break
            taken.append(wanted)
            size += _size(wanted[1])
        del self._waiting[: len(taken)]
        self._busy = bool(taken)
        if not taken:
            return
        asked = [(plan, prompt) for plan, prompt, _ in taken]
        try:
            doing = loop.run_in_executor(self._renderer._executor, self._work, asked)
        except RuntimeError as error:  # the engine was told to end, and its thread with it
            doing = loop.create_future()
            doing.set_exception(error)
        doing.add_done_callback(lambda done: self._deliver(taken, done, loop))

    def _deliver(
        self, taken: Sequence[Wanted], done: "asyncio.Future[Any]", loop: asyncio.AbstractEventLoop
    ) -> None:
        failed = done.cancelled() or done.exception() is not None
        found = [None] * len(taken) if failed else done.result()
        for (_, _, future), tokens in zip(taken, found, strict=True):
            if not future.done():
                future.set_result(tokens)
        self._hand_over(loop)

    def _work(self, asked: Sequence[tuple[Any, Any]]) -> list[Any]:
        found: list[Any] = [None] * len(asked)
        by_plan: dict[Any, list[int]] = {}
        for place, (plan, _) in enumerate(asked):
            by_plan.setdefault(plan, []).append(place)
        for plan, places in by_plan.items():
            made = plan.tokens(self._renderer, [asked[place][1] for place in places])
            for place, tokens in zip(places, made, strict=True):
                found[place] = tokens
        return found


def _size(prompt: Any) -> int:
    if isinstance(prompt, str):
        return len(prompt)
    return sum(len(part if isinstance(part, str) else part["content"]) for part in prompt)
