"""Learns how vLLM runs a form of requests, and runs the form's later requests.

A form is a url with all fields of a body except its prompt. The second request of a form runs
through vLLM's serving class and is observed: vLLM's limits for its prompt, its chat template, the
request that EngineCore gets, and the output from which the answer is made. A `Replay` is made from
these, and has to give the same results for the observed request before other requests use it
(texts.py, pooling.py).
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
from worker.engine.vllm.fastpath.tokens import TokenBatcher
from worker.engine.vllm.names import VLLMValidationError
from worker.engine.vllm.turns import SHORT_PROMPT

log = logging.getLogger(__name__)

#: Most forms that are kept. A file has one form, or one for each value of max_tokens.
FORMS = 4096
#: Most bytes of the keys of all forms that are kept.
FORMS_BYTES = 16 * 2**20
#: Most forms that are remembered as seen once. Requests with different seeds never repeat a form.
SEEN = 65_536
#: Most bytes of a form's key, for example with a JSON schema of 200 fields; requests with longer
#: keys do not use the fast path.
LONGEST_KEY = 16_384
#: Fields of an answer that have the same value for all requests of a form.
FIXED = ("object", "model", "system_fingerprint")
#: The token ids of a prompt, and additional pooling parameters.
Tokens = tuple[list[int], dict[str, Any] | None]


@dataclass(slots=True)
class Run:
    """A request as EngineCore got it, and its output."""

    request: Any
    output: Any = None


@dataclass(slots=True)
class Observation:
    """What vLLM did with one observed request.

    `calls` is the number of prompts and engine requests: 2 for a plain body. `contexts` are the
    PoolingServeContexts of vLLM's pooling classes.
    """

    tok_params: Any = None
    chat_params: Any = None
    runs: list[Run] = field(default_factory=list)
    contexts: list[Any] = field(default_factory=list)
    calls: int = 0


#: The observation of the current task's request, or None if it is not observed.
OBSERVED: ContextVar[Observation | None] = ContextVar("observed", default=None)


def observe_requests(processor: Any) -> None:
    """Make vLLM's OutputProcessor record observed requests and their outputs."""
    add = processor.add_request
    signature = inspect.signature(add)

    def add_request(request: Any, *args: Any, **kwargs: Any) -> Any:
        if observed := OBSERVED.get():
            observed.calls += 1
            observed.runs.append(run := Run(request))
            queue = signature.bind(request, *args, **kwargs).arguments["queue"]
            put = queue.put

            def record(output: Any) -> None:
                run.output = output
                put(output)

            queue.put = record
        return add(request, *args, **kwargs)

    processor.add_request = add_request


def observe_contexts(serving: Any) -> None:
    """Make one of vLLM's pooling classes record the contexts of observed requests."""
    # vLLM 0.26 prepares requests in a thread, which does not see the context variable.
    name = "_preprocessing_async" if hasattr(serving, "_preprocessing_async") else "_preprocessing"
    prepare = getattr(serving, name)

    def record(*args: Any, **kwargs: Any) -> Any:  # the parameters depend on the release
        if observed := OBSERVED.get():
            observed.contexts += [one for one in args if hasattr(one, "engine_inputs")]
        return prepare(*args, **kwargs)

    setattr(serving, name, record)


def observe_rendering(renderer: Any, name: str, prompts: str) -> None:
    """Make a method of vLLM's renderer record the parameters for observed prompts."""
    render = getattr(renderer, name)
    signature = inspect.signature(render)

    async def record(*args: Any, **kwargs: Any) -> Any:
        if observed := OBSERVED.get():
            bound = signature.bind(*args, **kwargs).arguments
            observed.calls += len(bound[prompts])
            observed.tok_params = bound.get("tok_params")
            observed.chat_params = bound.get("chat_params")
        return await render(*args, **kwargs)

    setattr(renderer, name, record)


def as_key(form: list[Any]) -> bytes | None:
    """Return the key of a form; None if it is too large, or orjson cannot write it."""
    try:
        key = orjson.dumps(form, option=orjson.OPT_SORT_KEYS)
    except TypeError:
        return None
    return key if len(key) <= LONGEST_KEY else None


def is_short_text(prompt: Any) -> bool:
    """Whether the prompt is a text that is short enough for the fast path."""
    return isinstance(prompt, str) and 0 < len(prompt) <= SHORT_PROMPT


