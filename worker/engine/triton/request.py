"""Translates requests for Triton's vLLM backend, and its answers to OpenAI's format.

The backend takes a text and vLLM's SamplingParams. With the model's tokenizer, this module does
the work that vLLM's own server does first: chat template, defaults, length check.
"""

import inspect
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from contract.errors import RequestRejected
from contract.openai.body import CHAT_URL
from worker.engine import EngineRequest

#: Request fields that are SamplingParams of the same name in every release of the backend.
PASSED = frozenset(
    "temperature top_p top_k min_p seed stop stop_token_ids include_stop_str_in_output ignore_eos "
    "min_tokens frequency_penalty presence_penalty repetition_penalty bad_words allowed_token_ids "
    "skip_special_tokens spaces_between_special_tokens".split()
)
#: Request fields that this module uses, or that have no effect.
USED = frozenset(
    "model messages prompt max_tokens max_completion_tokens user session_id add_generation_prompt "
    "continue_final_message documents chat_template_kwargs structured_outputs response_format "
    "include_reasoning parallel_tool_calls".split()
)
#: Values of other fields that have no effect; null and false never have one.
NEUTRAL = {"n": 1, "tool_choice": "none", "tools": [], "priority": 0, "add_special_tokens": True}
#: The remedy for a field that the backend does not support.
ELSEWHERE = "leave it out, or serve the model with WARMQ_ENGINE=vllm or openai"
#: Remedies for single fields that the backend does not support.
REMEDIES = {
    "n": "send one line for each answer, with different seeds",
    "logit_bias": "use allowed_token_ids or bad_words, or leave it out",
    "tools": "describe them in a message and read the answer's text, or " + ELSEWHERE,
}
#: Fields whose defaults come from the model's generation_config.json, as in vLLM's server.
DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True, slots=True)
class Prompt:
    """The text to send to the server, and its number of tokens."""

    text: str
    tokens: int


class ServerDown(Exception):
    """The server did not finish its answer. The request may run on another server."""


class ServerRefused(Exception):
    """The server answered the request with an error."""


@dataclass(slots=True)
class Answer:
    """An answer: its text, and finish_reason and token counts if the backend sends them."""

    text: str = ""
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


def _refusal(field: str, remedy: str | None = None) -> RequestRejected:
    where, remedy = f"body.{field}", remedy or REMEDIES.get(field, ELSEWHERE)
    message = f"field {where}: Triton's vLLM backend cannot express it; {remedy}"
    return RequestRejected(message, field=where)


def check_fields(body: dict[str, Any]) -> None:
    """Raise RequestRejected, with the remedy, for a field that the backend does not support."""
    for name, value in body.items():
        if name in PASSED or name in USED or value is None or value is False:
            continue
        if name not in NEUTRAL or NEUTRAL[name] != value:
            raise _refusal(name)
    if body.get("add_special_tokens") is False and "prompt" in body:
        raise _refusal("add_special_tokens")


def sampling(
    body: dict[str, Any],
    prompt_tokens: int,
    defaults: dict[str, Any],
    default_max_tokens: int,
    max_model_len: int | None,
) -> dict[str, Any]:
    """Return the SamplingParams. Raises RequestRejected if the request exceeds the context."""
    params = defaults | {k: v for k, v in body.items() if k in PASSED and v is not None}
    requested = body.get("max_completion_tokens") or body.get("max_tokens")
    params["max_tokens"] = requested or default_max_tokens
    if max_model_len is not None:
        room = max_model_len - prompt_tokens
        if room < 1 or (requested and requested > room):
            raise RequestRejected(
                f"the model's context length is {max_model_len} tokens; the prompt has "
                f"{prompt_tokens} and max_tokens is {params['max_tokens']}: shorten one of them",
                code="context_length_exceeded",
            )
        params["max_tokens"] = min(params["max_tokens"], room)
    if (structure := _structure(body)) is not None:
        # The value is JSON within JSON: the backend decodes it a second time.
        params["structured_outputs"] = json.dumps(structure)
    return params


def _structure(body: dict[str, Any]) -> dict[str, Any] | None:
    structured: dict[str, Any] | None = body.get("structured_outputs")
    if structured is not None:
        return structured
    response_format = body.get("response_format") or {"type": "text"}
    kind = response_format.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return {"json_object": True}
    schema = (response_format.get("json_schema") or {}).get("schema")
    if kind != "json_schema" or schema is None:
        raise _refusal("response_format", "name text, json_object or json_schema with a schema")
    return {"json": schema}


