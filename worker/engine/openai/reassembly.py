"""Joins a stream's chunks into the answer that the server would give without `stream`.

Streams are used because their chunks show progress, and because closing one stops the server's
work. A request is sent without `stream` if a stream would lack a part of its answer.
"""

from collections.abc import Iterator
from operator import itemgetter
from typing import Any

from contract.openai.body import CHAT_URL
from worker.engine.openai.sse import repaired, without_open_end

#: Fields of requests that are sent without a stream. With most of them, vLLM's streams lack a part
#: of the answer, or vLLM refuses to stream. For `tools`, vLLM has
#: separate code that parses streams.
UNSTREAMED = frozenset((
    "prompt_logprobs", "echo", "use_beam_search", "kv_transfer_params", "ec_transfer_params",
    "routed_experts_prompt_start", "return_token_offsets", "return_assistant_tokens_mask", "tools",
    "return_weight_versions",
))  # fmt: skip

# The next six lists are fields of vLLM's answers that are null unless requested, and missing in its
# streams. tests/unit/worker/engine/openai/test_openai_drift.py compares them with the installed
# release.
#: Fields of a chat's answer.
CHAT = ("service_tier", "system_fingerprint", "prompt_logprobs", "prompt_token_ids", "prompt_text",
        "kv_transfer_params", "ec_transfer_params", "metrics")  # fmt: skip
#: Fields of a choice in a chat's answer.
CHAT_CHOICE = ("logprobs", "finish_reason", "stop_reason", "token_ids", "routed_experts")
#: Fields of a message.
CHAT_MESSAGE = (
    "content", "refusal", "annotations", "audio", "function_call", "reasoning",
)  # fmt: skip
#: Fields of a completion's answer.
COMPLETION = ("service_tier", "system_fingerprint", "kv_transfer_params", "ec_transfer_params",
              "metrics")  # fmt: skip
#: Fields of a choice in a completion's answer.
COMPLETION_CHOICE = ("logprobs", "finish_reason", "stop_reason", "token_ids", "prompt_logprobs",
                     "prompt_token_ids", "routed_experts")  # fmt: skip
#: Fields of an answer's usage.
USAGE = ("prompt_tokens_details", "completion_tokens_details")

#: Fields of a message that replace `content`, which then is null.
CONTENT_SUBSTITUTES = (
    "tool_calls", "reasoning", "reasoning_content", "refusal", "audio", "function_call",
)  # fmt: skip
#: Fields of a delta whose values are not pieces of a text.
_WHOLE_FIELDS = ("role", "tool_calls")
#: Fields that the choices of every server have.
ANY_SERVERS_CHOICE = ("logprobs", "finish_reason")

Json = dict[str, Any]


def streamable(body: Json) -> bool:
    """Whether a stream of this request contains its whole answer."""
    values = (body[name] for name in body.keys() & UNSTREAMED)
    # 0 is a value: `in (None, False)` would count it as unset.
    if any(not (value is None or value is False or value == []) for value in values):
        return False
    # With `logprobs` true and `top_logprobs` null, vLLM's streams have no logprobs, but its whole
    # answers have them.
    return not (body.get("logprobs") is True and body.get("top_logprobs", 0) is None)


