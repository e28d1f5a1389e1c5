"""What vLLM makes of one request is noted; by it the others of its form are run.

The fast path knows nothing of how vLLM reads a body: when a form comes for the second time it looks
on while vLLM's serving class answers, and does the same with the next ones. Noted are the limits of
the prompt and of its template, the request as EngineCore gets it, and the output from which the
answer is written. What plans are made of is known elsewhere: of texts that are written in texts.py,
of embeddings and scores in pooling.py.
"""

import asyncio
import inspect
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from copy import copy
from dataclasses import dataclass, field
from random import getrandbits
from typing import Any

import orjson

from worker.engine import Completion
from worker.engine.vllm.fastpath.tokens import Together
from worker.engine.vllm.names import VLLMValidationError
from worker.engine.vllm.turns import LONGEST

log = logging.getLogger(__name__)

#: Most forms that are known at once; a file has one, or as many as it has limits of answers.
FORMS = 4096
#: Most forms that have been seen once: one is learned when it comes again, for in a file whose
#: lines have seeds of their own none ever does.
SEEN = 65_536
#: Bytes; what is kept of a form is no larger than that, whatever its author sends.
LONGEST_KEY = 4096
#: Fields of an answer that say the same for all requests of a form, and may say something.
FIXED = ("object", "model", "system_fingerprint")
#: The tokens of a prompt, and what the pooling parameters say more, if anything.
Made = tuple[list[int], dict[str, Any] | None]


@dataclass(slots=True)
class Run:
    """A request as EngineCore got it, and what came of it."""

    request: Any
    output: Any = None


@dataclass(slots=True)
class Lesson:
    """What was noted; `calls` counts prompts and requests, of which a plain body has one each.

    `contexts` are the PoolingServeContexts of pooling classes.
    """

    tok_params: Any = None
    chat_params: Any = None
    runs: list[Run] = field(default_factory=list)
    contexts: list[Any] = field(default_factory=list)
    calls: int = 0


LESSON: ContextVar[Lesson | None] = ContextVar("lesson", default=None)


def note_requests(processor: Any) -> None:
    """Let vLLM's OutputProcessor note requests, and their outputs, of a task that has a lesson."""
    add = processor.add_request

    def add_request(request: Any, *more: Any, **named: Any) -> Any:
        if lesson := LESSON.get():
            bound = inspect.signature(add).bind(request, *more, **named).arguments
            _note_request(lesson, bound)
        return add(request, *more, **named)

    processor.add_request = add_request


def note_contexts(serving: Any) -> None:
    """The same of what one of vLLM's serving classes for pooling has before it renders texts."""
    # 0.26 renders in a thread, where the lesson is not known.
    name = "_preprocessing_async" if hasattr(serving, "_preprocessing_async") else "_preprocessing"
    prepare = getattr(serving, name)

    def noting(*given: Any, **named: Any) -> Any:  # whatever a release hands over
        if lesson := LESSON.get():
            lesson.contexts += [one for one in given if hasattr(one, "engine_inputs")]
        return prepare(*given, **named)

    setattr(serving, name, noting)


def note_rendering(renderer: Any, name: str, prompts: str) -> None:
    """The same of how a method of vLLM's renderer templates and tokenizes prompts."""
    render = getattr(renderer, name)
    signature = inspect.signature(render)

    async def noting(*given: Any, **named: Any) -> Any:
        if lesson := LESSON.get():
            bound = signature.bind(*given, **named).arguments
            lesson.calls += len(bound[prompts])
            lesson.tok_params = bound.get("tok_params")
            lesson.chat_params = bound.get("chat_params")
        return await render(*given, **named)

    setattr(renderer, name, noting)


def _note_request(lesson: Lesson, bound: dict[str, Any]) -> None:
    lesson.calls += 1
    run = Run(bound["request"])
    lesson.runs.append(run)
    queue = bound["queue"]
    put = queue.put

    def noting(output: Any) -> None:
        run.output = output
        put(output)

    queue.put = noting


def as_key(form: list[Any]) -> bytes | None:
    """Return what a form is known by; None if it is too large to keep, or cannot be written."""
    try:
        key = orjson.dumps(form, option=orjson.OPT_SORT_KEYS)
    except TypeError:  # a number or a text that JSON has and orjson does not write
        return None
    return key if len(key) <= LONGEST_KEY else None


def is_text(prompt: Any) -> bool:
    """Whether it is a text that is not too long to be tokenized with others."""
    return isinstance(prompt, str) and 0 < len(prompt) <= LONGEST


def around(name: str, request_id: str) -> tuple[str, str]:
    """Return what stands before and after a request's id in a name that vLLM has made of it.

    Raises:
        Unclear: it may stand at several places, as "c" in "cmpl-c"; clients choose ids, too.
        ValueError: it does not.
    """
    place = name.find(request_id)
    if place < 0:
        raise ValueError("a name is made in another way")
    if place != name.rfind(request_id):
        raise Unclear
    return name[:place], name[place + len(request_id) :]


class Unclear(Exception):
    """From this request nothing can be learned; from another one it may."""