def split_name(name: str, request_id: str) -> tuple[str, str]:
    """Return the parts of a name before and after the request id in it.

    Raises:
        Inconclusive: the id is in the name several times, for example "c" in "cmpl-c".
        ValueError: the id is not in the name.
    """
    start = name.find(request_id)
    if start < 0:
        raise ValueError("vLLM makes this name in another way")
    if start != name.rfind(request_id):
        raise Inconclusive
    return name[:start], name[start + len(request_id) :]


class Inconclusive(Exception):
    """This request does not show how its form is run; another request of the form may show it."""


class Replay:
    """Runs and answers the requests of one form as vLLM ran the observed one.

    - `requests`: the engine requests that EngineCore got for the observed request;
    - `names`: for each of them, the parts of its name before and after the request id;
    - `tok_params`, `chat_params`: vLLM's parameters to tokenize and template the form's prompts;
    - `longest`: most tokens of a prompt;
    - `pools`: whether the model is a pooling model.
    """

    pools = False
    chat_params: Any = None
    tok_params: Any
    requests: Sequence[Any]
    names: Sequence[tuple[str, str]]
    longest: int

    def prompts_of(self, body: dict[str, Any]) -> Sequence[Any]:
        """Return the texts or messages to tokenize, one for each of `requests`."""
        raise NotImplementedError

    def answer(
        self, outputs: Sequence[Any], body: dict[str, Any], request_id: str
    ) -> Completion | None:
        """Write the answer from vLLM's outputs; None if vLLM's class has to report an error.

        Raises:
            Aborted: the engine aborted the request.
            RequestFailed, RequestRejected: the engine failed, or ended the answer with an error.
        """
        raise NotImplementedError

    def tokens(self, renderer: Any, prompts: Sequence[Any]) -> list[Tokens | None]:
        """Return each prompt's tokens, or None if vLLM refuses it. Runs in the tokenizer thread."""
        tokenizer = renderer.get_tokenizer()
        texts: dict[int, dict[str, Any]] = {}
        for place, prompt in enumerate(prompts):
            with suppress(Exception):  # vLLM's serving class will report the error
                rendered = {"prompt": prompt}
                if self.chat_params is not None:
                    _, rendered = renderer.render_messages(prompt, self.chat_params)
                texts[place] = self.tok_params.apply_pre_tokenization(tokenizer, rendered)
        tokens: list[Tokens | None] = [None] * len(prompts)
        if not texts:
            return tokens
        options = self.tok_params.get_encode_kwargs()
        encoded = tokenizer([text["prompt"] for text in texts.values()], **options)["input_ids"]
        for (place, text), ids in zip(texts.items(), encoded, strict=True):
            with suppress(Exception):
                tokens[place] = self.cut(tokenizer, {**text, "prompt_token_ids": ids})
        return tokens

    def cut(self, tokenizer: Any, prompt: dict[str, Any]) -> Tokens:
        """Truncate a tokenized prompt as vLLM does."""
        prompt = self.tok_params.apply_post_tokenization(tokenizer, prompt)
        return prompt["prompt_token_ids"], None

    def check(self, inputs: Sequence[Tokens | None]) -> None:
        """Compare our tokens of the observed request's prompts with vLLM's.

        Raises:
            ValueError: the tokens differ.
        """
        for own, request in zip(inputs, self.requests, strict=True):
            extra = getattr(request.pooling_params, "extra_kwargs", None) or {}
            if own is None or own[0] != request.prompt_token_ids or (own[1] or {}) != extra:
                raise ValueError("vLLM tokenizes this prompt in another way")

    def engine_requests(
        self, request_id: str, number: int, inputs: Sequence[Tokens], now: float
    ) -> list[Any]:
        """Return the requests for EngineCore. `number` makes their internal ids unique."""
        requests = []
        for observed, name, (tokens, extra) in zip(self.requests, self.names, inputs, strict=True):
            request = copy(observed)
            request.external_req_id = request_id.join(name)
            request.request_id = f"{request.external_req_id}-{number:08x}"
            request.prompt_token_ids = tokens
            request.arrival_time = now
            # The observed request has the priority of its own queued request. Plain bodies have
            # none, so the request gets that of its queued request only (priorities.py).
            request.priority = 0
            if self.pools and (extra or observed.pooling_params.extra_kwargs):
                request.pooling_params = copy(observed.pooling_params)
                request.pooling_params.extra_kwargs = extra
            requests.append(request)
        return requests


class OutputQueue:
    """Takes the final output of one request, or its error; replaces AsyncLLM's queue."""

    __slots__ = ("output",)

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.output: asyncio.Future[Any] = loop.create_future()

    def put(self, output: Any) -> None:
        """Take an output or an error from vLLM's output handler."""
        if self.output.done():
            return  # the request has been cancelled
        if isinstance(output, Exception):
            self.output.set_exception(output)
        else:
            self.output.set_result(output)


