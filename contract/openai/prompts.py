"""Writes the prompt of a request's body as text, for people, and measures its length."""

from typing import Any

import orjson

#: Tokens that an estimate adds to the text of each message, for the chat template.
MESSAGE_TOKENS = 4


def prompt_text(body: dict[str, Any]) -> str:
    """Return the prompt as text.

    Each message begins with its role. The text has only the type of an image, audio or video part,
    for example [image_url].
    """
    prompt = body.get("messages") or body.get("prompt") or body.get("input") or body
    if not (isinstance(prompt, list) and all(isinstance(one, dict) for one in prompt)):
        return _plain(prompt)
    texts = [(str(one.get("role", "")), _content(one.get("content"))) for one in prompt]
    return "\n".join(f"{role}: {text}" for role, text in texts)


def _content(content: object) -> str:
    """Return the text of a message's content, which may have parts."""
    if not (isinstance(content, list) and all(isinstance(part, dict) for part in content)):
        return "" if content is None else _plain(content)
    parts = (part.get("text", f"[{part.get('type', '')}]") for part in content)
    return "\n".join(map(_plain, parts))


def _plain(value: object) -> str:
    return value if isinstance(value, str) else orjson.dumps(value).decode()


def text_length(body: dict[str, Any]) -> tuple[int, int]:
    """Return the characters and messages of a checked body's prompt; (0, 0) if not all is text."""
    messages = body.get("messages")
    if messages is None:
        prompt = body.get("prompt")
        return (len(prompt), 0) if isinstance(prompt, str) else (0, 0)
    if body.get("tools"):
        return 0, 0
    characters = 0
    for message in messages:
        # Only a chat's messages are checked; those of an embedding are the engine's to refuse.
        role, content = (message.get(name) for name in ("role", "content"))
        if not (isinstance(role, str) and isinstance(content, str)):
            return 0, 0
        characters += len(role) + len(content)
    return characters, len(messages)
