"""Plain requests past vLLM's serving classes: the same answers for a third of the work.

With short prompts and short answers one Python process in front of the engine is the limit
(docs/performance.md), and most of what it does is the same for each request of a file. The first
request of a form goes the full way, and is looked at (lessons.py); if it can be repeated (plans.py)
the others are tokenized together, given to EngineCore as that one was, and their answers written as
its was. What is not plain, and what vLLM would refuse, goes the full way as ever.
"""

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from contract.errors import RequestFailed
from worker.engine import Completion
from worker.engine.vllm.lessons import LESSON, Lesson, look_on
from worker.engine.vllm.names import current_platform
from worker.engine.vllm.other_urls import Aborted
from worker.engine.vllm.plans import PROMPTS, Plan, Unclear
from worker.engine.vllm.together import Together, tokens_of

log = logging.getLogger(__name__)

#: Most forms that are known at once; a file has one, or as many as it has limits of answers.
FORMS = 4096
#: Most forms that have been seen once: one is learned when it comes again, for in a file whose
#: lines have seeds of their own none ever does.
SEEN = 65_536
#: Options by which an answer says more than its text, or somebody else is told of it.
MORE = (
    "enable_log_requests", "enable_prompt_tokens_details", "enable_per_request_metrics",
    "tool_call_parser",
)  # fmt: skip
#: Options by which vLLM refuses requests for their number.
LIMITS = ("max_num_queued_reqs", "max_num_queued_tokens")
#: Parts of a configuration that make requests differ which look the same.
CONFIGURED = ("speculative_config", "kv_transfer_config", "ec_transfer_config", "lora_config")
#: What is used of vLLM's renderer.
RENDERER = (
    "_executor", "get_tokenizer", "render_messages", "render_cmpl_async", "render_chat_async",
)  # fmt: skip


def lean_way(engine: Any, args: Any) -> "Lean | None":
    """Return the lean path of an engine; None where plain answers may hold more than their text.

    Args:
        engine: vLLM's AsyncLLM.
        args: the server's options, as vLLM's parser has them.
    """
    config, model = engine.vllm_config, engine.vllm_config.model_config
    asked = (getattr(args, name, None) for name in MORE)
    scheduled = (getattr(config.scheduler_config, name, None) for name in LIMITS)
    configured = (getattr(config, name, None) for name in CONFIGURED)
    parsed = config.structured_outputs_config.reasoning_parser or model.is_encoder_decoder
    if any((*asked, *scheduled, *configured, parsed, model.hf_config.model_type == "gpt_oss")):
        return None
    renderer = getattr(engine, "renderer", None)
    needed = (
        *((engine, name) for name in ("engine_core", "output_processor")),
        *((renderer, name) for name in RENDERER),
    )
    tested = current_platform.is_cpu() or current_platform.is_cuda_alike()
    return Lean(engine) if tested and all(hasattr(*one) for one in needed) else None


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


class Lean:
    """The forms that one engine has met, by key; None is one that goes the full way."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._context = engine.vllm_config.model_config.max_model_len
        self._forms: OrderedDict[bytes, Plan | None] = OrderedDict()
        self._learning: set[bytes] = set()
        self._seen: set[int] = set()
        self._together = Together(engine.renderer)
        self._number = 0
        look_on(engine.renderer, engine.output_processor)

    async def generate(
        self, url: str, body: dict[str, Any], request_id: str, key: bytes
    ) -> Completion | None:
        """Run one request; None if it must go the full way.

        Raises:
            Aborted: the engine gave it up.
            RequestFailed: the engine failed at it.
        """
        plan = self._forms.get(key)
        if plan is None:
            return None
        tokens = await self._together.tokens(plan, body[PROMPTS[url]])
        if not tokens or len(tokens) > plan.longest_prompt:
            return None
        output = await self._run(plan, tokens, request_id)
        reason = output.outputs[0].finish_reason
        if reason == "abort":
            raise Aborted
        if reason == "error":  # as vLLM's serving classes have it
            raise RequestFailed("GenerationError: Internal server error")
        return plan.completion(output, request_id, int(time.time()))

    async def _run(self, plan: Plan, tokens: list[int], request_id: str) -> Any:
        self._number += 1
        engine, waiting = self._engine, Waiting(asyncio.get_running_loop())
        request = plan.engine_request(request_id, self._number, tokens, time.time())
        engine.output_processor.add_request(request, None, None, 0, waiting)
        try:
            await engine.engine_core.add_request_async(request)
            return await waiting.output
        except asyncio.CancelledError:
            await engine.abort(request.request_id, internal=True)
            raise

    @contextmanager
    def lesson(self, key: bytes) -> Iterator[Callable[..., Any] | None]:
        """Within it a request goes the full way; call what it gives with prompt, id and answer.

        None where there is nothing to learn.
        """
        if key in self._forms or key in self._learning or not self._comes_again(key):
            yield None
            return
        lesson = Lesson()
        token = LESSON.set(lesson)
        self._learning.add(key)

        async def learn(prompt: Any, request_id: str, answer: bytes) -> None:
            try:
                self._forms[key] = await self._plan(lesson, prompt, request_id, answer)
            except Unclear:
                return
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
        self, lesson: Lesson, prompt: Any, request_id: str, answer: bytes
    ) -> Plan | None:
        """Return the form's plan, if it does with this request what vLLM has done; None if not.

        Raises:
            Unclear: this request does not tell.
        """
        try:
            if lesson.calls != 2 or (lesson.chat_params is None) != isinstance(prompt, str):
                raise ValueError("it is prompted in another way")
            plan = Plan(lesson, request_id, answer, self._context)
            loop, renderer = asyncio.get_running_loop(), self._engine.renderer
            (tokens,) = await loop.run_in_executor(
                renderer._executor, tokens_of, renderer, plan, [prompt]
            )
            if tokens != lesson.request.prompt_token_ids:
                raise ValueError("its prompt is made in another way")
        except Unclear:
            raise
        except Exception as why:  # vLLM's own classes have answered, and will
            log.debug("requests of a form go the full way: %s: %s", type(why).__name__, why)
            return None
        return plan
