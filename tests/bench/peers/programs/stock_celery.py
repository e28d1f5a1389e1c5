"""A stock Celery worker over one vLLM engine, as one would write it who knows Celery and vLLM.

The threads pool (prefork cannot hold the engine), one asyncio loop in a thread of its own, late
acks and no prefetching beyond one message a thread. Without STOCK_MODEL the engine is simulated
(slots.py). As a program it is the client of part `queues`.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import threading
from typing import Any

from celery import Celery
from celery.signals import worker_init, worker_shutdown
from slots import Slots

app = Celery("stock", broker=os.environ["STOCK_REDIS_URL"], backend=os.environ["STOCK_REDIS_URL"])
app.conf.update(
    task_acks_late=True,
    worker_prefetch_multiplier=1,
    worker_hijack_root_logger=False,
    worker_redirect_stdouts=False,
    broker_connection_retry_on_startup=True,
    result_expires=3600,
)
loop = asyncio.new_event_loop()
held: dict[str, Any] = {}


class Vllm:
    """The engine, its tokenizer, and what a task asks of them."""

    def __init__(self) -> None:
        from vllm import AsyncEngineArgs, AsyncLLMEngine
        from vllm.utils.argparse_utils import FlexibleArgumentParser

        parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
        words = ["--model", os.environ["STOCK_MODEL"], *shlex.split(os.environ["STOCK_ARGS"])]
        arguments = AsyncEngineArgs.from_cli_args(parser.parse_args(words))
        self._engine = AsyncLLMEngine.from_engine_args(arguments)
        self._tokenizer = self._engine.get_tokenizer()

    async def generate(self, body: dict[str, Any], request_id: str) -> dict[str, Any]:
        """Return the answer's text and its number of tokens."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        prompt = self._tokenizer.apply_chat_template(
            body["messages"], tokenize=False, add_generation_prompt=True
        )
        params = SamplingParams(
            temperature=body["temperature"], max_tokens=body["max_tokens"],
            ignore_eos=body["ignore_eos"], output_kind=RequestOutputKind.FINAL_ONLY,
        )  # fmt: skip
        async for output in self._engine.generate(prompt, params, request_id):
            final = output.outputs[0]
        return {"text": final.text, "tokens": len(final.token_ids)}

    def shutdown(self) -> None:
        """End its processes."""
        self._engine.shutdown()


async def _build() -> Any:
    return Vllm() if "STOCK_MODEL" in os.environ else Slots()


@worker_init.connect
def start_engine(**_: object) -> None:
    """Build the engine on its loop before the worker consumes."""
    threading.Thread(target=loop.run_forever, daemon=True).start()
    held["engine"] = asyncio.run_coroutine_threadsafe(_build(), loop).result()


@worker_shutdown.connect
def stop_engine(**_: object) -> None:
    """End the engine with the worker."""
    held["engine"].shutdown()


@app.task(bind=True, name="stock.generate")
def generate(self: Any, body: dict[str, Any]) -> dict[str, Any]:
    """Answer one body; the thread waits for the loop."""
    answer = asyncio.run_coroutine_threadsafe(held["engine"].generate(body, self.request.id), loop)
    return dict(answer.result())


async def main() -> None:
    """Be the client."""
    from bench.peers.programs.stock_client import obey

    async def send(body: dict[str, Any]) -> str:
        sent = generate.apply_async([body], queue=os.environ.get("STOCK_QUEUE"))
        return f"celery-task-meta-{sent.id}"

    async def fetch(key: str) -> dict[str, Any]:
        return dict(app.AsyncResult(key.removeprefix("celery-task-meta-")).get())

    await obey(os.environ["STOCK_REDIS_URL"], send, fetch)


if __name__ == "__main__":
    asyncio.run(main())