class FastPath:
    """Runs requests whose form is known, and learns the forms of one engine's requests.

    In `_forms`, None marks a form that vLLM's serving classes have to run.

    Args:
        engine: vLLM's AsyncLLM.
        key_of: returns the key of a plain body's form; None if the body is not plain.
        replay_of: makes a form's Replay from the observation, body, id and answer of one request.
            It raises Inconclusive if another request has to be observed, and any other error if
            the form cannot use the fast path.
    """

    def __init__(
        self,
        engine: Any,
        key_of: Callable[[str, dict[str, Any]], bytes | None],
        replay_of: Callable[[Observation, dict[str, Any], str, bytes], Replay],
    ) -> None:
        self._engine, self.key_of, self._replay_of = engine, key_of, replay_of
        self._batcher = TokenBatcher(engine.renderer)
        self._forms: OrderedDict[bytes, Replay | None] = OrderedDict()
        self._forms_bytes = 0
        self._learning: set[bytes] = set()
        self._seen: set[int] = set()
        # Random, because several processes may use one engine, which identifies requests by name.
        self._number = getrandbits(32) << 32
        observe_requests(engine.output_processor)

    async def generate(
        self, body: dict[str, Any], request_id: str, key: bytes
    ) -> Completion | None:
        """Run one request; return None if vLLM's serving class has to run it.

        Raises:
            Aborted: the engine aborted the request.
            RequestFailed, RequestRejected: the engine failed, or ended the answer with an error.
        """
        replay = self._forms.get(key)
        if replay is None:
            return None
        inputs = [await future for future in self._tokens(replay, body)]
        for tokens in inputs:
            if not tokens or not 0 < len(tokens[0]) <= replay.longest:
                return None
        self._number += 1
        requests = replay.engine_requests(request_id, self._number, inputs, time.time())
        return replay.answer(await self._run(requests), body, request_id)

    def _tokens(self, replay: Replay, body: dict[str, Any]) -> list[asyncio.Future[Any]]:
        return [self._batcher.tokens(replay, prompt) for prompt in replay.prompts_of(body)]

    async def _run(self, requests: Sequence[Any]) -> list[Any]:
        """Send requests to EngineCore, and return vLLM's outputs."""
        engine, loop = self._engine, asyncio.get_running_loop()
        queues = [OutputQueue(loop) for _ in requests]
        try:
            for request, queue in zip(requests, queues, strict=True):
                engine.output_processor.add_request(request, None, None, 0, queue)
            for request in requests:
                await engine.engine_core.add_request_async(request)
            if len(queues) == 1:
                return [await queues[0].output]
            return await asyncio.gather(*(queue.output for queue in queues))
        except (asyncio.CancelledError, VLLMValidationError):  # vLLM may refuse the token ids
            await engine.abort([request.request_id for request in requests], internal=True)
            raise

    @contextmanager
    def observing(self, key: bytes) -> Iterator[Callable[..., Any] | None]:
        """Observe a request that vLLM's classes run in this context.

        Yields a function to call with the request's body, id and answer, or None if there is
        nothing to learn.
        """
        if key in self._forms or key in self._learning or not self._seen_before(key):
            yield None
            return
        observed = Observation()
        token = OBSERVED.set(observed)
        self._learning.add(key)

        async def learn(body: dict[str, Any], request_id: str, answer: bytes) -> None:
            try:
                replay = self._replay_of(observed, body, request_id, answer)
                replay.check([await future for future in self._tokens(replay, body)])
                self._keep(key, replay)
            except Inconclusive:
                return
            except Exception as error:  # vLLM's classes answer this form from now on
                reason = f"{type(error).__name__}: {error}"
                log.debug("vLLM's serving classes answer a form of requests: %s", reason)
                self._keep(key, None)

        try:
            yield learn
        finally:
            self._learning.discard(key)
            OBSERVED.reset(token)

    def _keep(self, key: bytes, replay: Replay | None) -> None:
        self._forms[key] = replay
        self._forms_bytes += len(key)
        while len(self._forms) > FORMS or self._forms_bytes > FORMS_BYTES:
            oldest, _ = self._forms.popitem(last=False)
            self._forms_bytes -= len(oldest)

    def _seen_before(self, key: bytes) -> bool:
        form = hash(key)
        if form in self._seen:
            return True
        if len(self._seen) == SEEN:
            self._seen.clear()
        self._seen.add(form)
        return False
