"""Requests that cost a server much more than they cost their client, and how each must end.

Whoever has a key may send them, online or as lines of a batch. Nobody else may notice. The list is
for the tiny model: 1,024 tokens, text only.
"""

from __future__ import annotations

import base64
import struct
import zlib

from kit.hostile.hostile_amounts import AMOUNTS
from kit.hostile.hostile_request import (
    ANSWERED,
    ASKED,
    EITHER,
    Body,
    Hostile,
    chat,
    completion,
    deep,
    names,
)
from kit.hostile.hostile_schemas import GRAMMARS, SCHEMAS

from contract.openai.body import (
    CHAT_URL,
    COMPLETION_URL,
    COUNT_TOKENS_URL,
    MESSAGES_URL,
    RESPONSES_URL,
    TOKENIZE_URL,
)

LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}"


def picture(url: str, count: int = 1) -> Body:
    """Return a chat with pictures, which the model does not see."""
    parts = [{"type": "image_url", "image_url": {"url": url}}] * count
    return chat(messages=[{"role": "user", "content": parts}])


def flat_png(side: int) -> str:
    """Return a data URL of a picture of one colour: `side`² pixels in side²/1,000 bytes."""

    def part(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    made = zlib.compressobj(9)
    rows = b"".join(made.compress(bytes(side + 1)) for _ in range(side)) + made.flush()
    head = struct.pack(">IIBBBBB", side, side, 8, 0, 0, 0, 0)
    png = b"\x89PNG\r\n\x1a\n" + part(b"IHDR", head) + part(b"IDAT", rows) + part(b"IEND", b"")
    return "data:image/png;base64," + base64.b64encode(png).decode()


WORDS = "one two three " * 550_000
LONG = (
    Hostile("tokenize 7 MB", TOKENIZE_URL, lambda: {"prompt": WORDS}),
    Hostile(
        "tokenize 7 MB of a chat",
        TOKENIZE_URL,
        lambda: {"messages": [{"role": "user", "content": WORDS}]},
    ),
    Hostile(
        "count 7 MB", COUNT_TOKENS_URL, lambda: {"messages": [{"role": "user", "content": WORDS}]}
    ),
    Hostile(
        "prompt cut off, 7 MB",
        COMPLETION_URL,
        lambda: completion(prompt=WORDS, truncate_prompt_tokens=10),
    ),
    Hostile(
        "chat cut off, 7 MB",
        CHAT_URL,
        lambda: chat(messages=[{"role": "user", "content": WORDS}], truncate_prompt_tokens=10),
    ),
    Hostile(
        "prompts cut off, 512",
        COMPLETION_URL,
        lambda: completion(prompt=[WORDS[:14_000]] * 512, truncate_prompt_tokens=1, max_tokens=1),
        EITHER,
    ),
    Hostile("prompt of 7 MB", COMPLETION_URL, lambda: completion(prompt=WORDS)),
    Hostile(
        "prompt without a blank, 4 MB", COMPLETION_URL, lambda: completion(prompt="x" * 4_000_000)
    ),
    Hostile(
        "prompt of emoji, 4 MB",
        CHAT_URL,
        lambda: chat(messages=[{"role": "user", "content": "\U0001f600" * 1_000_000}]),
    ),
    Hostile("input of 7 MB", RESPONSES_URL, lambda: {"input": WORDS, "max_output_tokens": 4}),
    Hostile(
        "message of 7 MB",
        MESSAGES_URL,
        lambda: {"messages": [{"role": "user", "content": WORDS}], "max_tokens": 4},
    ),
    Hostile(
        "system of 7 MB",
        MESSAGES_URL,
        lambda: {"system": WORDS, "messages": [{"role": "user", "content": "x"}], "max_tokens": 4},
    ),
    Hostile(
        "100,000 messages",
        CHAT_URL,
        lambda: chat(messages=[{"role": "user", "content": "x"}] * 100_000),
    ),
    Hostile(
        "100,000 parts",
        CHAT_URL,
        lambda: chat(
            messages=[{"role": "user", "content": [{"type": "text", "text": "x"}] * 100_000}]
        ),
    ),
    Hostile("prompt of 1,000,000 ids", COMPLETION_URL, lambda: completion(prompt=[1] * 1_000_000)),
    Hostile("embeddings of 7 MB", "/v1/embeddings", lambda: {"input": WORDS}),
    Hostile("score of 7 MB", "/v1/score", lambda: {"text_1": "x", "text_2": WORDS}),
)
MANY = (
    Hostile(
        "n of 128",
        CHAT_URL,
        lambda: chat(n=128, max_tokens=200, ignore_eos=True, temperature=1),
        EITHER,
    ),
    Hostile(
        "n of 128 for 8 prompts",
        COMPLETION_URL,
        lambda: completion(
            prompt=["Hello"] * 8, n=128, max_tokens=20, ignore_eos=True, temperature=1
        ),
        EITHER,
    ),
    Hostile(
        "1,024 prompts",
        COMPLETION_URL,
        lambda: completion(prompt=["Hello"] * 1024, ignore_eos=True),
        EITHER,
    ),
    Hostile(
        "20,000 prompts", COMPLETION_URL, lambda: completion(prompt=["Hello"] * 20_000), EITHER
    ),
    Hostile(
        "beam search",
        COMPLETION_URL,
        lambda: completion(use_beam_search=True, n=64, max_tokens=30),
        EITHER,
    ),
    Hostile(
        "logit_bias of 400,000",
        CHAT_URL,
        lambda: chat(logit_bias={str(n): 1 for n in range(400_000)}),
    ),
    Hostile("stop of 100,000", CHAT_URL, lambda: chat(stop=names(100_000)), EITHER),
    Hostile("stop of 5 MB", CHAT_URL, lambda: chat(stop="x" * 5_000_000), EITHER),
    Hostile("bad_words of 50,000", CHAT_URL, lambda: chat(bad_words=names(50_000)), EITHER),
    Hostile(
        "allowed_token_ids of 400,000",
        CHAT_URL,
        lambda: chat(allowed_token_ids=list(range(400_000))),
    ),
    Hostile(
        "stop_token_ids of 400,000", CHAT_URL, lambda: chat(stop_token_ids=[1] * 400_000), EITHER
    ),
    Hostile(
        "logprob_token_ids of 400,000",
        CHAT_URL,
        lambda: chat(logprob_token_ids=[1] * 400_000),
        EITHER,
    ),
    Hostile(
        "all logprobs of a prompt",
        COMPLETION_URL,
        lambda: completion(prompt="one two " * 200, prompt_logprobs=-1),
        EITHER,
    ),
    Hostile("min_tokens beyond the model", CHAT_URL, lambda: chat(min_tokens=2**31)),
    Hostile("max_tokens of 2^62", CHAT_URL, lambda: chat(max_tokens=2**62)),
    Hostile("seed below 64 bits", CHAT_URL, lambda: ASKED + b'"seed":-99999999999999999999}'),
    Hostile("a number of 5,000 digits", CHAT_URL, lambda: ASKED + b'"seed":' + b"9" * 5000 + b"}"),
    Hostile("temperature of 1e999", CHAT_URL, lambda: ASKED + b'"temperature":1e999}'),
    Hostile(
        "repetition_penalty of 1e308",
        CHAT_URL,
        lambda: chat(repetition_penalty=1e308, temperature=1),
        EITHER,
    ),
)
FORMS = (
    Hostile(
        "vllm_xargs 900 deep",
        CHAT_URL,
        lambda: ASKED + b'"vllm_xargs":' + deep(900, b'{"a":', b"}") + b"}",
        EITHER,
    ),
    Hostile("JSON 5,000 deep", CHAT_URL, lambda: b'{"messages":' + deep(5000) + b"}"),
    Hostile(
        "schema 400 deep",
        CHAT_URL,
        lambda: (
            ASKED
            + b'"response_format":{"type":"json_schema","json_schema":{"name":"s","schema":'
            + deep(400, b'{"type":"array","items":', b"}").replace(b":1}", b':{"type":"integer"}}')
            + b"}}}"
        ),
    ),
    Hostile(
        "lone surrogates",
        CHAT_URL,
        lambda: b'{"messages":[{"role":"user","content":"\\ud800"}]}',
        EITHER,
    ),
    Hostile("not UTF-8", CHAT_URL, lambda: b'{"messages":[{"role":"user","content":"\xff\xfe"}]}'),
    Hostile(
        "NUL and controls",
        CHAT_URL,
        lambda: chat(messages=[{"role": "user", "content": "\0\x1b]0;x\x07\u202e"}]),
        ANSWERED,
    ),
    Hostile(
        "a role of 1 MB",
        CHAT_URL,
        lambda: chat(messages=[{"role": "r" * 1_000_000, "content": "x"}]),
        EITHER,
    ),
    Hostile(
        "content of objects",
        CHAT_URL,
        lambda: chat(messages=[{"role": "user", "content": {"a": 1}}]),
    ),
    Hostile("messages that is a text", CHAT_URL, lambda: chat(messages="Hello")),
    Hostile("a template of loops", CHAT_URL, lambda: chat(chat_template=LOOPS)),
    Hostile(
        "a template by its arguments",
        CHAT_URL,
        lambda: chat(
            chat_template_kwargs={"chat_template": "{% for a in range(99999999) %}x{% endfor %}"}
        ),
        EITHER,
    ),
    Hostile(
        "arguments of 5 MB",
        CHAT_URL,
        lambda: chat(chat_template_kwargs={f"k{n}": "v" * 50 for n in range(80_000)}),
        EITHER,
    ),
    Hostile(
        "a template to tokenize",
        TOKENIZE_URL,
        lambda: {"messages": [{"role": "user", "content": "x"}], "chat_template": LOOPS},
    ),
    Hostile("reasoning of 2^60", CHAT_URL, lambda: chat(thinking_token_budget=2**60), EITHER),
    Hostile(
        "repetition without bound",
        CHAT_URL,
        lambda: chat(repetition_detection={"max_pattern_size": 2**31, "min_count": 2}),
        EITHER,
    ),
    Hostile("image of this machine", CHAT_URL, lambda: picture("file:///etc/passwd")),
    Hostile("image that is a bomb", CHAT_URL, lambda: picture(flat_png(8000))),
    Hostile("1,000 images", CHAT_URL, lambda: picture(flat_png(8), 1000)),
    Hostile("image of a private address", CHAT_URL, lambda: picture("http://127.0.0.1:1/x.png")),
    Hostile(
        "image in a response",
        RESPONSES_URL,
        lambda: {
            "input": [
                {"role": "user", "content": [{"type": "input_image", "image_url": flat_png(4000)}]}
            ]
        },
    ),
    Hostile(
        "image in a message",
        MESSAGES_URL,
        lambda: {
            "max_tokens": 4,
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "image", "source": {"type": "url", "url": "file:///etc/passwd"}}
                    ],
                }
            ],
        },
    ),
    Hostile(
        "sound that is none",
        CHAT_URL,
        lambda: chat(
            messages=[
                {
                    "role": "user",
                    "content": [
                        {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}
                    ],
                }
            ]
        ),
    ),
    Hostile("prompt embeddings", COMPLETION_URL, lambda: completion(prompt_embeds="AAAA")),
    Hostile(
        "another model's name of 1 MB",
        CHAT_URL,
        lambda: b'{"model":"' + b"m" * 1_000_000 + b'","messages":[{"role":"user","content":"x"}]}',
    ),
)

#: All, by name.
REQUESTS = {each.name: each for each in (*SCHEMAS, *GRAMMARS, *LONG, *MANY, *FORMS, *AMOUNTS)}
