"""Counts prompt tokens as vLLM counts them, with the model's tokenizer and chat template.

Without a tokenizer, and for requests that a tokenizer cannot count (images, scores), tokens are
estimated from characters.
"""

import logging
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from contract.errors import WarmqError
from contract.openai.body import CHAT_URL, COMPLETION_URL
from contract.openai.pooling import EMBEDDINGS_URL
from contract.openai.prompts import MESSAGE_TOKENS

Json = dict[str, Any]
#: Function that renders a chat as the model reads it, or returns None if that is unknown.
Template = Callable[[Json], str | None]

#: Characters that an estimate counts as one token where no worker has measured it.
TOKEN_CHARACTERS = 4.0
#: Pattern of a template that loops over the parts of a message. Such a template gets the parts,
#: any other template one text (vLLM's `--chat-template-content-format auto`).
_LOOPS_OVER_PARTS = re.compile(r"for\s+\w+\s+in\s+[\w.\[\]'\"]*content\b")
_MEDIA = ("image_url", "input_audio", "audio_url", "video_url")


@dataclass(slots=True)
class Prompt:
    """The parts of a request's prompt that are counted."""

    texts: list[str] = field(default_factory=list)
    ids: int = 0  # number of token ids
    special: bool = True  # whether each text gets special tokens
    exact: bool = True  # whether the prompt has no other parts
    messages: int = 0  # number of messages, if the chat could not be rendered
    most: int | None = None  # tokens to which the request truncates its prompt


def prompt_of(url: str, body: Json, chat: Template) -> Prompt:
    """Return the parts of a checked request that are counted."""
    if body.get("messages") is not None and url in (CHAT_URL, EMBEDDINGS_URL):
        prompt = _chat(body, chat)
    elif url in (COMPLETION_URL, EMBEDDINGS_URL):
        prompt = Prompt(special=body.get("add_special_tokens") is not False)
        prompt.exact = body.get("prompt_embeds") is None
        _add(prompt, body["prompt" if url == COMPLETION_URL else "input"])
    else:  # scores: each model combines query and document in its own form
        prompt = Prompt(list(_texts(body)), exact=False)
    kept = body.get("truncate_prompt_tokens")
    if kept is not None and kept >= 0:
        prompt.most = kept
    elif kept is not None:  # -1: truncated to the rest of the context
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


def _add(prompt: Prompt, value: Any) -> None:
    """Add a text, token ids, or a list of either."""
    if isinstance(value, str):
        prompt.texts.append(value)
    elif isinstance(value, int):
        prompt.ids += 1
    elif isinstance(value, list):
        for part in value:
            _add(prompt, part)
    else:
        prompt.exact = False
        prompt.texts += _texts(value)


