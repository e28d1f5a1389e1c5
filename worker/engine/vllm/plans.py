"""How requests of one form are run and answered without vLLM's serving classes.

A form is a url and a body without its prompt. Its plan is made from what vLLM did with the first
request of it, and is used only if it makes of that request, token by token and field by field,
what vLLM has made. So a release that does something else is answered by vLLM's own classes.
"""

from copy import copy
from typing import Any

import orjson

from contract.openai.body import CHAT_URL, COMPLETION_URL
from worker.engine import Completion
from worker.engine.vllm.lessons import Lesson

#: Fields of bodies that a plan may have: what they do is in the sampling parameters, and is the
#: same for all prompts. Every other one goes the full way.
SAMPLING = frozenset((
    "model", "max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k", "min_p",
    "min_tokens", "seed", "stop", "stop_token_ids", "ignore_eos", "presence_penalty",
    "frequency_penalty", "repetition_penalty", "user",
))  # fmt: skip
PROMPTS = {COMPLETION_URL: "prompt", CHAT_URL: "messages"}
#: Prompts up to so many characters are templated and tokenized with others.
LONGEST = 32_768
#: Bytes; what is kept of a form is no larger than that, whatever its author sends.
LONGEST_KEY = 4096
ROLES = ("system", "user", "assistant")
#: Fields of an answer that say the same for all requests of a form, and may say something.
FIXED = ("object", "model", "system_fingerprint")


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


def as_key(form: list[Any]) -> bytes | None:
    """Return what a form is known by; None if it is too large to keep, or cannot be written."""
    try:
        key = orjson.dumps(form, option=orjson.OPT_SORT_KEYS)
    except TypeError:  # a number or a text that JSON has and orjson does not write
        return None
    return key if len(key) <= LONGEST_KEY else None


def is_text(prompt: Any) -> bool:
    """Whether it is a text that is not too long to be tokenized with others."""
    return isinstance(prompt, str) and 0 < len(prompt) <= LONGEST


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


class Unclear(Exception):
    """From this request nothing can be learned; from another one it may."""


class Plan:
    """One form's: `tok_params` and `chat_params` are vLLM's for its prompts, `context` is tokens.

    Raises:
        ValueError: vLLM's answer has something that is not known here.
        Unclear: the prompt is so long that its answer's limit may have been cut to what was left.
    """

    def __init__(self, lesson: Lesson, request_id: str, answer: bytes, context: int) -> None:
        (run,), found = lesson.runs, orjson.loads(answer)
        request = run.request
        self.tok_params, self.chat_params = lesson.tok_params, lesson.chat_params
        self._request = request
        self._engine_id = around(request.external_req_id, request_id)
        self._answer_id = around(found["id"], request_id)
        self._read(found)
        limit = request.sampling_params.max_tokens
        #: A longer prompt leaves less room for an answer than the first one did.
        self.longest_prompt = context - limit
        if len(request.prompt_token_ids) >= self.longest_prompt:
            raise Unclear
        again = self.completion(run.output, request_id, found["created"])
        if orjson.loads(again.body) != found:
            raise ValueError("the answer is written in another way")

    def _read(self, found: dict[str, Any]) -> None:
        (choice,) = found["choices"]
        message = choice.get("message")
        text = choice if message is None else message
        told = [
            *(
                v
                for k, v in found.items()
                if k not in ("id", "created", "choices", "usage", *FIXED)
            ),
            *(v for k, v in choice.items() if k not in VARYING),
            *(v for k, v in found["usage"].items() if k not in USAGE),
            *(v for k, v in text.items() if k not in (*VARYING, "content", "role")),
        ]
        if choice["index"] or any(value not in (None, []) for value in told):
            raise ValueError("the answer says more than its text")
        self._answer, self._choice, self._message = found, choice, message

    def engine_request(self, request_id: str, number: int, tokens: list[int], now: float) -> Any:
        """Return the request as EngineCore gets it; `number` makes its inner id unique."""
        request = copy(self._request)
        name = request_id.join(self._engine_id)
        request.external_req_id = name
        request.request_id = f"{name}-{number:08x}"
        request.prompt_token_ids = tokens
        request.arrival_time = now
        return request

    def completion(self, output: Any, request_id: str, created: int) -> Completion:
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


VARYING = ("index", "message", "text", "finish_reason", "stop_reason")
USAGE = ("prompt_tokens", "completion_tokens", "total_tokens")


def around(name: str, request_id: str) -> tuple[str, str]:
    """Return what stands before and after a request's id in a name that vLLM has made of it.

    Raises:
        Unclear: it may stand at several places, as "c" in "cmpl-c"; clients choose ids, too.
        ValueError: it does not.
    """
    place = name.find(request_id)
    if place < 0:
        raise ValueError("a name is made in another way")
    if place != name.rfind(request_id):
        raise Unclear
    return name[:place], name[place + len(request_id) :]
