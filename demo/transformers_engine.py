"""An engine that runs a model in transformers, on the CPU, one request at a time, greedily."""

import asyncio
import multiprocessing
import time

import orjson
from pydantic import Field

from contract.errors import EngineDead, RequestRejected
from contract.openai.body import COMPLETION_URL
from worker.engine import Capacity, Completion, EngineRequest
from worker.engine.spec import EngineSpec
from worker.settings import WorkerSettings


class TransformersSettings(WorkerSettings):
    needs_model = True
    transformers_threads: int = Field(1, ge=1, le=256, description="CPU threads of the model")


def serve(pipe, stopped, model: str, threads: int) -> None:
    """Run the model in a process; a message for each token shows the worker a step."""
    import torch  # noqa: PLC0415 - only this process loads it
    from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: PLC0415

    torch.set_num_threads(threads)
    tokenizer, network = (c.from_pretrained(model) for c in (AutoTokenizer, AutoModelForCausalLM))
    pipe.send(longest := network.config.max_position_embeddings)
    while True:
        number, prompt, limit, past_the_end = pipe.recv()  # EOFError when the worker has ended
        tokens = tokenizer(prompt, return_tensors="pt").input_ids
        asked, written, cache, reason = tokens.shape[1], [], None, "length"
        while len(written) < min(limit, longest - asked) and stopped.value < number:
            with torch.inference_mode():
                step = network(tokens, past_key_values=cache, use_cache=True)
            tokens, cache = step.logits[:, -1:].argmax(-1), step.past_key_values
            if tokens.item() == tokenizer.eos_token_id and not past_the_end:
                reason, limit = "stop", 0
            else:
                written.append(tokens.item())
                pipe.send((tokenizer.decode(written), None))
        pipe.send((tokenizer.decode(written), (reason, asked, len(written))))


class TransformersEngine:
    grace_s = 5.0

    def __init__(self, settings: TransformersSettings) -> None:
        self._settings, self._free = settings, asyncio.Lock()
        self._text: dict[str, str] = {}  # running request -> its text so far
        self._pipe, self._theirs = multiprocessing.Pipe()
        spawn = multiprocessing.get_context("spawn")
        self._stopped, self._number = spawn.RawValue("q", 0), 0  # of the latest aborted, sent
        args = (self._theirs, self._stopped, settings.model, settings.transformers_threads)
        self._process = spawn.Process(target=serve, args=args, daemon=True)

    def build(self) -> None:
        self._process.start()
        self._theirs.close()  # otherwise our end would not notice the process's death
        self._max_model_len = self._pipe.recv()  # EOFError: the process has died; see its log

    async def start(self) -> Capacity:
        return Capacity(1, self._max_model_len, self._settings.model)

    async def generate(self, request: EngineRequest, request_id: str) -> Completion:
        body, prompt = request.body, request.body.get("prompt")
        if request.url != COMPLETION_URL or not (prompt and isinstance(prompt, str)):
            raise RequestRejected(f"this engine serves {COMPLETION_URL}, for one text a request")
        limit = body.get("max_tokens") or self._settings.default_max_tokens
        await self._free.acquire()
        self._number += 1
        message = self._number, prompt, limit, body.get("ignore_eos")
        running = asyncio.create_task(asyncio.to_thread(self._run, request_id, message))
        running.add_done_callback(lambda _: self._free.release())
        try:
            text, reason, asked, written = await asyncio.shield(running)
        except asyncio.CancelledError:
            self._stopped.value = message[0]  # seen before the next token
            raise
        choice = {"index": 0, "text": text, "finish_reason": reason}
        usage = {"prompt_tokens": asked, "completion_tokens": written}
        answer = {"id": request_id, "model": body.get("model"), "choices": [choice], "usage": usage}
        return Completion(orjson.dumps(answer | {"object": "text_completion"}), asked, written)

    def _run(self, request_id: str, message: object) -> tuple[str, str, int, int]:
        if self.dead():
            raise EngineDead("the model's process has died", inside=False)
        self._progress_at, self._text[request_id] = time.monotonic(), ""
        try:
            self._pipe.send(message)
            while True:
                self._text[request_id], end = self._pipe.recv()
                self._progress_at = time.monotonic()
                if end is not None:
                    return (self._text[request_id], *end)
        except (EOFError, OSError):
            raise EngineDead("the model's process died") from None
        finally:
            del self._text[request_id]

    def text_so_far(self, request_id: str) -> list[str]:
        return [text for text in [self._text.get(request_id)] if text]

    def dead(self) -> bool:
        return not self._process.is_alive()

    def last_progress(self) -> float:
        return self._progress_at if self._text else time.monotonic()

    def kill(self) -> None:
        self._process.kill()

    def shutdown(self) -> None:
        if self._process.pid:  # None if the engine was not built
            self.kill()
            self._process.join(self.grace_s)


ENGINE = EngineSpec(TransformersSettings, TransformersEngine)
