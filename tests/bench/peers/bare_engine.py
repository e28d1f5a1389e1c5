"""vLLM alone in a process of its own: which term of a front end costs what.

`final` asks for each answer once, at its end, as the queue does; `cumulative` for every token, as
generate() does when it is not told otherwise; `frozen` is `final` with what exists kept from the
garbage collector, as vLLM's server and warmq do; `offline` is another process, with LLM.generate
over the whole file. As a program it obeys lines on stdin: KIND COUNT.
"""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from bench.peers.ways import ENGINE_ARGS, ENGINE_ENV, PYTHONPATH, TOKENS, Found, body, end

from demo.stack import MODEL

IN_FLIGHT = 64
KINDS = {
    "final": "final output only",
    "cumulative": "output at every token",
    "frozen": "final output, gc.freeze",
}
OFFLINE = "offline"


class BareEngine:
    """The program, kept warm; one with an `owner` gives its orders to the owner's."""

    warm = True

    def __init__(self, folder: Path, kind: str, owner: BareEngine | None = None) -> None:
        self.name = "LLM.generate"
        if kind != OFFLINE:
            self.name = f"AsyncLLMEngine alone, {KINDS[kind]}"
        self._kind = kind
        self._owner = owner
        self._process: subprocess.Popen[str] | None = None
        self._log = folder / f"bare-{kind}.log"

    def start(self) -> None:
        """Start it and wait for its engine."""
        if self._owner is not None:
            self._process = self._owner._process
            return
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, __file__, self._kind],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
                text=True, start_new_session=True,
                env=os.environ | ENGINE_ENV | {"PYTHONPATH": PYTHONPATH},
            )  # fmt: skip
        self.run(2)

    def run(self, count: int) -> Found:
        """Answer `count` chats."""
        assert self._process is not None
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(f"{self._kind} {count}\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith("seconds "):
                seconds = float(line.split()[1])
                return {"tokens_per_s": count * TOKENS / seconds, "wall_s": seconds}
        raise AssertionError(self._log.read_text()[-1000:])

    def stop(self) -> None:
        """End it."""
        if self._owner is None:
            end(self._process)


def offline() -> None:
    """Build an LLM and obey."""
    from vllm import LLM, EngineArgs, SamplingParams
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    words = ["--model", str(MODEL), *shlex.split(ENGINE_ARGS)]
    chosen = EngineArgs.from_cli_args(parser.parse_args(words))
    given = {
        field.name: getattr(chosen, field.name)
        for field in dataclasses.fields(chosen)
        if field.default not in (dataclasses.MISSING, getattr(chosen, field.name))
    }
    llm = LLM(**given)
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    while order := sys.stdin.readline():
        chats = [body(number)["messages"] for number in range(int(order.split()[1]))]
        began = time.monotonic()
        done = llm.chat(chats, params, use_tqdm=False)
        print("seconds", time.monotonic() - began, flush=True)
        assert all(len(one.outputs[0].token_ids) == TOKENS for one in done)


async def main() -> None:
    """Build the engine and obey."""
    from vllm import AsyncEngineArgs, AsyncLLMEngine, SamplingParams
    from vllm.sampling_params import RequestOutputKind
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    words = ["--model", str(MODEL), *shlex.split(ENGINE_ARGS)]
    arguments = AsyncEngineArgs.from_cli_args(parser.parse_args(words))
    engine = AsyncLLMEngine.from_engine_args(arguments)
    tokenizer = engine.get_tokenizer()
    kinds = {
        "final": RequestOutputKind.FINAL_ONLY, "frozen": RequestOutputKind.FINAL_ONLY,
        "cumulative": RequestOutputKind.CUMULATIVE,
    }  # fmt: skip
    loop = asyncio.get_running_loop()
    while order := await loop.run_in_executor(None, sys.stdin.readline):
        kind, count = order.split()
        numbers = iter(range(int(count)))

        async def one_after_another(kind: str, numbers: Iterator[int]) -> None:
            for number in numbers:
                asked = body(number)
                prompt = tokenizer.apply_chat_template(
                    asked["messages"], tokenize=False, add_generation_prompt=True
                )
                params = SamplingParams(
                    temperature=0, max_tokens=TOKENS, ignore_eos=True, output_kind=kinds[kind]
                )
                async for output in engine.generate(prompt, params, f"{kind}{number}"):
                    last = output
                assert len(last.outputs[0].token_ids) == TOKENS

        gc.collect()
        if kind == "frozen":
            gc.freeze()
        began = time.monotonic()
        await asyncio.gather(*(one_after_another(kind, numbers) for _ in range(IN_FLIGHT)))
        print("seconds", time.monotonic() - began, flush=True)
        gc.unfreeze()
    engine.shutdown()


if __name__ == "__main__":
    if sys.argv[1] == OFFLINE:
        offline()
    else:
        asyncio.run(main())