class Reassembly:
    """One answer in progress: `add` each chunk in order, then call `body`.

    `half_characters`: a text may be cut within a character (between surrogates); `body` joins the
    halves.
    """

    def __init__(self, url: str, request: Json, *, vllm: bool) -> None:
        self.half_characters = False
        self._chat = url == CHAT_URL
        self._vllm = vllm
        self._ids = bool(request.get("return_token_ids"))
        self._top: Json = {}
        self._choices: dict[int, Json] = {}

    def add(self, chunk: Json) -> None:
        """Add one chunk of the stream."""
        deltas = chunk.get("choices") or ()
        if not all(chunk.values()):
            # An empty value replaces nothing: Azure's last chunks have "" as id.
            chunk = {k: value for k, value in chunk.items() if value or k not in self._top}
        self._top.update(chunk)  # `body` replaces `choices` by the joined ones
        for place, delta in enumerate(deltas):
            index = delta.get("index")
            if not isinstance(index, int):
                index = place
            choice = self._choices.get(index)
            if choice is None:
                choice = self._choices[index] = {"index": index}
            for name, value in delta.items():
                if not (value or value == 0):
                    if name not in choice:
                        choice[name] = value
                elif name == "delta":
                    _add_delta(choice, value)
                elif name != "index":
                    _add_field(choice, name, value)

    def texts(self) -> list[str]:
        """Return each choice's text so far, with '' for choices that have not begun."""
        begun = (self._choices.get(index) for index in range(len(self._choices)))
        texts = ["".join(_texts(choice)) if choice else "" for choice in begun]
        return [without_open_end(text) for text in texts] if self.half_characters else texts

    @property
    def choices(self) -> list[Json]:
        """The choices as received so far. Their `finish_reason` and errors are final."""
        return list(self._choices.values())

    @property
    def empty(self) -> bool:
        """Whether no chunk has been added."""
        return not (self._top or self._choices)

    def body(self) -> Json:
        """Return the joined answer."""
        choices = [self._choice(self._choices[index]) for index in sorted(self._choices)]
        answer = self._top | {"choices": choices}
        if self._chat:
            answer["object"] = "chat.completion"
        if self._vllm:
            answer = dict.fromkeys(CHAT if self._chat else COMPLETION) | answer
            usage = answer.get("usage")
            answer["usage"] = dict.fromkeys(USAGE) | (usage if isinstance(usage, dict) else {})
        return repaired(answer) if self.half_characters else answer

    def _choice(self, choice: Json) -> Json:
        if not self._chat and not self._ids:
            choice.pop("prompt_token_ids", None)  # streams include them even if not requested
        nulls = (
            (CHAT_CHOICE if self._chat else COMPLETION_CHOICE) if self._vllm else ANY_SERVERS_CHOICE
        )
        whole = dict.fromkeys(nulls) | choice
        message = _message(choice.get("delta") or {})
        whole.pop("delta", None)
        if not any(value for name, value in message.items() if name != "role"):
            # Perplexity repeats all deltas in `message`; some servers send `message` only.
            message |= whole.get("message") or {}
        if "text" in whole or not self._chat:
            whole["text"] = "".join(choice.get("text") or ())
        if self._chat:
            whole["message"] = dict.fromkeys(CHAT_MESSAGE if self._vllm else ("content",)) | message
        else:
            _renumber(whole["logprobs"])
        return whole


def _add_field(choice: Json, name: str, value: Any) -> None:
    present = choice.get(name)
    if name == "text" and present:
        present.append(value)
    elif name == "text":
        choice[name] = [value]
    elif name == "logprobs" and isinstance(value, dict) and isinstance(present, dict):
        for key, entries in value.items():
            _extend(present, key, entries)
    elif name == "token_ids":
        _extend(choice, name, value)
    elif not (name == "finish_reason" and value == "null"):
        choice[name] = value


def _extend(target: Json, name: str, entries: Any) -> None:
    """Append entries to a list; any other value replaces the present one."""
    if isinstance(entries, list) and isinstance(target.get(name), list):
        target[name] += entries
    elif entries is not None or name not in target:
        target[name] = entries


def _add_delta(choice: Json, delta: Json) -> None:
    whole = choice.get("delta")
    if not whole:
        whole = choice["delta"] = {}
    for name, value in delta.items():
        if value is None:
            continue
        if name in whole and name not in _WHOLE_FIELDS:
            whole[name].append(value)
        elif name == "tool_calls":
            whole.setdefault(name, []).extend(value)
        else:
            whole[name] = value if name == "role" else [value]


def _texts(choice: Json) -> Iterator[str]:
    """Yield the pieces of a choice's text, without the reasoning."""
    for piece in (choice.get("delta") or {}).get("content") or choice.get("text") or ():
        if isinstance(piece, str):
            yield piece
        elif isinstance(piece, list):
            yield from (part["text"] for part in piece if part.get("type") == "text")


def _message(delta: Json) -> Json:
    """Join the pieces of a message; set `content` to null if CONTENT_SUBSTITUTES replace it."""
    whole = {
        name: pieces if name == "role" else (tool_calls if name == "tool_calls" else joined)(pieces)
        for name, pieces in delta.items()
        if pieces
    }
    if not whole.get("content") and any(whole.get(name) for name in CONTENT_SUBSTITUTES):
        whole["content"] = None
    return whole


