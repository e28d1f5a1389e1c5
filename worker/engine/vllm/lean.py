"""Plain requests past vLLM's serving classes: the same answers for a third of the work.

With short prompts and short answers one Python process in front of the engine is the limit
(docs/performance.md), and most of what it does is the same for each request of a file. The first
request of a form goes the full way, and is looked at (lessons.py); if it can be repeated (plans.py)
the others are tokenized together, given to EngineCore as that one was, and their answers written as
its was. What is not plain, and what vLLM would refuse, goes the full way as ever.
"""

import asyncio
import time
from typing import Any

from worker.engine import Completion
from worker.engine.vllm.learned import Learned
from worker.engine.vllm.lessons import Lesson, look_on
from worker.engine.vllm.mistakes import ended_in_error
from worker.engine.vllm.other_urls import Aborted
from worker.engine.vllm.plans import PROMPTS, Plan, key_of
from worker.engine.vllm.together import Together, tokens_of


class Lean(Learned):
    """Forms of chats and completions."""

    def __init__(self, engine: Any) -> None:
        super().__init__(engine)
        self._together = Together(engine.renderer, tokens_of)
        look_on(engine.renderer, engine.output_processor)

    key_of = staticmethod(key_of)

    async def generate(
        self, url: str, body: dict[str, Any], request_id: str, key: bytes
    ) -> Completion | None:
        """Run one request; None if it must go the full way.

        Raises:
            Aborted: the engine gave it up.
            RequestFailed, RequestRejected: the engine failed at it, or at its constraint.
        """
        plan: Plan | None = self._forms.get(key)
        if plan is None:
            return None
        tokens = await self._together.tokens(plan, body[PROMPTS[url]])
        if not tokens or len(tokens) > plan.longest_prompt:
            return None
        self._number += 1
        (output,) = await self._run(
            [plan.engine_request(request_id, self._number, tokens, time.time())]
        )
        reason = output.outputs[0].finish_reason
        if reason == "abort":
            raise Aborted
        if reason == "error":  # as vLLM's serving classes have it
            raise ended_in_error(body)
        return plan.completion(output, request_id, int(time.time()))

    async def _plan(
        self, lesson: Lesson, body: dict[str, Any], request_id: str, answer: bytes
    ) -> Plan:
        prompt = body["messages" if "messages" in body else "prompt"]
        if lesson.calls != 2 or (lesson.chat_params is None) != isinstance(prompt, str):
            raise ValueError("it is prompted in another way")
        plan = Plan(lesson, request_id, answer, self._context)
        loop, renderer = asyncio.get_running_loop(), self._engine.renderer
        (tokens,) = await loop.run_in_executor(
            renderer._executor, tokens_of, renderer, plan, [prompt]
        )
        if tokens != lesson.runs[0].request.prompt_token_ids:
            raise ValueError("its prompt is made in another way")
        return plan
