"""Forms of requests that were learned from vLLM, and how a request of one runs in its engine.

What plans are made of is known elsewhere: of texts that are written in lean.py, of embeddings and
scores in lean_pooling.py.
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from random import getrandbits
from typing import Any

from worker.engine.vllm.lessons import LESSON, Lesson
from worker.engine.vllm.names import VLLMValidationError
from worker.engine.vllm.plans import Unclear

log = logging.getLogger(__name__)

#: Most forms that are known at once; a file has one, or as many as it has limits of answers.
FORMS = 4096
#: Most forms that have been seen once: one is learned when it comes again, for in a file whose
#: lines have seeds of their own none ever does.
SEEN = 65_536


class Waiting:
    """Stands where AsyncLLM has a queue for each request: takes the one output, or an error."""

    __slots__ = ("output",)

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.output: asyncio.Future[Any] = loop.create_future()

    def put(self, output: Any) -> None:
        """Take what vLLM's output handler has for the request."""
        if self.output.done():
            return  # it was given up meanwhile
        if isinstance(output, Exception):
            self.output.set_exception(output)
        else:
            self.output.set_result(output)


class Learned:
    """The forms that one engine has met, by key; None is one that goes the full way.

    A plan says how a request of its form is run and answered.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._context = engine.vllm_config.model_config.max_model_len
        self._forms: OrderedDict[bytes, Any] = OrderedDict()
        self._learning: set[bytes] = set()
        self._seen: set[int] = set()
        # Several processes may feed one engine, which knows requests by their names.
        self._number = getrandbits(32) << 32

    async def _run(self, requests: Sequence[Any]) -> list[Any]:
        """Return vLLM's outputs of what EngineCore is given for one request."""
        engine, loop = self._engine, asyncio.get_running_loop()
        waiting = [Waiting(loop) for _ in requests]
        try:
            for request, one in zip(requests, waiting, strict=True):
                engine.output_processor.add_request(request, None, None, 0, one)
            for request in requests:
                await engine.engine_core.add_request_async(request)
            if len(waiting) == 1:
                return [await waiting[0].output]
            return await asyncio.gather(*(one.output for one in waiting))
        except (asyncio.CancelledError, VLLMValidationError):  # vocabulary.py refuses a prompt
            await engine.abort([request.request_id for request in requests], internal=True)
            raise

    @contextmanager
    def lesson(self, key: bytes) -> Iterator[Callable[..., Any] | None]:
        """Within it a request goes the full way; call what it gives with body, id and answer.

        None where there is nothing to learn.
        """
        if key in self._forms or key in self._learning or not self._comes_again(key):
            yield None
            return
        lesson = Lesson()
        token = LESSON.set(lesson)
        self._learning.add(key)

        async def learn(body: dict[str, Any], request_id: str, answer: bytes) -> None:
            try:
                self._forms[key] = await self._plan(lesson, body, request_id, answer)
            except Unclear:
                return
            except Exception as why:  # vLLM's own classes have answered, and will
                log.debug("requests of a form go the full way: %s: %s", type(why).__name__, why)
                self._forms[key] = None
            if len(self._forms) > FORMS:
                self._forms.popitem(last=False)

        try:
            yield learn
        finally:
            self._learning.discard(key)
            LESSON.reset(token)

    def _comes_again(self, key: bytes) -> bool:
        form = hash(key)
        if form in self._seen:
            return True
        if len(self._seen) == SEEN:
            self._seen.clear()
        self._seen.add(form)
        return False

    async def _plan(
        self, lesson: Lesson, body: dict[str, Any], request_id: str, answer: bytes
    ) -> Any:
        """Return the form's plan, if it does with this request what vLLM has done.

        Raises:
            Unclear: this request does not tell.
            Exception: it does not; the form's requests go the full way.
        """
        raise NotImplementedError
