"""vLLM's answers in the worker's own process, for what other engines are compared with."""

from __future__ import annotations

import subprocess
from functools import cached_property
from pathlib import Path
from typing import Any

from kit.commands.support import producer_command, producer_env
from kit.stacks import real_stack  # finds `questions`
from questions import held_out_reading

from contract.openai.body import CHAT_URL, COMPLETION_URL
from demo.stack import tiny_model_worker


class InProcess:
    """Questions with short answers, and vLLM's answers in the worker's own process.

    `lines` has the input lines by custom_id, chats and completions mixed: 300 questions q0, q1,
    ... that the model knows, and 150 longer ones r0, r1, ...
    """

    def __init__(self, folder: Path, redis_url: str) -> None:
        known = {f"q{n}": question for n, question in enumerate(real_stack.listed_questions(300))}
        reading = {f"r{n}": question for n, question in enumerate(held_out_reading(77, 150))}
        self.lines: dict[str, dict[str, Any]] = {}
        for n, (custom_id, question) in enumerate((known | reading).items()):
            self.lines[custom_id] = {
                "custom_id": custom_id, "method": "POST",
                "url": CHAT_URL if n % 2 else COMPLETION_URL,
                "body": real_stack.asked(question, bool(n % 2), max_tokens=24),
            }  # fmt: skip
        self._out = folder / "out.jsonl"
        source = real_stack.write_jsonl(folder / "in.jsonl", list(self.lines.values()))
        self._worker = tiny_model_worker(redis_url, folder / "worker.log").start()
        with (folder / "producer.log").open("wb") as log:
            self._producer = subprocess.Popen(
                producer_command("submit", source, "--wait", "-o", self._out),
                env=producer_env(redis_url), stdout=log, stderr=log,
            )  # fmt: skip

    @cached_property
    def bodies(self) -> dict[str, dict[str, Any]]:
        """The response bodies by custom_id, once the worker has answered all; then it stops."""
        assert self._producer.wait(180) == 0, self._out.parent
        self._worker.stop()
        answers = real_stack.read_jsonl(self._out)
        return {line["custom_id"]: line["response"]["body"] for line in answers}

    def end(self) -> None:
        """Kill what is left."""
        self._worker.kill()
        self._producer.kill()
        self._producer.wait(10)
