"""Limits the work and memory that vLLM spends on one request outside the engine.

Tokenizing a megabyte takes 1 s. It holds the GIL, so that the event loop waits. vLLM limits the
characters of a prompt itself, but not if it only counts tokens or cuts the prompt, and its limit is
high: the vocabulary's longest token times the context, 17 MB for many models. names.py limits the
pixels of images, arguments.py their number. This module limits texts, options that enlarge media,
log probabilities and token ids.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from functools import wraps
from typing import Any

from contract.errors import RequestRejected
from contract.openai.amounts import sequences_of
from contract.openai.pooling import POOLING_TYPES
from worker.engine.vllm.media import MAX_IMAGE_PIXELS
from worker.engine.vllm.names import VLLMValidationError, engine_logprobs

log = logging.getLogger(__name__)

#: Most characters of a prompt for each token of the context. English has 4 or 5 to a token.
PER_TOKEN = 10
#: Characters that a prompt may have in any case: an embedding model with a context of 512 tokens
#: gets whole documents, and cuts them.
LEAST = 131_072
#: Most characters of all texts of one pooling request. OpenAI's limit is 300,000 tokens.
MOST_IN_ALL = 2_097_152
#: Fields of a body that contain texts to tokenize.
_TEXTS = (
    "prompt", "messages", "input", "query", "queries", "documents", "items", "text_1", "text_2",
    "data_1", "data_2", "system", "tools", "instruction", "instructions", "suffix",
)  # fmt: skip
#: Fields with media instead of text; vLLM limits their sizes.
_NO_TEXT = frozenset((
    "image_url", "image", "image_pil", "image_embeds", "audio_url", "input_audio", "audio",
    "audio_embeds", "video_url", "video", "source", "file_data", "prompt_embeds",
))  # fmt: skip
#: Values of the fields _KINDS, and names of all fields, do not count as text up to NAME characters.
#: Longer ones are chosen by the client, and chat templates write them into the prompt.
_KINDS, NAME = frozenset(("type", "role")), 16


def refuse_long(url: str, body: Mapping[str, Any], context: int) -> None:
    """Refuse texts that take too long to tokenize.

    Raises:
        RequestRejected: a text is too long. The limit follows from `context`, the model's
            context length in tokens.
    """
    limit, in_all = max(LEAST, PER_TOKEN * context), 0
    pools = url in POOLING_TYPES
    for name in _TEXTS:
        if not body.get(name):
            continue
        each = [*lengths(body[name])]
        # The prompts of a list are tokenized one by one; all texts of a chat become one prompt.
        longest = max(each, default=0) if pools or name == "prompt" else sum(each)
        if longest > limit:
            raise _too_long(name, longest, limit)
        in_all += sum(each)
        most = max(limit, MOST_IN_ALL)
        if in_all > most and (pools or name != "prompt"):
            raise _too_long(name, in_all, most)


def _too_long(name: str, length: int, limit: int) -> RequestRejected:
    return RequestRejected(
        f"field body.{name}: has {length} characters; give at most {limit}",
        code="context_length_exceeded",
        field=f"body.{name}",
    )


def lengths(value: Any) -> Iterator[int]:
    """Yield the length of each text in a value; media do not count."""
    pending = [value]
    while pending:
        each = pending.pop()
        if isinstance(each, str):
            yield len(each)
        elif isinstance(each, list):
            pending += each
        elif isinstance(each, dict):
            for key, child in each.items():
                if len(key) > NAME:
                    yield len(key)
                is_kind = key in _KINDS and isinstance(child, str) and len(child) <= NAME
                if key not in _NO_TEXT and not is_kind:
                    pending.append(child)


#: Fields with options for reading media.
_OPTIONS = ("media_io_kwargs", "mm_processor_kwargs")
#: The largest allowed number for an option, by parts of the option's name; the first match counts.
_LARGEST = (
    (("pixels", "size"), MAX_IMAGE_PIXELS),
    (("rate",), 192_000),
    (("height", "width", "edge"), 4096),
    (("",), 64),  # frames, crops, tiles, patches: each is as large as an image
)


def refuse_inflated(body: Mapping[str, Any]) -> None:
    """Refuse options with which vLLM would make media much larger than they were sent.

    Raises:
        RequestRejected: an option is too large; the error names the limit.
    """
    for option in _OPTIONS:
        field, pending = f"body.{option}", [("", body.get(option))]
        while pending:
            name, each = pending.pop()
            if isinstance(each, dict):
                pending += ((str(key), child) for key, child in each.items())
            elif isinstance(each, list):
                if len(each) > 64:
                    raise RequestRejected(f"field {field}: {name} has {len(each)} values; give at "
                                          "most 64", field=field)  # fmt: skip
                pending += ((name, child) for child in each)
            elif isinstance(each, int | float) and not isinstance(each, bool):
                limit = next(
                    most for parts, most in _LARGEST if any(part in name for part in parts)
                )
                if each > limit or (each < 0 and "frames" in name):
                    raise RequestRejected(f"field {field}: {name} is {each}; give 0 to {limit}",
                                          field=field)  # fmt: skip


# -- log probabilities ---------------------------------------------------------------
# vLLM can return the log probabilities of 20 more tokens for each token of a prompt or answer. It
# makes a Python object of each on the event loop: 400,000 of them stop the loop for 2 s and take
# 50 MB. Their number is known when the prompts have been tokenized, before the engine gets them.
#
# A single answer (`n` is 1, with one prompt) is not limited: it takes longer to generate than to
# report.

#: Most log probabilities of one request: two for each token of a prompt of 128,000 tokens.
MOST_PROBABILITIES = 262_144
#: The number that stands for the whole vocabulary (-1 in a request).
_ALL = 32_768
#: For the current task's request: log probabilities for each token of its prompts, and the most for
#: all its answers.
ASKED: ContextVar[tuple[int, int]] = ContextVar("asked", default=(0, 0))
#: The name of vLLM's function that makes the texts of token ids.
MAKES_TEXTS = "convert_ids_list_to_tokens"
#: Methods of vLLM's renderer that return tokenized prompts.
_RENDERING = ("render_cmpl_async", "render_chat_async")


def note_log_probabilities(body: Mapping[str, Any], default_max_tokens: int) -> None:
    """Store the number of log probabilities that the current task's request asks for."""
    of_prompt, of_answer = _of_token(body)
    sequences = sequences_of(body) if of_answer else 1
    limits = (body.get(name) for name in ("max_completion_tokens", "max_tokens"))
    length = next((limit for limit in limits if limit is not None), default_max_tokens)
    ASKED.set((of_prompt, of_answer * sequences * length if sequences > 1 else 0))


