"""Bounds of what vLLM would read, or make, of a request on the event loop or in memory.

Making tokens of a text holds the GIL, 1 s a megabyte, and whatever thread does it, the loop waits.
vLLM refuses a prompt by its characters first, but not where tokens are only counted, or where what
is too long is cut off; and its bound is the vocabulary's longest token for each token of the
context, which with many models is 17 MB. Pictures are bounded in names.py by their pixels and in
arguments.py by their number; here is what lets a request ask for more than it brings.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from contract.errors import RequestRejected
from contract.openai.pooling import POOLING_TYPES
from worker.engine.vllm.media import MAX_IMAGE_PIXELS

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
                if key not in _NO_TEXT and not (key in _KINDS and _is_name(one)):
                    left.append(one)


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= NAME


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
