"""Counts a request's sequences (`n` × prompts), and bounds the number of its parts.

The engine reads the parts of a conversation in 40 µs each, on the loop that also renews leases and
returns answers: 100,000 parts stop this loop for 4 s. So a body with more parts than any client
needs is refused before it is queued. The lengths of texts are bounded by the model's context
(worker/engine/vllm/limits.py). The limits follow from these figures:

- OpenAI accepts 2,048 inputs of an embedding, 2,048 prompts and 2,048 messages, and 128 tools.
- A chat template adds 4 tokens or more to each message: 2,048 messages with a word each have
  10,000 tokens, more than most contexts.
- Each of 2,048 messages may have two parts, or a call of a tool, within MAX_OBJECTS.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import orjson

from contract.errors import bad_field

#: Most messages, or other entries of a conversation, in one list.
MAX_MESSAGES = 2048
#: Most prompts of one request, and most sequences (`n` × prompts).
MAX_PROMPTS = 2048
#: Most tools of one request.
MAX_TOOLS = 1024
#: Most JSON objects (messages, parts, calls of tools) of a conversation.
MAX_OBJECTS = 8192
#: Most JSON values of any kind of a conversation.
MAX_VALUES = 65_536
#: Most bytes, as JSON, of an option that is an object.
MAX_OPTION = 65_536
#: Most bytes, as JSON, of the parameters of a transfer between two engines: ids of KV cache blocks.
MAX_TRANSFER = 1_048_576

#: Types of values without parts.
_SCALARS = frozenset((str, int, float, bool, type(None)))
#: Types of values with parts; a tuple, because isinstance() takes four times as long with a union.
_COMPOUND = (list, dict)
#: The parts of a conversation are not counted if it has at most so many messages, each with at most
#: so many fields, and all values are scalars.
_FEW = 32
#: Fields with conversations, documents or queries.
_CONVERSATIONS = frozenset((
    "messages", "input", "previous_input_messages", "system", "documents", "items", "queries",
    "query", "text_1", "text_2", "data_1", "data_2",
))  # fmt: skip
_OPTIONS = dict.fromkeys(
    (
        "chat_template_kwargs", "media_io_kwargs", "mm_processor_kwargs", "vllm_xargs", "reasoning",
        "repetition_detection", "thinking_token_budget", "tool_choice", "metadata",
    ),
    MAX_OPTION,
) | dict.fromkeys(("kv_transfer_params", "ec_transfer_params"), MAX_TRANSFER)  # fmt: skip


def refuse_many(body: Mapping[str, Any], where: str) -> None:
    """Raise RequestRejected for a body that has too many parts; its types must be valid.

    `where` precedes field names in errors.
    """
    may_be_many = "n" in body
    for name, value in body.items():
        if isinstance(value, _COMPOUND) and not (name == "messages" and _is_short(value)):
            _refuse_field(name, value, where)
            may_be_many = True
    if may_be_many and (count := sequences_of(body)) > MAX_PROMPTS:
        remedy = f"ask for at most {MAX_PROMPTS} in one request"
        raise bad_field(where + "n", f"times the prompts is {count} answers; {remedy}")


def _is_short(messages: Any) -> bool:
    """Return whether there are few messages, each with few scalar values; most chats are so."""
    if len(messages) > _FEW:
        return False
    for message in messages:
        if not isinstance(message, dict) or len(message) > _FEW:
            return False
        if not _SCALARS.issuperset(map(type, message.values())):
            return False
    return True


def _refuse_field(name: str, value: Any, where: str) -> None:
    if name in PROMPTS and (count := prompts_of(value)) > MAX_PROMPTS:
        raise bad_field(where + name, f"has {count} prompts; give at most {MAX_PROMPTS}")
    if name in _CONVERSATIONS:
        _refuse_parts(where + name, value)
    elif name in _OPTIONS:
        _refuse_option(where + name, value, _OPTIONS[name])


def _refuse_parts(field: str, value: Any) -> None:
    """Raise RequestRejected if a value has too many parts; token ids are not counted."""
    objects = values = 0
    pending = [value]
    while pending:
        each = pending.pop()
        if isinstance(each, dict):
            objects += 1
            inside = list(each.values())
        else:
            inside = [one for one in each if type(one) is not int]
        values += len(inside)
        if objects > MAX_OBJECTS:
            what = "objects (messages, parts, calls of tools)"
            raise bad_field(field, f"has more than {MAX_OBJECTS} {what}; send fewer")
        if values > MAX_VALUES:
            raise bad_field(field, f"has more than {MAX_VALUES} values; send fewer")
        pending += (one for one in inside if isinstance(one, dict | list))


def _refuse_option(field: str, value: Any, most: int) -> None:
    try:
        length = len(orjson.dumps(value))
    except TypeError:  # nested too deep; `encode` refuses the body
        return
    if length > most:
        raise bad_field(field, f"has {length} bytes as JSON; give at most {most}")


#: Fields with prompts. A list of texts, of lists of token ids, or of objects has a prompt for each
#: entry; a text, or a list of token ids, is one prompt. A reranking or score compares each prompt
#: with the query.
PROMPTS = frozenset(
    ("prompt", "prompt_embeds", "input", "documents", "items", "text_2", "data_2")
)  # fmt: skip
_OTHER_PROMPTS = PROMPTS - {"prompt"}


def sequences_of(body: Mapping[str, Any]) -> int:
    """Return the number of sequences of a checked body: `n` × prompts, at least 1.

    `input` of /v1/responses is one prompt, and so is `messages`, with or without `documents`.
    """
    n = body.get("n")
    count = n if isinstance(n, int) and n > 1 else 1
    messages = body.get("messages")
    if messages is not None:  # /v1/embeddings takes several conversations
        several = isinstance(messages, list) and messages and isinstance(messages[0], list)
        return count * len(messages) if several else count
    if type(body.get("prompt")) is str and body.keys().isdisjoint(_OTHER_PROMPTS):
        return count  # true for most completions
    prompts = 0
    for field in PROMPTS.intersection(body):
        prompts += prompts_of(body[field])
    return count * (prompts or 1)


def fields_of_sequences(names: Iterable[str]) -> tuple[str, ...]:
    """Return the fields of a body that determine the number of its sequences."""
    known = set(names)
    one_conversation = "messages" in known and "input" not in known
    counted = () if one_conversation else ("messages", *sorted(PROMPTS))
    return tuple(name for name in ("n", *counted) if name in known)


def prompts_of(value: Any) -> int:
    """Return the number of prompts in a field."""
    if isinstance(value, str):
        return 1
    if isinstance(value, dict):  # a score's texts and pictures
        value = value.get("content")
    if not isinstance(value, list) or not value:
        return 0 if value is None else 1
    first = value[0]
    if isinstance(first, int) or (isinstance(first, dict) and ("role" in first or "type" in first)):
        return 1  # token ids, or Responses' conversation, whose items have a role or a type
    return len(value)