def _of_token(body: Mapping[str, Any]) -> tuple[int, int]:
    """Return how many log probabilities a token of a prompt, and of an answer, gets."""
    logprobs, top = body.get("logprobs"), body.get("top_logprobs") or 0
    count: int | None = logprobs
    if isinstance(logprobs, bool):
        count = top if logprobs else None
    listed = len(body.get("logprob_token_ids") or ())
    of_answer = 0 if count is None and not listed else _with_own(count or 0) + listed
    of_prompt = body.get("prompt_logprobs")
    if of_prompt is None and body.get("echo"):
        of_prompt = count
    return 0 if of_prompt is None else _with_own(of_prompt), of_answer


def _with_own(count: int) -> int:
    """Return this number of log probabilities, plus that of the token itself."""
    return 1 + (_ALL if count < 0 else count)


def guard_log_probabilities(renderer: Any) -> None:
    """Make vLLM refuse requests for more than MOST_PROBABILITIES, and cache tokens' texts.

    A release without these functions is not changed.
    """
    make = getattr(engine_logprobs, MAKES_TEXTS, None)
    if make is None:
        extra = {"action": "token_texts_not_kept"}
        log.warning("this vLLM makes the texts of log probabilities in another way", extra=extra)
    else:
        setattr(engine_logprobs, MAKES_TEXTS, remembering(getattr(make, "replaces", make)))
    for name in _RENDERING:
        if hasattr(renderer, name):
            setattr(renderer, name, _refusing(getattr(renderer, name)))


