"""Answers plain chats and completions without vLLM's serving classes (the fast path).

The answers are the same as vLLM's, and take a third of the processor time. A form is a url with all
fields of a body except its prompt.
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
    Inconclusive,
    Observation,
    Replay,
    as_key,
    is_short_text,
    observe_rendering,
    split_name,
)
from worker.engine.vllm.turns import SHORT_PROMPT

#: Fields that set sampling parameters, and have the same effect on all prompts. A request with any
#: other field runs through vLLM's classes. The constraint of a form was compiled in time for its
#: first requests (grammars.py), so that later ones need no check.
SAMPLING = frozenset((
    "model", "max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k", "min_p",
    "min_tokens", "seed", "stop", "stop_token_ids", "ignore_eos", "presence_penalty",
    "frequency_penalty", "repetition_penalty", "user", "response_format", "structured_outputs",
))  # fmt: skip
#: The field with the prompt, by url.
PROMPTS = {COMPLETION_URL: "prompt", CHAT_URL: "messages"}
#: Roles of the messages of a plain chat.
ROLES = ("system", "user", "assistant")
#: Fields of a choice that are known here; other fields must be empty.
CHOICE_FIELDS = ("index", "message", "text", "finish_reason", "stop_reason")
#: Fields of an answer that are known here; other fields must be empty.
ANSWER_FIELDS = ("id", "created", "choices", "usage", *FIXED)
#: Fields of an answer's usage that are known here; other fields must be empty.
USAGE_FIELDS = ("prompt_tokens", "completion_tokens", "total_tokens")


def texts_path(engine: Any) -> FastPath:
    """Return the fast path for a generative model."""
    context = engine.vllm_config.model_config.max_model_len

    def replay_of(
        observed: Observation, body: dict[str, Any], request_id: str, answer: bytes
    ) -> Replay:
        prompt = body["messages" if "messages" in body else "prompt"]
        if observed.calls != 2 or (observed.chat_params is None) != isinstance(prompt, str):
            raise ValueError("vLLM makes several prompts or several engine requests from this body")
        return TextReplay(observed, request_id, answer, context)

    observe_rendering(engine.renderer, "render_cmpl_async", "prompts")
    observe_rendering(engine.renderer, "render_chat_async", "conversations")
    return FastPath(engine, key_of, replay_of)


def key_of(url: str, body: dict[str, Any]) -> bytes | None:
    """Return the key of a plain body's form; None if the body is not plain."""
    name = PROMPTS.get(url)
    if name is None:
        return None
    other_fields = dict(body)
    prompt = other_fields.pop(name, None)
    is_plain = _is_chat if url == CHAT_URL else is_short_text
    if not other_fields.keys() <= SAMPLING or not is_plain(prompt):
        return None
    return as_key([url, other_fields])


def _is_chat(messages: Any) -> bool:
    if not isinstance(messages, list):
        return False
    size = 0
    for message in messages:
        content = message.get("content") if isinstance(message, dict) else None
        if not isinstance(content, str) or len(message) != 2 or message.get("role") not in ROLES:
            return False
        size += len(content)
    return bool(messages) and size <= SHORT_PROMPT


class TextReplay(Replay):
    """Runs a form of chats or completions.

    Raises:
        ValueError: vLLM's answer has a field that is not known here.
        Inconclusive: the prompt is so long that vLLM may have lowered max_tokens.
    """

    def __init__(self, observed: Observation, request_id: str, answer: bytes, context: int) -> None:
        (run,), observed_answer = observed.runs, orjson.loads(answer)
        self.tok_params, self.chat_params = observed.tok_params, observed.chat_params
        self.requests = [run.request]
        self.names = [split_name(run.request.external_req_id, request_id)]
        self._answer_id = split_name(observed_answer["id"], request_id)
        self._read_answer(observed_answer)
        # With a longer prompt, vLLM would lower max_tokens.
        self.longest = context - run.request.sampling_params.max_tokens
        if len(run.request.prompt_token_ids) >= self.longest:
            raise Inconclusive
        completion = self._completion(run.output, request_id, observed_answer["created"])
        if orjson.loads(completion.body) != observed_answer:
            raise ValueError("vLLM writes this answer in another way")

    def _read_answer(self, answer: dict[str, Any]) -> None:
        (choice,) = answer["choices"]
        message = choice.get("message")
        text = choice if message is None else message
        extra = [
            *(v for k, v in answer.items() if k not in ANSWER_FIELDS),
            *(v for k, v in choice.items() if k not in CHOICE_FIELDS),
            *(v for k, v in answer["usage"].items() if k not in USAGE_FIELDS),
            *(v for k, v in text.items() if k not in (*CHOICE_FIELDS, "content", "role")),
        ]
        if choice["index"] or any(value not in (None, []) for value in extra):
            raise ValueError("the answer has more than its text")
        self._answer, self._choice, self._message = answer, choice, message

    def prompts_of(self, body: dict[str, Any]) -> Sequence[Any]:
        return (body["messages" if "messages" in body else "prompt"],)

    def answer(
        self, outputs: Sequence[Any], body: dict[str, Any], request_id: str
    ) -> Completion | None:
        (output,) = outputs
        reason = output.outputs[0].finish_reason
        if reason == "abort":
            raise Aborted
        if reason == "error":  # as in vLLM's serving classes
            raise ended_in_error(body)
        return self._completion(output, request_id, int(time.time()))

    def _completion(self, output: Any, request_id: str, created: int) -> Completion:
        """Write the answer from vLLM's RequestOutput, as its response classes do."""
        (choice,) = output.outputs
        prompt, written = len(output.prompt_token_ids), len(choice.token_ids)
        text = {"text": choice.text}
        if self._message is not None:
            text = {"message": self._message | {"content": choice.text}}
        ended = {"finish_reason": choice.finish_reason, "stop_reason": choice.stop_reason}
        usage = self._answer["usage"] | {
            "prompt_tokens": prompt,
            "completion_tokens": written,
            "total_tokens": prompt + written,
        }
        answer = self._answer | {
            "id": request_id.join(self._answer_id),
            "created": created,
            "choices": [self._choice | text | ended],
            "usage": usage,
        }
        return Completion(orjson.dumps(answer), prompt, written)
