"""How many sequences an engine runs for a request, and bounds of how many parts it is made of.

An engine's front end reads a conversation part by part, 40 µs each, on the loop that also renews
leases and brings others' answers: 100,000 parts stop it for 4 s. So what is made of more parts than
any client needs is refused, by name and before anything is queued. Texts are not bounded here but
by the model's context (worker/engine/vllm/limits.py).

- OpenAI takes 2,048 inputs of an embedding, 2,048 prompts and 2,048 messages, and 128 tools.
- A chat's message costs 4 tokens or more by its template alone: 2,048 of them with a word each
  are 10,000 tokens; a conversation of so many turns has outgrown most contexts.
- Each of 2,048 messages may have two parts, or a call of a tool, and be within MAX_OBJECTS.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import orjson

from contract.errors import bad_field

#: Most messages, or other entries of a conversation, in one list.
MAX_MESSAGES = 2048
#: Most prompts, and most sequences (`n` × prompts), of one request.
MAX_PROMPTS = 2048
MAX_TOOLS = 1024
#: Most JSON objects (messages, parts, calls of tools), and values of any kind, of a conversation.
MAX_OBJECTS = 8192
MAX_VALUES = 65_536
#: Most characters, as JSON in UTF-8, of an option that is an object.
MAX_OPTION = 65_536
#: The same of what one engine tells another: ids of the blocks in its KV cache.
MAX_TRANSFER = 1_048_576

#: Types of what has no parts.
_SCALARS = frozenset((str, int, float, bool, type(None)))
#: What has parts; a union's check takes four times as long as a tuple's.
_COMPOUND = (list, dict)
#: As many messages, and fields of each, are not counted where all are plain.
_FEW = 32
#: Fields that hold conversations, or what they are about.
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
    """Refuse a body of more parts than an engine should be given.

    Args:
        body: its types are checked.
        where: precedes field names in errors.

    Raises:
        RequestRejected: naming the field and the limit.
    """
    several = "n" in body
    for name, value in body.items():
        if isinstance(value, _COMPOUND) and not (name == "messages" and _is_short(value)):
            _refuse_one(name, value, where)
            several = True
    if several and (count := sequences_of(body)) > MAX_PROMPTS:
        told = f"times the prompts is {count} answers; ask for at most {MAX_PROMPTS} in one request"
        raise bad_field(where + "n", told)


def _is_short(messages: Any) -> bool:
    """Say whether there are few messages, each of few plain values, as in most chats."""
    if len(messages) > _FEW:
        return False
    for message in messages:
        if not isinstance(message, dict) or len(message) > _FEW:
            return False
        if not _SCALARS.issuperset(map(type, message.values())):
            return False
    return True


def _refuse_one(name: str, value: Any, where: str) -> None:
    if name in PROMPTS and (count := prompts_of(value)) > MAX_PROMPTS:
        raise bad_field(where + name, f"has {count} prompts; give at most {MAX_PROMPTS}")
    if name in _CONVERSATIONS:
        _refuse_parts(where + name, value)
    elif name in _OPTIONS:
        _refuse_option(where + name, value, _OPTIONS[name])


def _refuse_parts(field: str, value: Any) -> None:
    """Count what a value is made of, token ids left out, and stop where it is too much."""
    objects = values = 0
    left = [value]
    while left:
        each = left.pop()
        if isinstance(each, dict):
            objects += 1
            inside = list(each.values())
        else:
            inside = [one for one in each if type(one) is not int]
        values += len(inside)
        if objects > MAX_OBJECTS:
            told = f"has more than {MAX_OBJECTS} objects (messages, parts, calls of tools)"
            raise bad_field(field, f"{told}; give at most so many")
        if values > MAX_VALUES:
            raise bad_field(field, f"has more than {MAX_VALUES} values; give at most so many")
        left += (one for one in inside if isinstance(one, dict | list))


def _refuse_option(field: str, value: Any, most: int) -> None:
    try:
        length = len(orjson.dumps(value))
    except TypeError:  # nested too deep for it; whoever encodes the body says so
        return
    if length > most:
        raise bad_field(field, f"has {length} characters; give at most {most}")


#: Fields that hold what is run: a list of texts, of lists of token ids, or of objects is so many
#: prompts; a text, or a list of token ids, is one. Those of rerank and score are each one's
#: counterpart of the query.
PROMPTS = frozenset(
    ("prompt", "prompt_embeds", "input", "documents", "items", "text_2", "data_2")
)  # fmt: skip
_OTHER_PROMPTS = PROMPTS - {"prompt"}


def sequences_of(body: Mapping[str, Any]) -> int:
    """Return `n` × prompts of a body that was checked; at least 1.

    `input` of /v1/responses is a conversation, which is one prompt; `messages` are one, too,
    whatever `documents` they are about.
    """
    n = body.get("n")
    count = n if isinstance(n, int) and n > 1 else 1
    messages = body.get("messages")
    if messages is not None:  # /v1/embeddings takes several conversations
        several = isinstance(messages, list) and messages and isinstance(messages[0], list)
        return count * len(messages) if several else count
    if type(body.get("prompt")) is str and body.keys().isdisjoint(_OTHER_PROMPTS):
        return count  # as in most completions
    prompts = 0
    for field in PROMPTS.intersection(body):
        prompts += prompts_of(body[field])
    return count * (prompts or 1)


def fields_of_sequences(names: Iterable[str]) -> tuple[str, ...]:
    """Return which of a body's fields say how many sequences it is."""
    known = set(names)
    counted: tuple[str, ...]
    counted = ("messages", *sorted(PROMPTS))
    if "messages" in known and "input" not in known:
        counted = ()  # one conversation
    return tuple(name for name in ("n", *counted) if name in known)


def prompts_of(found: Any) -> int:
    """Return how many prompts a field holds."""
    if isinstance(found, str):
        return 1
    if isinstance(found, dict):  # a score's texts and pictures
        found = found.get("content")
    if not isinstance(found, list) or not found:
        return 0 if found is None else 1
    first = found[0]
    if isinstance(first, int) or (isinstance(first, dict) and ("role" in first or "type" in first)):
        return 1  # token ids, or Responses' conversation, whose items have a role or a type
    return len(found)