def _refusing(render: Any) -> Any:
    @wraps(render)  # the fast path reads the parameters' names
    async def rendered(*args: Any, **kwargs: Any) -> Any:
        result = await render(*args, **kwargs)
        of_prompt, of_answers = ASKED.get()
        if of_prompt or of_answers:
            # For chats the result is a tuple: conversations, prompts.
            prompts = result[1] if isinstance(result, tuple) else result
            tokens = sum(len(prompt.get("prompt_token_ids") or ()) for prompt in prompts)
            of_prompts = of_prompt * tokens
            if of_prompts + of_answers > MOST_PROBABILITIES:
                raise VLLMValidationError(
                    f"the request asks for {of_prompts} log probabilities of its prompts' tokens "
                    f"and up to {of_answers} of its answers'; ask for at most {MOST_PROBABILITIES} "
                    "altogether: fewer for each token, fewer prompts, a smaller n or max_tokens",
                    parameter="prompt_logprobs" if of_prompts > of_answers else "logprobs",
                )
        return result

    return rendered


def remembering(make: Any) -> Any:
    """Wrap vLLM's function from token ids to texts, to make each text once.

    vLLM makes the text of each log probability again on the event loop: with 20 for each token of
    a step's prompts these are 160,000 texts, which take a second.
    """
    texts_by_id: dict[int, str] = {}
    tokenizer_of_texts: list[Any] = [None]  # the engine's tokenizer

    def texts(tokenizer: Any, tokens: Sequence[int]) -> list[str]:
        if tokenizer_of_texts[0] is not tokenizer:
            texts_by_id.clear()
            tokenizer_of_texts[0] = tokenizer
        missing = [*{token for token in tokens if token not in texts_by_id}]
        if missing:
            texts_by_id.update(zip(missing, make(tokenizer, missing), strict=True))
        return [texts_by_id[token] for token in tokens]

    texts.replaces = make  # type: ignore[attr-defined]  # used when an engine is built again
    return texts


# -- token ids -----------------------------------------------------------------------
# An id for which the model has no embedding kills the engine. vLLM checks a prompt's ids against
# the larger of two vocabularies, the tokenizer's and the model's, and allows one id too many.


def guard_vocabulary(engine: Any) -> None:
    """Make an AsyncLLM check the token ids of each request before it takes the request."""
    processor = engine.output_processor
    size = int(engine.vllm_config.model_config.get_vocab_size() or 0)
    if not size:  # the model embeds no tokens
        return
    add = processor.add_request

    @wraps(add)  # the fast path reads the parameters' names
    def add_request(request: Any, *args: Any, **kwargs: Any) -> Any:
        _refuse_unknown_ids(request, size)
        return add(request, *args, **kwargs)

    processor.add_request = add_request


def _refuse_unknown_ids(request: Any, size: int) -> None:
    """Raise VLLMValidationError for a token id of `size` or more."""
    ids = request.prompt_token_ids
    if ids and max(ids) >= size:
        _refuse_id("prompt", max(_outside_media(ids, request), default=0), size)
    params = getattr(request, "sampling_params", None)
    if params is None:
        return
    # vLLM makes token ids of these words with the tokenizer's vocabulary, not the model's.
    for word in getattr(params, "_bad_words_token_ids", None) or ():
        _refuse_id("bad_words", max(word), size)
    if params.allowed_token_ids:  # vLLM before 0.30 uses the tokenizer's vocabulary
        _refuse_id("allowed_token_ids", max(params.allowed_token_ids), size)


def _refuse_id(parameter: str, highest: int, size: int) -> None:
    if highest >= size:
        raise VLLMValidationError(
            f"{parameter} has the token id {highest}, and the model's are 0 to {size - 1}",
            parameter=parameter,
        )


def _outside_media(ids: list[int], request: Any) -> Iterator[int]:
    """Yield the ids that are embedded. The placeholders of media may have any id."""
    start = 0
    places = [feature.mm_position for feature in getattr(request, "mm_features", None) or ()]
    for place in sorted(places, key=lambda place: int(place.offset)):
        yield from ids[start : place.offset]
        start = place.offset + place.length
    yield from ids[start:]
