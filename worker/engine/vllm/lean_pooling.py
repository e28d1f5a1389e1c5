"""Plain embeddings and scores past vLLM's serving classes, as lean.py does it with written texts.

An embedding is of one text; a score is of a pair, of which a cross-encoder gets one prompt (vLLM's
own class makes it, template and types of tokens included), and an embedding model two.
"""

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from worker.engine import Completion
from worker.engine.vllm.learned import Learned
from worker.engine.vllm.lessons import Lesson, note_contexts, note_requests
from worker.engine.vllm.other_urls import Aborted
from worker.engine.vllm.pairs import Made
from worker.engine.vllm.pooling_forms import key_of
from worker.engine.vllm.pooling_plans import PoolingPlan
from worker.engine.vllm.together import Together, tokens_of


class LeanPooling(Learned):
    """Forms of embeddings and scores."""

    key_of = staticmethod(key_of)

    def __init__(self, engine: Any, embedding: Any, scores: Any) -> None:
        """Args: vLLM's AsyncLLM, and its serving classes; None where it has none."""
        super().__init__(engine)
        self._together = Together(engine.renderer, pooled_tokens)
        self._embedding, self._scores = embedding, scores
        note_requests(engine.output_processor)
        for serving in (embedding, scores):
            if serving is not None:
                note_contexts(serving)

    async def generate(
        self, url: str, body: dict[str, Any], request_id: str, key: bytes
    ) -> Completion | None:
        """Run one request; None if it must go the full way.

        Raises:
            Aborted: the engine gave it up.
        """
        plan: PoolingPlan | None = self._forms.get(key)
        if plan is None:
            return None
        wanted = [self._together.tokens(plan, prompt) for prompt in plan.prompts_of(body)]
        inputs = [await one for one in wanted]
        if not all(one and 0 < len(one[0]) <= self._context for one in inputs):
            return None
        self._number += 1
        outputs = await self._run(
            plan.engine_requests(request_id, self._number, inputs, time.time())
        )
        if any(getattr(output, "error", None) is not None for output in outputs):
            return None  # since 0.32 one says what went wrong; vLLM's class tells it as its server
        if any(output.outputs.data.numel() == 0 for output in outputs):
            raise Aborted  # vLLM makes such of what it was told to give up
        return plan.completion(outputs, request_id, int(time.time()))

    async def _plan(
        self, lesson: Lesson, body: dict[str, Any], request_id: str, answer: bytes
    ) -> PoolingPlan:
        serving = self._embedding if "input" in body else self._scores
        plan = PoolingPlan(lesson, serving, request_id, answer)
        loop, renderer = asyncio.get_running_loop(), self._engine.renderer
        made = await loop.run_in_executor(
            renderer._executor, pooled_tokens, renderer, plan, plan.prompts_of(body)
        )
        plan.check(made)
        return plan


def pooled_tokens(renderer: Any, plan: PoolingPlan, prompts: Sequence[Any]) -> list[Made | None]:
    """Return prompts' tokens, each with what else its pooling parameters say, if anything.

    None where vLLM refuses one.
    """
    if plan.pairs is not None:
        return plan.pairs.tokens(renderer.get_tokenizer(), prompts)
    found = tokens_of(renderer, plan, prompts)
    return [None if tokens is None else (tokens, None) for tokens in found]
