"""Bounds of what vLLM would read, or make, of a request on the event loop or in memory.

Making tokens of a text holds the GIL, 1 s a megabyte, and whatever thread does it, the loop waits.
vLLM refuses a prompt by its characters first, but not where tokens are only counted, or where what
is too long is cut off; and its bound is the vocabulary's longest token for each token of the
context, which with many models is 17 MB. Pictures are bounded in names.py by their pixels and in
arguments.py by their number; here is what lets a request ask for more than it brings.
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

#: Most characters of a prompt, for each token of the context; English has 4 or 5.
PER_TOKEN = 10
#: What is taken of any model: an embedder with a context of 512 tokens gets whole documents to cut.
LEAST = 131_072
#: Most characters of all texts of one request that pools; OpenAI takes 300,000 tokens.
MOST_TOGETHER = 2_097_152
_TEXTS = (
    "prompt", "messages", "input", "query", "queries", "documents", "items", "text_1", "text_2",
    "data_1", "data_2", "system", "tools", "instruction", "instructions", "suffix",
)  # fmt: skip
#: What is no text: media, whose sizes are vLLM's to limit.
_NO_TEXT = frozenset((
    "image_url", "image", "image_pil", "image_embeds", "audio_url", "input_audio", "audio",
    "audio_embeds", "video_url", "video", "source", "file_data", "prompt_embeds",
))  # fmt: skip
#: Names of fields, and values of these two, up to so many characters are no text either; a longer
#: one is a client's own, and templates write it into the prompt.
_KINDS, NAME = frozenset(("type", "role")), 16


def refuse_large(url: str, body: Mapping[str, Any], context: int) -> None:
    """Refuse texts that are too long, and options that inflate media; as the two below."""
    refuse_long(url, body, context)
    refuse_inflated(body)


def refuse_long(url: str, body: Mapping[str, Any], context: int) -> None:
    """Refuse texts that take too long to make tokens of.

    Raises:
        RequestRejected: naming the limit, which follows from `context`, the model's in tokens.
    """
    limit, together = max(LEAST, PER_TOKEN * context), 0
    pools = url in POOLING_TYPES
    for name in _TEXTS:
        if not body.get(name):
            continue
        each = [*lengths(body[name])]
        # Prompts of a list are read one by one; what a chat has becomes one prompt.
        longest = max(each, default=0) if pools or name == "prompt" else sum(each)
        if longest > limit:
            raise _too_long(name, longest, limit)
        together += sum(each)
        most = max(limit, MOST_TOGETHER)
        if together > most and (pools or name != "prompt"):
            raise _too_long(name, together, most)


def _too_long(name: str, length: int, limit: int) -> RequestRejected:
    return RequestRejected(
        f"field body.{name}: has {length} characters; give at most {limit}",
        code="context_length_exceeded",
        field=f"body.{name}",
    )


def lengths(value: Any) -> Iterator[int]:
    """Yield the length of each text in a value, media left out."""
    left = [value]
    while left:
        each = left.pop()
        if isinstance(each, str):
            yield len(each)
        elif isinstance(each, list):
            left += each
        elif isinstance(each, dict):
            for key, one in each.items():
                if len(key) > NAME:
                    yield len(key)
                named = key in _KINDS and isinstance(one, str) and len(one) <= NAME
                if key not in _NO_TEXT and not named:
                    left.append(one)


#: Options by which a request says how its media are read, and the largest number of each kind.
_OPTIONS = ("media_io_kwargs", "mm_processor_kwargs")
_LARGEST = (
    (("pixels", "size"), MAX_IMAGE_PIXELS),
    (("rate",), 192_000),
    (("height", "width", "edge"), 4096),
    (("",), 64),  # frames, crops, tiles, patches: each is as much as a picture
)


def refuse_inflated(body: Mapping[str, Any]) -> None:
    """Refuse options by which vLLM would make more of media than was sent.

    Raises:
        RequestRejected: naming the limit.
    """
    for field in _OPTIONS:
        if body.get(field):
            _refuse_numbers(f"body.{field}", body[field])


def _refuse_numbers(field: str, value: Any) -> None:
    left = [("", value)]
    while left:
        name, each = left.pop()
        if isinstance(each, dict):
            left += ((str(key), one) for key, one in each.items())
        elif isinstance(each, list):
            if len(each) > 64:
                raise RequestRejected(f"field {field}: {name} has {len(each)} values; give at "
                                      "most 64", field=field)  # fmt: skip
            left += ((name, one) for one in each)
        elif isinstance(each, int | float) and not isinstance(each, bool):
            limit = next(most for parts, most in _LARGEST if any(part in name for part in parts))
            if each > limit or (each < 0 and "frames" in name):
                raise RequestRejected(f"field {field}: {name} is {each}; give 0 to {limit}",
                                      field=field)  # fmt: skip


# -- log probabilities ---------------------------------------------------------------
# Of each token of a prompt, and of each token that is written, vLLM may tell 20 others. It makes an
# object of each and an answer of all, on the event loop: 400,000 stop it for 2 s, and make 50 MB.
# What is asked for is known once the prompts' tokens are, before the engine gets any of them.
#
# Of one answer alone (`n` is 1, and there is one prompt) what is written is not counted: it takes
# longer to write than to tell.

#: Most of one request; of a prompt of 128,000 tokens that is each token's own and one more.
MOST_PROBABILITIES = 262_144
#: -1 asks for those of the whole vocabulary.
_ALL = 32_768
#: How many the task's request has of each token of its prompts, and of all answers at most.
ASKED: ContextVar[tuple[int, int]] = ContextVar("asked", default=(0, 0))
MAKES_TEXTS = "convert_ids_list_to_tokens"
_RENDERING = ("render_cmpl_async", "render_chat_async")


def note_log_probabilities(body: Mapping[str, Any], default_max_tokens: int) -> None:
    """Note what the task's request asks for; it has an answer of the default length, or its own."""
    of_prompt, of_answer = _of_token(body)
    sequences = sequences_of(body) if of_answer else 1
    limits = (body.get(name) for name in ("max_completion_tokens", "max_tokens"))
    length = next((limit for limit in limits if limit is not None), default_max_tokens)
    ASKED.set((of_prompt, of_answer * sequences * length if sequences > 1 else 0))