class Prompts:
    """Makes the prompts of requests with the tokenizer of `model` (a folder or hub name)."""

    def __init__(self, model: str) -> None:
        from transformers import AutoTokenizer

        self._tokenizer = AutoTokenizer.from_pretrained(model)
        #: Names of apply_chat_template's parameters, which a request must not set.
        self._reserved = set(inspect.signature(self._tokenizer.apply_chat_template).parameters)
        self.defaults = _generation_defaults(Path(model))

    def prompt_of(self, request: EngineRequest) -> Prompt:
        """Return the text to send. Raises RequestRejected if the backend does not support it."""
        if request.url == CHAT_URL:
            return self._for_server(self._chat(request.body))
        text = request.body["prompt"]
        if isinstance(text, list) and len(text) == 1:
            text = text[0]
        if not isinstance(text, str):
            raise _refusal("prompt", "send one text a line, not token ids or several prompts")
        return Prompt(text, len(self.ids(text, special=True)))

    def ids(self, text: str, *, special: bool = False) -> list[int]:
        """Return the token ids of a text, with or without the special tokens around it."""
        ids: list[int] = self._tokenizer(text, add_special_tokens=special)["input_ids"]
        return ids

    def _chat(self, body: dict[str, Any]) -> str:
        options = body.get("chat_template_kwargs") or {}
        if taken := sorted(self._reserved & options.keys()):
            raise _refusal(f"chat_template_kwargs.{taken[0]}", "leave it out")
        continues = bool(body.get("continue_final_message"))
        generate = body.get("add_generation_prompt")
        messages = [_message(n, one) for n, one in enumerate(body["messages"])]
        try:
            text: str = self._tokenizer.apply_chat_template(
                messages,
                documents=body.get("documents"),
                tokenize=False,
                continue_final_message=continues,
                add_generation_prompt=not continues if generate is None else generate,
                **options,
            )
        except Exception as error:  # a template is a program, and may raise any exception
            raise RequestRejected(
                f"the model's chat template refuses these messages: {error}", field="body.messages"
            ) from error
        return text

    def _for_server(self, text: str) -> Prompt:
        """Return a text from which the server makes the tokens of the chat template's text.

        The chat template has already added special tokens, and the server adds them again.
        """
        expected = self.ids(text)
        shorter = text.removeprefix(self._tokenizer.bos_token or "")
        for candidate in dict.fromkeys((shorter, text)):
            if self.ids(candidate, special=True) == expected:
                return Prompt(candidate, len(expected))
        raise _refusal(
            "messages",
            "the server's tokenizer would add special tokens to the chat: send a prompt, or "
            + ELSEWHERE,
        )


def _message(index: int, message: dict[str, Any]) -> dict[str, Any]:
    where = f"messages.{index}"
    if message.get("tool_calls"):
        raise _refusal(f"{where}.tool_calls", REMEDIES["tools"])
    content = message.get("content")
    if not isinstance(content, list):
        return message
    for part in content:
        if part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise _refusal(f"{where}.content", "send text parts only, or " + ELSEWHERE)
    return message | {"content": "\n".join(part["text"] for part in content)}


def _generation_defaults(folder: Path) -> dict[str, Any]:
    try:
        config = json.loads((folder / "generation_config.json").read_text())
    except (OSError, ValueError):  # without the file vLLM's defaults apply
        return {}
    return {name: config[name] for name in DEFAULTS if config.get(name) is not None}


def respond(
    request: EngineRequest, request_id: str, model: str, text: str, finish: tuple[str, int, int]
) -> bytes:
    """Return the endpoint's JSON. `finish`: finish_reason, prompt tokens, completion tokens."""
    reason, prompt_tokens, completion_tokens = finish
    chat = request.url == CHAT_URL
    content: Any = {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
    return orjson.dumps({
        "id": f"{'chatcmpl' if chat else 'cmpl'}-{request_id}",
        "object": "chat.completion" if chat else "text_completion",
        "created": int(time.time()),
        "model": request.body.get("model") or model,
        "choices": [{"index": 0, **content, "logprobs": None, "finish_reason": reason}],
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
        },
    })  # fmt: skip