def _texts(value: Any) -> Iterator[str]:
    """Yield the texts in a JSON value, without media."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for part in value:
            yield from _texts(part)
    elif isinstance(value, dict):
        for name, part in value.items():
            if name not in (*_MEDIA, "type"):
                yield from _texts(part)


def _has_media(message: Json) -> bool:
    content = message.get("content")
    return isinstance(content, list) and any(part.get("type", "text") != "text" for part in content)


class NoTokenizer(WarmqError):
    """The named tokenizer cannot be used."""

    code = "no_tokenizer"


class CharacterCounter:
    """Estimates tokens from characters, `token_characters` for each."""

    #: The tokenizer's model; '' for none.
    name = ""

    def __init__(self, token_characters: float | None = None) -> None:
        self.token_characters = token_characters or TOKEN_CHARACTERS

    def count(self, prompts: Sequence[Prompt]) -> list[int]:
        """Return the tokens of each prompt."""
        found = []
        for prompt in prompts:
            tokens = math.ceil(sum(map(len, prompt.texts)) / self.token_characters)
            tokens += prompt.ids + MESSAGE_TOKENS * prompt.messages
            found.append(_truncated(tokens, prompt))
        return found

    def chat(self, body: Json) -> str | None:
        """Render a chat as the model reads it; None if that is unknown."""
        return None

    def exact(self, prompt: Prompt) -> bool:
        """Return whether `count` is exact for a prompt."""
        return not prompt.texts and prompt.exact


class Tokenizer(CharacterCounter):
    """Counts with a model's tokenizer; `model` is a folder or a name on the Hugging Face hub.

    Raises NoTokenizer if transformers is not installed, or finds no tokenizer.
    """

    def __init__(self, model: str) -> None:
        super().__init__()
        self.name = model
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
        os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
        try:
            from transformers import AutoTokenizer  # noqa: PLC0415 - slow; may be missing

            self._tokenizer = AutoTokenizer.from_pretrained(model)
        except ImportError as error:
            text = (
                f"the tokenizer of {model} cannot be read: {error}; install transformers with "
                "warmq (it comes with vLLM)"
            )
            raise NoTokenizer(text, remedy="other_tokenizer") from None
        except Exception as error:  # transformers raises any type for a broken file
            first = next(iter(str(error).splitlines()), type(error).__name__)
            text = f"there is no tokenizer that can be read in {model}: {first}"
            raise NoTokenizer(text, remedy="other_tokenizer") from None
        logging.getLogger("transformers").setLevel(logging.ERROR)

    def count(self, prompts: Sequence[Prompt]) -> list[int]:
        counts = [prompt.ids for prompt in prompts]
        for special in (True, False):
            which = [i for i, p in enumerate(prompts) if p.special is special for _ in p.texts]
            texts = [text for p in prompts if p.special is special for text in p.texts]
            for i, tokens in zip(which, self._lengths(texts, special), strict=True):
                counts[i] += tokens
        return [_truncated(count, prompt) for count, prompt in zip(counts, prompts, strict=True)]

    def _lengths(self, texts: list[str], special: bool) -> list[int]:
        if not texts:
            return []
        fast = getattr(self._tokenizer, "backend_tokenizer", None)
        if fast is not None:  # uses all cores, and returns no lists of ids
            return list(map(len, fast.encode_batch_fast(texts, add_special_tokens=special)))
        ids = self._tokenizer(texts, add_special_tokens=special, verbose=False)["input_ids"]
        return list(map(len, ids))

    def chat(self, body: Json) -> str | None:
        """Render a chat with the model's template; None if the template fails."""
        continues = bool(body.get("continue_final_message"))
        generate = body.get("add_generation_prompt")
        options = dict(body.get("chat_template_kwargs") or {})
        if body.get("reasoning_effort"):
            options.setdefault("reasoning_effort", body["reasoning_effort"])
        try:
            text: str = self._tokenizer.apply_chat_template(
                [self._message(one, body) for one in body["messages"]],
                tools=body.get("tools"),
                documents=body.get("documents"),
                chat_template=body.get("chat_template"),
                tokenize=False,
                continue_final_message=continues,
                add_generation_prompt=not continues if generate is None else generate,
                **options,
            )
        except Exception:  # a template is a program and may fail in any way; vLLM reports it
            return None
        return text

    def _message(self, message: Json, body: Json) -> Json:
        """Return a message as vLLM passes it to a template.

        Arguments of tools are decoded; texts are joined unless the template loops over them.
        """
        content = message.get("content")
        template = body.get("chat_template") or self._tokenizer.chat_template
        if isinstance(content, list) and not _LOOPS_OVER_PARTS.search(str(template)):
            parts = (part.get("text") for part in content)
            joined = "\n".join(part for part in parts if isinstance(part, str))
            message = message | {"content": joined}
        if calls := message.get("tool_calls"):
            message = message | {"tool_calls": [_call(call) for call in calls]}
        return message

    def exact(self, prompt: Prompt) -> bool:
        return prompt.exact


def choose_counter(named: str | None, workers: Sequence[Mapping[str, Any]]) -> CharacterCounter:
    """Return the named tokenizer, the workers' model's, or a counter of characters.

    `workers` are announcements. Without a name, and if all of them have the same model, and its
    folder is on this machine, that model's tokenizer is used. With `named` None characters are
    counted. Raises NoTokenizer if the named tokenizer cannot be used.
    """
    if named:
        return Tokenizer(named)
    models = {str(model) for one in workers if (model := one.get("folder") or one.get("model"))}
    if named is not None and len(models) == 1 and Path(folder := models.pop()).is_dir():
        with suppress(NoTokenizer):  # characters are counted instead
            return Tokenizer(folder)
    return CharacterCounter(token_characters(workers))


def token_characters(workers: Sequence[Mapping[str, Any]]) -> float | None:
    """Return the characters of a token in the workers' latest prompts; None if unknown."""
    found = [one.get("token_characters") for one in workers]
    known = [each for each in found if isinstance(each, int | float) and each > 0]
    return sum(known) / len(known) if known else None


def _call(call: Json) -> Json:
    function = call.get("function") or {}
    if not isinstance(function.get("arguments"), str):
        return call
    arguments = orjson.loads(function["arguments"] or "{}")
    return call | {"function": function | {"arguments": arguments}}


def _truncated(count: int, prompt: Prompt) -> int:
    return count if prompt.most is None else min(count, prompt.most)