def _of_token(body: Mapping[str, Any]) -> tuple[int, int]:
    """Return how many there are of a token of a prompt, and of one of an answer."""
    logprobs, top = body.get("logprobs"), body.get("top_logprobs") or 0
    wanted: int | None = None
    if isinstance(logprobs, bool):
        wanted = top if logprobs else None
    elif logprobs is not None:
        wanted = logprobs
    more = len(body.get("logprob_token_ids") or ())
    of_answer = 0 if wanted is None and not more else _own_and(wanted or 0) + more
    of_prompt = body.get("prompt_logprobs")
    if of_prompt is None and body.get("echo"):
        of_prompt = wanted
    return 0 if of_prompt is None else _own_and(of_prompt), of_answer


def _own_and(others: int) -> int:
    return 1 + (_ALL if others < 0 else others)


def guard_log_probabilities(renderer: Any) -> None:
    """Let vLLM's renderer refuse prompts whose request asks for more than MOST_PROBABILITIES.

    The texts of tokens, which log probabilities have, are made once from now on.
    """
    remember_texts()
    for name in _RENDERING:
        if hasattr(renderer, name):
            setattr(renderer, name, _refusing(getattr(renderer, name)))


def _refusing(render: Any) -> Any:
    @wraps(render)  # the fast path looks up how its parameters are called
    async def rendered(*given: Any, **named: Any) -> Any:
        found = await render(*given, **named)
        of_prompt, of_answers = ASKED.get()
        if of_prompt or of_answers:
            prompts = found[1] if isinstance(found, tuple) else found  # conversations come first
            tokens = sum(len(prompt.get("prompt_token_ids") or ()) for prompt in prompts)
            _compare_probabilities(of_prompt * tokens, of_answers)
        return found

    return rendered


