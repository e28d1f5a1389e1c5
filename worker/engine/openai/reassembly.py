"""Puts a streamed answer together, equal to the one the server gives without `stream`.

A stream shows progress, and closing it stops the work in the server. Requests for what streams do
not carry are sent without one.
"""

from typing import Any

from contract.openai.body import CHAT_URL

#: Asked for without a stream. vLLM's streams do not carry (or refuse) what the first five ask for,
#: and its tool parsers for streams are other code than those for whole answers.
UNSTREAMED = (
    "prompt_logprobs", "echo", "use_beam_search", "kv_transfer_params", "ec_transfer_params",
    "routed_experts_prompt_start", "return_token_offsets", "return_assistant_tokens_mask", "tools",
    "return_weight_versions",
)  # fmt: skip

#: Fields of vLLM's answers that are null unless asked for, and are left out of its streams.
#: tests/unit/test_openai_drift.py compares them with the installed release.
CHAT = ("service_tier", "system_fingerprint", "prompt_logprobs", "prompt_token_ids", "prompt_text",
        "kv_transfer_params", "ec_transfer_params", "metrics")  # fmt: skip
CHAT_CHOICE = ("logprobs", "finish_reason", "stop_reason", "token_ids", "routed_experts")
CHAT_MESSAGE = (
    "content", "refusal", "annotations", "audio", "function_call", "reasoning",
)  # fmt: skip
COMPLETION = ("service_tier", "system_fingerprint", "kv_transfer_params", "ec_transfer_params",
              "metrics")  # fmt: skip
COMPLETION_CHOICE = ("logprobs", "finish_reason", "stop_reason", "token_ids", "prompt_logprobs",
                     "prompt_token_ids", "routed_experts")  # fmt: skip
USAGE = ("prompt_tokens_details", "completion_tokens_details")

#: What every OpenAI server's choices have.
ANY_CHOICE = ("logprobs", "finish_reason")

Json = dict[str, Any]


def streamable(body: Json) -> bool:
    """Whether a stream of this request carries everything its answer has."""
    asked = (body.get(name) for name in UNSTREAMED)
    if any(not (value is None or value is False or value == []) for value in asked):  # 0 is asked
        return False
    # vLLM streams no logprobs then, but gives them at once.
    return not (body.get("logprobs") is True and body.get("top_logprobs", 0) is None)


class Reassembly:
    """One answer: `add` each chunk in order, then take `body`."""

    def __init__(self, url: str, request: Json, *, vllm: bool) -> None:
        self._chat = url == CHAT_URL
        self._vllm = vllm
        self._ids = bool(request.get("return_token_ids"))
        self._top: Json = {}
        self._choices: dict[int, Json] = {}

    def add(self, chunk: Json) -> None:
        """Take in one chunk of the stream."""
        for name, value in chunk.items():
            if name != "choices" and (value is not None or name not in self._top):
                self._top[name] = value
        for part in chunk.get("choices") or ():
            index = part.get("index", 0)
            choice = self._choices.setdefault(index, {"index": index})
            for name, value in part.items():
                self._merge(choice, name, value)

    def _merge(self, choice: Json, name: str, value: Any) -> None:
        if name == "delta":
            _merge_message(choice.setdefault("message", {}), value or {})
        elif name == "text":
            choice.setdefault("text", []).append(value or "")
        elif name == "logprobs" and value is not None and choice.get(name) is not None:
            for key, entries in value.items():
                choice[name][key] = (choice[name].get(key) or []) + (entries or [])
        elif name == "token_ids" and value is not None:
            choice[name] = (choice.get(name) or []) + value
        elif value is not None or name not in choice:
            choice[name] = value

    def texts(self) -> list[str]:
        """Return each choice's text so far, up to the first that has not begun."""
        begun = (self._choices.get(index) for index in range(len(self._choices)))
        parts = ((c.get("message") or c) if c else {} for c in begun)
        return ["".join(part.get("content") or part.get("text") or ()) for part in parts]

    @property
    def ends(self) -> list[str | None]:
        """The finish_reason of each choice that began; None until it is told."""
        return [choice.get("finish_reason") for choice in self._choices.values()]

    def body(self) -> Json:
        """Return the whole answer."""
        choices = [self._choice(self._choices[index]) for index in sorted(self._choices)]
        answer = self._top | {"choices": choices}
        if self._chat:
            answer["object"] = "chat.completion"
        if self._vllm:
            answer = dict.fromkeys(CHAT if self._chat else COMPLETION) | answer
            answer["usage"] = dict.fromkeys(USAGE) | (answer.get("usage") or {})
        return answer

    def _choice(self, choice: Json) -> Json:
        if not self._chat and not self._ids:
            choice.pop("prompt_token_ids", None)  # an echo's stream names them unasked
        nulls = (CHAT_CHOICE if self._chat else COMPLETION_CHOICE) if self._vllm else ANY_CHOICE
        whole = dict.fromkeys(nulls) | choice
        if self._chat:
            message = _whole(choice.get("message", {}))
            whole["message"] = dict.fromkeys(CHAT_MESSAGE if self._vllm else ()) | message
            return whole
        whole["text"] = "".join(choice.get("text", ()))
        _renumber(whole["logprobs"])
        return whole


def _merge_message(message: Json, delta: Json) -> None:
    for name, value in delta.items():
        if name == "role":
            message[name] = value
        elif name == "tool_calls":
            for call in value or ():
                _merge_call(message.setdefault(name, {}), call)
        elif isinstance(value, str):
            message.setdefault(name, []).append(value)
        elif value is not None:
            message[name] = value


def _merge_call(calls: dict[int, Json], part: Json) -> None:
    call = calls.setdefault(part.get("index", 0), {"function": {"arguments": ""}})
    for name, value in part.items():
        if name == "function":
            function = call["function"]
            function["arguments"] += value.get("arguments") or ""
            function.update({k: v for k, v in value.items() if k != "arguments" and v is not None})
        elif name != "index" and value is not None:
            call[name] = value


def _whole(message: Json) -> Json:
    """Join the pieces; a message that only reasons or calls tools has null for its content."""
    joined = {
        name: "".join(value) if isinstance(value, list) and isinstance(value[0], str) else value
        for name, value in message.items()
        if value != []
    }
    if calls := joined.get("tool_calls"):
        joined["tool_calls"] = [calls[index] for index in sorted(calls)]
    if not joined.get("content") and (calls or joined.get("reasoning")):
        joined["content"] = None
    return joined


def _renumber(logprobs: Json | None) -> None:
    """Count a completion's text offsets by tokens, as whole answers do; streams count by text."""
    offsets = (logprobs or {}).get("text_offset")
    if not logprobs or not offsets:
        return
    for place, token in enumerate(logprobs["tokens"][:-1]):
        offsets[place + 1] = offsets[place] + len(token)