def _renumber(logprobs: Json | None) -> None:
    """Compute a completion's text offsets from its tokens' lengths, as vLLM's server does."""
    offsets, tokens = ((logprobs or {}).get(name) for name in ("text_offset", "tokens"))
    if offsets and tokens and len(offsets) == len(tokens):
        for place, token in enumerate(tokens[:-1]):
            offsets[place + 1] = offsets[place] + len(token)


# -- joining pieces: adjacent pieces of one type are joined, however the server cuts them

#: Fields with text, in which each piece continues the one before. Other fields (ids, names,
#: signatures) are repeated in each piece, or are in one piece only.
TEXTS = frozenset(
    ("text", "thinking", "reasoning", "content", "refusal", "summary", "arguments", "input",
     "transcript", "data")
)  # fmt: skip


def joined(pieces: list[Any]) -> Any:
    """Join the pieces of a message's field."""
    try:
        return "".join(pieces)
    except TypeError:  # not all pieces are text
        return _join_field("text", pieces)


def merged(pieces: list[Json]) -> Json:
    """Join the pieces of one object, field by field."""
    names = dict.fromkeys(name for piece in pieces for name in piece)
    return {
        name: _join_field(name, [p[name] for p in pieces if p.get(name) is not None])
        for name in names
    }


def _join_field(name: str, values: list[Any]) -> Any:
    if any(isinstance(value, list) for value in values):
        return _join_lists(values)
    if values and all(isinstance(value, dict) for value in values):
        return merged(values)
    if name in TEXTS and all(isinstance(value, str) for value in values):
        return "".join(values) if values else None
    return next((value for value in reversed(values) if value), values[-1] if values else None)


def _join_lists(values: list[Any]) -> list[Any]:
    """Join lists of content parts; a text between them becomes a content part, too."""
    flat: list[Any] = []
    for value in values:
        if isinstance(value, list):
            flat += value
        elif value:
            flat.append({"type": "text", "text": value} if isinstance(value, str) else value)
    groups: list[list[Any]] = []
    labels_so_far: Json = {}
    for part in flat:
        if not isinstance(part, dict):
            groups.append([part])
            labels_so_far = {}
            continue
        labels = {k: v for k, v in part.items() if k not in TEXTS and v is not None}
        if _continues(labels_so_far, labels):
            groups[-1].append(part)
            labels_so_far |= labels
        else:
            groups.append([part])
            labels_so_far = labels if TEXTS.intersection(part) else {}
    return [merged(group) if isinstance(group[0], dict) else group[0] for group in groups]


def _continues(labels_so_far: Json, labels: Json) -> bool:
    """Whether a part with these fields continues the text of the parts before it."""
    same_type = isinstance(labels_so_far.get("type"), str) and labels_so_far["type"] == labels.get(
        "type"
    )
    return same_type and all(
        labels_so_far.get(name, value) == value for name, value in labels.items()
    )


def tool_calls(parts: list[Json]) -> list[Json]:
    """Join the pieces of tool calls; a piece belongs to the latest call with its index.

    Some servers send no index, or always 0. There a piece with a new id and a name begins a call.
    """
    calls: list[tuple[int, list[Json]]] = []
    latest: dict[int, list[Json]] = {}
    for part in parts:
        index = part.get("index")
        if not isinstance(index, int):
            index = calls[-1][0] if calls else 0
        pieces = latest.get(index)
        if pieces is None or _begins_another(pieces[0], part):
            pieces = latest[index] = []
            calls.append((index, pieces))
        pieces.append(part)
    return [_call(pieces) for _, pieces in sorted(calls, key=itemgetter(0))]


def _begins_another(first: Json, part: Json) -> bool:
    named = bool((part.get("function") or {}).get("name"))
    return named and bool(part.get("id")) and part["id"] != first.get("id")


def _call(pieces: list[Json]) -> Json:
    call = merged(pieces)
    call.pop("index", None)
    if isinstance(function := call.get("function"), dict):
        function["arguments"] = function.get("arguments") or ""
    return call