class Plan:
    """How the requests of one form are run and answered: as the first one was.

    `requests` are what EngineCore got of the first one, `names` what stands in each one's name
    before and after the request's id. `tok_params` and `chat_params` are vLLM's for the form's
    prompts, of which `longest` is the most tokens. `pools` says that EngineCore writes nothing.
    """

    pools = False
    chat_params: Any = None
    tok_params: Any
    requests: Sequence[Any]
    names: Sequence[tuple[str, str]]
    longest: int

    def prompts_of(self, body: dict[str, Any]) -> Sequence[Any]:
        """Return what is made tokens of: texts, or messages; one for each of `requests`."""
        raise NotImplementedError

    def answer(
        self, outputs: Sequence[Any], body: dict[str, Any], request_id: str
    ) -> Completion | None:
        """Write the answer from vLLM's outputs; None if vLLM's class should say what is wrong.

        Raises:
            Aborted: the engine gave it up.
            RequestFailed, RequestRejected: the engine failed at it, or at its constraint.
        """
        raise NotImplementedError

    def tokens(self, renderer: Any, prompts: Sequence[Any]) -> list[Made | None]:
        """Return the tokens of prompts, None where vLLM refuses one.

        Called in vLLM's tokenizer thread.
        """
        tokenizer = renderer.get_tokenizer()
        texts: dict[int, dict[str, Any]] = {}
        for place, prompt in enumerate(prompts):
            with suppress(Exception):  # the full way tells its author
                rendered = {"prompt": prompt}
                if self.chat_params is not None:
                    _, rendered = renderer.render_messages(prompt, self.chat_params)
                texts[place] = self.tok_params.apply_pre_tokenization(tokenizer, rendered)
        found: list[Made | None] = [None] * len(prompts)
        if not texts:
            return found
        asked = [text["prompt"] for text in texts.values()]
        encoded = tokenizer(asked, **self.tok_params.get_encode_kwargs())["input_ids"]
        for (place, text), ids in zip(texts.items(), encoded, strict=True):
            with suppress(Exception):
                found[place] = self._cut(tokenizer, {**text, "prompt_token_ids": ids})
        return found

    def _cut(self, tokenizer: Any, made: dict[str, Any]) -> Made:
        made = self.tok_params.apply_post_tokenization(tokenizer, made)
        return made["prompt_token_ids"], None

    def check(self, inputs: Sequence[Made | None]) -> None:
        """Compare what is made of the first request's prompts with what vLLM has made.

        Raises:
            ValueError: it is something else.
        """
        for made, request in zip(inputs, self.requests, strict=True):
            more = getattr(request.pooling_params, "extra_kwargs", None) or {}
            if made is None or made[0] != request.prompt_token_ids or (made[1] or {}) != more:
                raise ValueError("its prompt is made in another way")

    def engine_requests(
        self, request_id: str, number: int, inputs: Sequence[Made], now: float
    ) -> list[Any]:
        """Return the requests as EngineCore gets them; `number` makes their inner ids unique."""
        made = []
        for first, name, (tokens, more) in zip(self.requests, self.names, inputs, strict=True):
            request = copy(first)
            request.external_req_id = request_id.join(name)
            request.request_id = f"{request.external_req_id}-{number:08x}"
            request.prompt_token_ids = tokens
            request.arrival_time = now
            if self.pools and (more or first.pooling_params.extra_kwargs):
                request.pooling_params = copy(first.pooling_params)
                request.pooling_params.extra_kwargs = more
            made.append(request)
        return made


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


class FastPath:
    """The forms that one engine has met, by key; None is one that goes the full way.

    Args:
        engine: vLLM's AsyncLLM.
        key_of: returns what is the same for all requests of a plain body's form; None if the body
            is not plain.
        plan_of: makes a form's plan of a lesson, and of the body, id and answer of its request.
            It raises Unclear if this request does not tell, and any other error if the form's
            requests go the full way.
    """

    def __init__(
        self,
        engine: Any,
        key_of: Callable[[str, dict[str, Any]], bytes | None],
        plan_of: Callable[[Lesson, dict[str, Any], str, bytes], Plan],
    ) -> None:
        self._engine, self.key_of, self._plan_of = engine, key_of, plan_of
        self._together = Together(engine.renderer)
        self._forms: OrderedDict[bytes, Plan | None] = OrderedDict()
        self._learning: set[bytes] = set()
        self._seen: set[int] = set()
        # Several processes may feed one engine, which knows requests by their names.
        self._number = getrandbits(32) << 32
        note_requests(engine.output_processor)

    async def generate(
        self, body: dict[str, Any], request_id: str, key: bytes
    ) -> Completion | None:
        """Run one request; None if it must go the full way.

        Raises:
            Aborted: the engine gave it up.
            RequestFailed, RequestRejected: the engine failed at it, or at its constraint.
        """
        plan = self._forms.get(key)
        if plan is None:
            return None
        inputs = [await one for one in self._tokens(plan, body)]
        for one in inputs:
            if not one or not 0 < len(one[0]) <= plan.longest:
                return None
        self._number += 1
        requests = plan.engine_requests(request_id, self._number, inputs, time.time())
        return plan.answer(await self._run(requests), body, request_id)

    def _tokens(self, plan: Plan, body: dict[str, Any]) -> list[asyncio.Future[Any]]:
        """Have tokens made of a body's prompts, all of them at once."""
        return [self._together.tokens(plan, prompt) for prompt in plan.prompts_of(body)]

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
        except (asyncio.CancelledError, VLLMValidationError):  # its token ids may be refused
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
                plan = self._plan_of(lesson, body, request_id, answer)
                plan.check([await one for one in self._tokens(plan, body)])
                self._forms[key] = plan
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