def _compare_probabilities(of_prompts: int, of_answers: int) -> None:
    if of_prompts + of_answers > MOST_PROBABILITIES:
        raise VLLMValidationError(
            f"the request asks for {of_prompts} log probabilities of its prompts' tokens and up to "
            f"{of_answers} of its answers'; ask for at most {MOST_PROBABILITIES} altogether: "
            "fewer for each token, fewer prompts, a smaller n or max_tokens",
            parameter="prompt_logprobs" if of_prompts > of_answers else "logprobs",
        )


def remember_texts() -> None:
    """Let vLLM look texts of tokens up from now on; a release without the function goes on.

    It makes the text of each token of each log probability anew, on the event loop: 20 of each
    token of a step's prompts are 160,000 texts, and take a second in which nothing else is done.
    """
    make = getattr(engine_logprobs, MAKES_TEXTS, None)
    if make is None:
        extra = {"action": "token_texts_not_kept"}
        log.warning("this vLLM makes the texts of log probabilities in another way", extra=extra)
        return
    setattr(engine_logprobs, MAKES_TEXTS, remembering(getattr(make, "replaces", make)))


def remembering(make: Any) -> Any:
    """Return what does as `make`, which makes the texts of a tokenizer's tokens one by one."""
    known: dict[int, str] = {}
    of: list[Any] = [None]  # the tokenizer; an engine has one

    def texts(tokenizer: Any, tokens: Sequence[int]) -> list[str]:
        if of[0] is not tokenizer:
            known.clear()
            of[0] = tokenizer
        missing = [*{token for token in tokens if token not in known}]
        if missing:
            known.update(zip(missing, make(tokenizer, missing), strict=True))
        return [known[token] for token in tokens]

    texts.replaces = make  # type: ignore[attr-defined]  # an engine may be built again
    return texts


# -- token ids -----------------------------------------------------------------------
# One for which the model has no embedding ends the engine. vLLM compares a prompt's ids with the
# tokenizer's largest or the model's, whichever is larger. A tokenizer may know more tokens than the
# model, and counts one too many.


def guard_vocabulary(engine: Any) -> None:
    """Look at the ids of each request, of whatever url, before an AsyncLLM takes it."""
    processor = engine.output_processor
    size = int(engine.vllm_config.model_config.get_vocab_size() or 0)
    if not size:  # it embeds no tokens
        return
    add = processor.add_request

    @wraps(add)  # others look at its signature (the fast path)
    def add_request(request: Any, *more: Any, **named: Any) -> Any:
        refuse_unknown(request, size)
        return add(request, *more, **named)

    processor.add_request = add_request


def refuse_unknown(request: Any, size: int) -> None:
    """Look at what EngineCore would be given, of a model with so many tokens.

    Raises:
        VLLMValidationError: naming an id that the model does not have.
    """
    ids = request.prompt_token_ids
    if ids and max(ids) >= size:
        _compare("prompt", max(_outside_media(ids, request), default=0), size)
    params = getattr(request, "sampling_params", None)
    if params is None:
        return
    # Words are made of the tokenizer's tokens, and forbidden among the model's.
    for word in getattr(params, "_bad_words_token_ids", None) or ():
        _compare("bad_words", max(word), size)
    if params.allowed_token_ids:  # which vLLM before 0.30 compares with the tokenizer's
        _compare("allowed_token_ids", max(params.allowed_token_ids), size)


def _compare(parameter: str, highest: int, size: int) -> None:
    if highest >= size:
        raise VLLMValidationError(
            f"{parameter} has the token id {highest}, and the model's are 0 to {size - 1}",
            parameter=parameter,
        )


def _outside_media(ids: list[int], request: Any) -> Iterator[int]:
    """Yield the ids that are embedded: places of pictures and sounds have ids of their own."""
    at = 0
    for feature in sorted(getattr(request, "mm_features", None) or (), key=_offset):
        yield from ids[at : _offset(feature)]
        at = _offset(feature) + feature.mm_position.length
    yield from ids[at:]


def _offset(feature: Any) -> int:
    return int(feature.mm_position.offset)
