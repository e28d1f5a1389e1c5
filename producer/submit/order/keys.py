"""Computes keys of the prefixes of request bodies.

Each request is written as one text, in the order in which chat templates render it: the head
(model, template, tools), the system message, the further messages. A key stands for the text up to
one position, its depth. A shared prefix may end anywhere, so there are many depths. At the start of
each message they are 64 bytes apart, later as far apart as an eighth of the message so far. They
begin again with each message, so that a short document after a long system message is found too. A
depth depends only on the text before it: texts that share a prefix have its keys in common.
"""

import hashlib
from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
import orjson

from contract.openai.body import CHAT_URL, COMPLETION_URL

#: Bytes that count as one token: about an English token, or a Korean or Chinese character.
BYTES_PER_TOKEN = 4
#: Bytes of one block of vLLM's prefix cache (16 tokens), the smallest unit that requests share.
BLOCK_BYTES = 64
#: Most bytes of a text that are compared (64,000 tokens).
MOST_BYTES = 2**18
#: Most keys of one text.
MOST_KEYS = 64
#: Bytes that an image or other medium counts as (256 tokens).
_MEDIA_BYTES = 1024
#: Bytes of one word: hashes are computed over words.
_WORD = 8
#: Words of one block.
_BLOCK = BLOCK_BYTES // _WORD
#: Bytes of text whose keys are computed in one step, to bound memory.
_STEP_BYTES = 2**20


