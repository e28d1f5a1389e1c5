"""Templates and tokenizes the prompts of many requests in one call.

vLLM sends its tokenizer thread one prompt at a time, each with a future, two thread switches and
the tokenizer's preparation. Here, all prompts that arrive while the thread is busy go into one
call. During the call the tokenizer releases the GIL.
"""

import asyncio
from typing import Any

#: Most prompts in one call, and number of characters after which no prompt is added.
AT_ONCE, CHARACTERS = 128, 262_144

#: A waiting prompt: its Replay, the prompt, and the future for its tokens.
Waiting = tuple[Any, Any, "asyncio.Future[Any]"]


class TokenBatcher:
    """Tokenizes prompts in vLLM's own thread, because a tokenizer runs one call at a time."""

    def __init__(self, renderer: Any) -> None:
        self._renderer = renderer
        self._waiting: list[Waiting] = []
        self._busy = False

    def tokens(self, replay: Any, prompt: Any) -> "asyncio.Future[Any]":
        """Return a future for the prompt's tokens; None if vLLM has to refuse it."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        self._waiting.append((replay, prompt, future))
        if not self._busy:
            self._busy = True
            loop.call_soon(self._start_batch, loop)  # after all prompts of this loop iteration
        return future

    def _start_batch(self, loop: asyncio.AbstractEventLoop) -> None:
        batch: list[Waiting] = []
        size = 0
        for waiting in self._waiting:
            if len(batch) == AT_ONCE or size > CHARACTERS:
                break
            batch.append(waiting)
            size += _size(waiting[1])
        del self._waiting[: len(batch)]
        self._busy = bool(batch)
        if not batch:
            return
        try:
            running = loop.run_in_executor(self._renderer._executor, self._tokenize, batch)
        except RuntimeError as error:  # the engine has ended its tokenizer thread
            running = loop.create_future()
            running.set_exception(error)
        running.add_done_callback(lambda done: self._finish(batch, done, loop))

    def _finish(
        self, batch: list[Waiting], done: "asyncio.Future[Any]", loop: asyncio.AbstractEventLoop
    ) -> None:
        failed = done.cancelled() or done.exception() is not None
        tokens_of_batch = [None] * len(batch) if failed else done.result()
        for (_, _, future), tokens in zip(batch, tokens_of_batch, strict=True):
            if not future.done():
                future.set_result(tokens)
        self._start_batch(loop)

    def _tokenize(self, batch: list[Waiting]) -> list[Any]:
        tokens_of_batch: list[Any] = [None] * len(batch)
        by_replay: dict[Any, list[int]] = {}
        for place, (replay, _, _) in enumerate(batch):
            by_replay.setdefault(replay, []).append(place)
        for replay, places in by_replay.items():
            tokens_of_replay = replay.tokens(self._renderer, [batch[place][1] for place in places])
            for place, tokens in zip(places, tokens_of_replay, strict=True):
                tokens_of_batch[place] = tokens
        return tokens_of_batch


def _size(prompt: Any) -> int:
    if isinstance(prompt, str):
        return len(prompt)
    return sum(len(part if isinstance(part, str) else part["content"]) for part in prompt)
