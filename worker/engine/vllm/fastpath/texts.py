"""Chats and completions past vLLM's serving classes: the same answers for a third of the work.

A form is a url and a body without its prompt. Its plan is made from what vLLM did with the first
request of it, and is used only if it makes of that request, token by token and field by field,
what vLLM has made. So a release that does something else is answered by vLLM's own classes.
"""

import time
from collections.abc import Sequence
from typing import Any

import orjson

from contract.openai.body import CHAT_URL, COMPLETION_URL
from worker.engine import Completion
from worker.engine.vllm.errors import Aborted, ended_in_error
from worker.engine.vllm.fastpath.learning import (
    FIXED,
    FastPath,
    Lesson,
    Plan,
    Unclear,
    around,
    as_key,
    is_text,
    note_rendering,
)
from worker.engine.vllm.turns import LONGEST

#: Fields of bodies that a plan may have: what they do is in the sampling parameters, and is the
#: same for all prompts. Every other one goes the full way.
SAMPLING = frozenset((
    "model", "max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k", "min_p",
    "min_tokens", "seed", "stop", "stop_token_ids", "ignore_eos", "presence_penalty",
    "frequency_penalty", "repetition_penalty", "user",
))  # fmt: skip
PROMPTS = {COMPLETION_URL: "prompt", CHAT_URL: "messages"}
ROLES = ("system", "user", "assistant")
#: Fields of an answer's choice, of the answer and of its usage that may differ from another's.
VARYING = ("index", "message", "text", "finish_reason", "stop_reason")
VARIED = ("id", "created", "choices", "usage", *FIXED)
USAGE = ("prompt_tokens", "completion_tokens", "total_tokens")


def texts_path(engine: Any) -> FastPath:
    """Return the fast path of an AsyncLLM that generates."""
    context = engine.vllm_config.model_config.max_model_len

    def plan_of(lesson: Lesson, body: dict[str, Any], request_id: str, answer: bytes) -> Plan:
        prompt = body["messages" if "messages" in body else "prompt"]
        if lesson.calls != 2 or (lesson.chat_params is None) != isinstance(prompt, str):
            raise ValueError("it is prompted in another way")
        return TextPlan(lesson, request_id, answer, context)

    note_rendering(engine.renderer, "render_cmpl_async", "prompts")
    note_rendering(engine.renderer, "render_chat_async", "conversations")
    return FastPath(engine, key_of, plan_of)


def key_of(url: str, body: dict[str, Any]) -> bytes | None:
    """Return what is the same for all requests of a plain body's form; None if it is not plain."""
    name = PROMPTS.get(url)
    if name is None:
        return None
    rest = dict(body)
    prompt = rest.pop(name, None)
    if not rest.keys() <= SAMPLING or not (_is_chat if url == CHAT_URL else is_text)(prompt):
        return None
    return as_key([url, rest])


def _is_chat(messages: Any) -> bool:
    if not isinstance(messages, list):
        return False
    size = 0
    for message in messages:
        content = message.get("content") if isinstance(message, dict) else None
        if not isinstance(content, str) or len(message) != 2 or message.get("role") not in ROLES:
            return False
        size += len(content)
    return bool(messages) and size <= LONGEST


class TextPlan(Plan):
    """One form's.

    Raises:
        ValueError: vLLM's answer has something that is not known here.
        Unclear: the prompt is so long that its answer's limit may have been cut to what was left.
    """

    def __init__(self, lesson: Lesson, request_id: str, answer: bytes, context: int) -> None:
        (run,), found = lesson.runs, orjson.loads(answer)
        self.tok_params, self.chat_params = lesson.tok_params, lesson.chat_params
        self.requests = [run.request]
        self.names = [around(run.request.external_req_id, request_id)]
        self._answer_id = around(found["id"], request_id)
        self._read(found)
        # A longer prompt leaves less room for an answer than the first one did.
        self.longest = context - run.request.sampling_params.max_tokens
        if len(run.request.prompt_token_ids) >= self.longest:
            raise Unclear
        again = self._completion(run.output, request_id, found["created"])
        if orjson.loads(again.body) != found:
            raise ValueError("the answer is written in another way")

    def _read(self, found: dict[str, Any]) -> None:
        (choice,) = found["choices"]
        message = choice.get("message")
        text = choice if message is None else message
        told = [
            *(v for k, v in found.items() if k not in VARIED),
            *(v for k, v in choice.items() if k not in VARYING),
            *(v for k, v in found["usage"].items() if k not in USAGE),
            *(v for k, v in text.items() if k not in (*VARYING, "content", "role")),
        ]
        if choice["index"] or any(value not in (None, []) for value in told):
            raise ValueError("the answer says more than its text")
        self._answer, self._choice, self._message = found, choice, message

    def prompts_of(self, body: dict[str, Any]) -> Sequence[Any]:
        return (body["messages" if "messages" in body else "prompt"],)

    def answer(
        self, outputs: Sequence[Any], body: dict[str, Any], request_id: str
    ) -> Completion | None:
        (output,) = outputs
        reason = output.outputs[0].finish_reason
        if reason == "abort":
            raise Aborted
        if reason == "error":  # as vLLM's serving classes have it
            raise ended_in_error(body)
        return self._completion(output, request_id, int(time.time()))

    def _completion(self, output: Any, request_id: str, created: int) -> Completion:
        """Write the answer from vLLM's RequestOutput as its response classes would."""
        (made,) = output.outputs
        choice, prompt, written = self._choice, len(output.prompt_token_ids), len(made.token_ids)
        ended = {"finish_reason": made.finish_reason, "stop_reason": made.stop_reason}
        if self._message is None:
            choice = choice | {"text": made.text} | ended
        else:
            choice = choice | {"message": self._message | {"content": made.text}} | ended
        usage = self._answer["usage"] | {
            "prompt_tokens": prompt,
            "completion_tokens": written,
            "total_tokens": prompt + written,
        }
        answer = self._answer | {
            "id": request_id.join(self._answer_id),
            "created": created,
            "choices": [choice],
            "usage": usage,
        }
        return Completion(orjson.dumps(answer), prompt, written)