def _ladder_depths() -> np.ndarray:
    depths = [_BLOCK]
    while depths[-1] < MOST_BYTES // _WORD:
        depths.append(depths[-1] + max(_BLOCK, depths[-1] // 8))
    return np.array(depths[:-1], dtype=np.int64)


def _multipliers() -> np.ndarray:
    """Return an odd number for each position, by SplitMix64 (Steele, Lea, Flood 2014)."""
    z = np.arange(1, MOST_BYTES // _WORD + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (z ^ (z >> np.uint64(31))) | np.uint64(1)


#: Fixed depths within a section, in words; and the factor of each word's position in a hash.
_LADDER, _MULTIPLIERS = _ladder_depths(), _multipliers()


class _Head(msgspec.Struct):
    """Fields that templates and the prefix cache put before the first message."""

    model: Any = None
    cache_salt: Any = None
    chat_template: Any = None
    chat_template_kwargs: Any = None
    reasoning_effort: Any = None
    documents: Any = None
    tools: Any = None


class _Chat(_Head):
    messages: list[dict[str, Any]] = []


class _Completion(msgspec.Struct):
    prompt: Any = ""
    model: Any = None
    cache_salt: Any = None


class _Named(msgspec.Struct):
    model: Any = None


_decode_model = msgspec.json.Decoder(_Named).decode
_decode_chat = msgspec.json.Decoder(_Chat).decode
_decode_completion = msgspec.json.Decoder(_Completion).decode
_HEAD_FIELDS = _Head.__struct_fields__


def _json_or_repr(value: Any) -> bytes:
    """Return a value's JSON; its repr() if it has integers too large for orjson."""
    try:
        return orjson.dumps(value)
    except TypeError:
        return repr(value).encode("utf-8", "surrogatepass")


def text_of(url: str, body: bytes) -> list[bytes]:
    """Return a request's text in sections: the head, then the messages.

    The list is empty for URLs other than chats and completions: an order by prefix does not move
    their requests.
    """
    if url == CHAT_URL:
        return _sections(_chat_pieces(_decode_chat(body)))
    if url == COMPLETION_URL:
        return _sections(_completion_pieces(_decode_completion(body)))
    return []


def model_of(body: bytes) -> str:
    """Return the model that a body names, or ''."""
    return str(_decode_model(body).model or "")


def _chat_pieces(body: _Chat) -> Iterator[bytes]:
    head = [value for name in _HEAD_FIELDS if (value := getattr(body, name)) is not None]
    yield b"chat" + (_json_or_repr(head) if head else b"")
    for message in body.messages:
        content = message.get("content")
        yield b"\n" + str(message.get("role")).encode() + b"\n"
        if isinstance(content, str):
            yield content.encode()
        elif isinstance(content, list):
            yield from map(_part_bytes, content)
        if len(message) > 2:  # a name, or tool calls of an earlier answer
            yield _json_or_repr({k: v for k, v in message.items() if k not in ("role", "content")})


def _part_bytes(part: Any) -> bytes:
    if isinstance(part, dict) and isinstance(part.get("text"), str):
        return str(part["text"]).encode()
    digest = hashlib.blake2b(_json_or_repr(part), digest_size=16).digest()
    return digest * (_MEDIA_BYTES // len(digest))


def _completion_pieces(body: _Completion) -> Iterator[bytes]:
    yield b"text" + _json_or_repr([body.model, body.cache_salt])
    prompt = body.prompt
    if isinstance(prompt, str):
        yield prompt.encode()
    elif all(isinstance(token, int) for token in prompt):
        yield array("I", prompt).tobytes()  # four bytes a token
    else:  # several prompts in one request
        yield _json_or_repr(prompt)


def _sections(pieces: Iterable[bytes]) -> list[bytes]:
    """Join pieces into sections of at least a block, padded to whole words."""
    sections: list[bytes] = []
    unfinished, left = b"", MOST_BYTES
    for piece in pieces:
        unfinished = unfinished + piece if unfinished else piece
        if len(unfinished) >= BLOCK_BYTES:
            left -= _add(sections, unfinished[:left])
            unfinished = b""
            if left <= 0:
                return sections
    if unfinished:
        _add(sections, unfinished[:left])
    return sections


def _add(sections: list[bytes], section: bytes) -> int:
    """Append a section, padded with zeros to whole words; return its bytes."""
    section += bytes(-len(section) % _WORD)
    sections.append(section)
    return len(section)


def keys_of(texts: Sequence[list[bytes]]) -> tuple[np.ndarray, np.ndarray]:
    """Return the keys of some texts, and the texts' lengths in bytes (uint32).

    Keys are uint64, with a row for each text. The upper 32 bits of a key are its depth in words of
    8 bytes, the lower 32 bits a hash of the text up to there. A row ends with zeros.
    """
    tables, start, size = [], 0, 0
    for at, text in enumerate(texts):
        size += sum(map(len, text))
        if size >= _STEP_BYTES or at == len(texts) - 1:
            tables.append(_keys(texts[start : at + 1]))
            start, size = at + 1, 0
    if len(tables) == 1:
        return tables[0]
    width = max((table.shape[1] for table, _ in tables), default=0)
    wide = [np.pad(t, ((0, 0), (0, width - t.shape[1]))) for t, _ in tables]
    if not tables:
        return np.zeros((0, 0), dtype=np.uint64), np.zeros(0, dtype=np.uint32)
    return np.concatenate(wide), np.concatenate([sizes for _, sizes in tables])


def _starts(lengths: np.ndarray) -> np.ndarray:
    return np.cumsum(lengths) - lengths


def _keys(texts: Sequence[list[bytes]]) -> tuple[np.ndarray, np.ndarray]:
    rows = len(texts)
    sections = [part for text in texts for part in text]
    words = np.frombuffer(b"".join(sections), dtype="<u8")
    length = np.fromiter(map(len, sections), np.int64, len(sections)) // _WORD
    owner = np.repeat(np.arange(rows), np.fromiter(map(len, texts), np.int64, rows))
    text_length = np.bincount(owner, weights=length, minlength=rows).astype(np.int64)
    text_start = _starts(text_length)
    # A hash is the upper half of the sum of the words up to a depth, each times its place's factor.
    place = np.arange(len(words)) - np.repeat(text_start, text_length)
    sums = np.zeros(len(words) + 1, dtype=np.uint64)
    np.cumsum(words * _MULTIPLIERS[place], out=sums[1:])
    # Depths of a section: those of _LADDER, and its end if it is a block or more after the last.
    steps = np.searchsorted(_LADDER, length, side="right")
    last = np.where(steps > 0, _LADDER[np.maximum(steps, 1) - 1], 0)
    count = steps + (length - last >= _BLOCK)
    base = _starts(length) - text_start[owner]
    section = np.repeat(np.arange(len(sections)), count)
    step = np.arange(len(section)) - np.repeat(_starts(count), count)
    on_ladder = step < steps[section]
    in_section = np.where(on_ladder, _LADDER[np.where(on_ladder, step, 0)], length[section])
    depth = base[section] + in_section
    row = owner[section]
    in_row = np.bincount(row, minlength=rows)
    level = np.arange(len(row)) - np.repeat(_starts(in_row), in_row)
    table = np.zeros((rows, min(MOST_KEYS, int(in_row.max(initial=0)))), dtype=np.uint64)
    kept = level < MOST_KEYS
    row, level, depth = row[kept], level[kept], depth[kept]
    hashes = sums[text_start[row] + depth] - sums[text_start[row]]
    table[row, level] = depth.astype(np.uint64) << np.uint64(32) | hashes >> np.uint64(32)
    return table, (text_length * _WORD).astype(np.uint32)


def depth_bytes(keys: np.ndarray) -> np.ndarray:
    """Return the depths of keys (uint64, any shape) in bytes."""
    return (keys >> np.uint64(32)).astype(np.int64) * _WORD
