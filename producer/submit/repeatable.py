"""Which lines of a batch ask the same question, so that one answer is enough."""

import hashlib
import uuid
from typing import Any

import orjson

from contract.errors import RequestRejected
from contract.openai.body import LIMITS
from contract.openai.decode import decode
from contract.openai.lines import Request
from producer.input.seen import IN_MEMORY, Table

_KEY_BYTES = 16
#: Fields that change when an answer comes, or under whose name, and never the answer.
_NOT_ASKED = frozenset(("user", "session_id", "priority", "stream"))
#: Fields that let an answer depend on more than the body where they are neither null nor false: a
#: search over several texts, a mark drawn from a key, arguments of plugins, and key-value caches
#: that another engine holds and may give only once.
_DEPENDS = (
    "use_beam_search", "watermarking", "vllm_xargs", "kv_transfer_params", "ec_transfer_params"
)  # fmt: skip


def question(url: str, text: bytes) -> bytes | None:
    """Return a key that two requests share if one's answer answers the other; None for a request
    whose answer may differ when it is asked again.

    `text` is a valid body's JSON. An answer is repeatable where the body alone decides it:

    - A generated text must be greedy, which is temperature 0, in the line or set for all: without
      a temperature the model's own default counts, which mostly samples. vLLM then looks neither
      at `seed` nor at `top_p`, `top_k` and `min_p` (SamplingParams.__post_init__).
    - One text, n = 1; vLLM refuses more that are greedy.
    - Nothing else it depends on may be asked for (_DEPENDS), nor media by address: what is there
      may change, and uuids of media name what an engine has seen before.
    - Pooling models (embeddings, scores, rerankings) draw nothing at random.

    Bodies are the same with the same fields, whatever their order. What a field holds is compared
    as it is written: a template or a grammar may follow the order of a tool's or a schema's
    properties.
    """
    try:
        body: dict[str, Any] = decode(text)
    except RequestRejected:  # the worker decodes it so, too, and says what is wrong
        return None
    if url in LIMITS and (body.get("temperature") != 0 or body.get("n") not in (None, 1)):
        return None
    if any(body.get(name) not in (None, False) for name in _DEPENDS):
        return None
    asked = {name: body[name] for name in sorted(body.keys() - _NOT_ASKED)}
    canonical = orjson.dumps(asked)
    if b'_url"' in canonical and _by_address(asked):
        return None
    return hashlib.blake2b(url.encode() + b"\0" + canonical, digest_size=_KEY_BYTES).digest()


def _by_address(asked: dict[str, Any]) -> bool:
    """Whether a part of a body gives a medium by anything but its content (a `data:` URL)."""
    waiting: list[Any] = [asked]
    while waiting:
        value = waiting.pop()
        if isinstance(value, list):
            waiting += value
        elif isinstance(value, dict):
            waiting += value.values()
            for name in value:
                medium = value[name] if name.endswith("_url") else "data:"
                url = medium.get("url") if isinstance(medium, dict) else medium
                if not (isinstance(url, str) and url.startswith("data:")):
                    return True
    return False


class Leaders:
    """The first line of each question of one batch, in constant memory."""

    def __init__(self, in_memory: int = IN_MEMORY) -> None:
        self._first = Table(_KEY_BYTES, in_memory, "questions")

    def of(self, request: Request, request_id: str) -> str:
        """Return the request id of the line that asked the same before, '' for the first one,
        which is remembered, and for one that is not repeatable.

        Raises:
            WriteFailed: there is no room for it on disk.
        """
        key = question(request.url, request.body)
        if key is None:
            return ""
        first = self._first.put(key, bytes.fromhex(request_id.replace("-", "")))
        return str(uuid.UUID(bytes=first)) if first is not None else ""

    def close(self) -> None:
        """Give memory and file back."""
        self._first.close()
