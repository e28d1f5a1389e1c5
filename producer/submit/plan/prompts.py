"""What requests ask a model: texts, to be tokenized, or token ids."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from contract.openai.body import CHAT_URL, COMPLETION_URL
from contract.openai.pooling import EMBEDDINGS_URL

Json = dict[str, Any]
Template = Callable[[Json], str | None]


@dataclass(slots=True)
class Prompt:
    """What a request asks: `texts` to be tokenized, with special tokens around each or not, and
    `ids`, a number of tokens that come as such. `exact` says whether that is all; `most` is where
    the request cuts it."""

    texts: list[str] = field(default_factory=list)
    ids: int = 0
    special: bool = True
    exact: bool = True
    messages: int = 0
    most: int | None = None


def prompt_of(url: str, body: Json, chat: Template) -> Prompt:
    """Return what a checked request asks; `chat` writes a chat as the model reads it, or returns
    None where only its texts are known."""
    if body.get("messages") is not None and url in (CHAT_URL, EMBEDDINGS_URL):
        prompt = _chat(body, chat)
    elif url in (COMPLETION_URL, EMBEDDINGS_URL):
        prompt = Prompt(special=body.get("add_special_tokens") is not False)
        prompt.exact = body.get("prompt_embeds") is None
        _take(prompt, body["prompt" if url == COMPLETION_URL else "input"])
    else:  # scores: which side goes with which, and what stands between them, is the model's
        prompt = Prompt(list(_texts(body)), exact=False)
    kept = body.get("truncate_prompt_tokens")
    if kept is not None and kept >= 0:
        prompt.most = kept
    elif kept is not None:  # -1: to what the context leaves
        prompt.exact = False
    return prompt


def _chat(body: Json, chat: Template) -> Prompt:
    prompt = Prompt(special=body.get("add_special_tokens") is True)
    text = chat(body)
    prompt.exact = text is not None and not any(map(_has_media, body["messages"]))
    if text is None:
        prompt.messages = len(body["messages"])
        text = "\n".join([*_texts(body.get("tools")), *_texts(body["messages"])])
    prompt.texts.append(text)
    return prompt


def _take(prompt: Prompt, value: Any) -> None:
    """Add a text, token ids, or a list of either."""
    if isinstance(value, str):
        prompt.texts.append(value)
    elif isinstance(value, int):
        prompt.ids += 1
    elif isinstance(value, list):
        for part in value:
            _take(prompt, part)
    else:
        prompt.exact = False
        prompt.texts += _texts(value)


def _texts(value: Any) -> Iterator[str]:
    """Yield the texts in a JSON value, images left out."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for part in value:
            yield from _texts(part)
    elif isinstance(value, dict):
        for name, part in value.items():
            if name not in ("image_url", "input_audio", "audio_url", "video_url", "type"):
                yield from _texts(part)


def _has_media(message: Json) -> bool:
    content = message.get("content")
    return isinstance(content, list) and any(part.get("type", "text") != "text" for part in content)
