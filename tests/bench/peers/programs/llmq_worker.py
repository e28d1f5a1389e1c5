"""llmq's own vLLM worker (0.0.9), with the one call mended that vLLM 0.30 broke.

It awaits `engine.get_tokenizer()`, which is no coroutine any more: as released, every request
fails with "object TokenizerPoolCachedTokenizersBackend can't be used in 'await' expression", is
put back, and fails again for ever. It also takes no engine arguments but a few: they are set here.
Run in the environment of requirements/llmq.txt, the repository in PYTHONPATH.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from typing import Any

from bench.peers.ways import ENGINE_KEYWORDS
from llmq.workers import vllm_worker


class AwaitedTokenizer:
    """The engine, with the tokenizer behind a coroutine."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._tokenizer = engine.get_tokenizer()

    async def get_tokenizer(self) -> Any:
        """Return the tokenizer."""
        return self._tokenizer

    async def generate(self, prompt: str, params: Any, request_id: str) -> AsyncIterator[Any]:
        """Yield as the engine does, and see that the answer has its full length."""
        async for output in self._engine.generate(prompt, params, request_id=request_id):
            yield output
        assert len(output.outputs[0].token_ids) == params.max_tokens


class MendedWorker(vllm_worker.VLLMWorker):  # type: ignore[misc]
    """The worker over such an engine."""

    async def _initialize_processor(self) -> None:
        await super()._initialize_processor()
        self.engine = AwaitedTokenizer(self.engine)


if __name__ == "__main__":
    model, queue = sys.argv[1:]
    arguments = vllm_worker.AsyncEngineArgs
    vllm_worker.AsyncEngineArgs = lambda **theirs: arguments(**theirs | ENGINE_KEYWORDS)
    asyncio.run(MendedWorker(model, queue, tensor_parallel_size=1).run())
