"""Requests of an honest tenant that are as heavy as one may ask; each is answered with 200.

Beside them others wait because two share a machine. The list is for the tiny model: 1,024 tokens.
"""

from __future__ import annotations

from kit.hostile.hostile_request import ANSWERED, Body, Hostile, chat, completion, shaped

from contract.openai.body import CHAT_URL, COMPLETION_URL, COUNT_TOKENS_URL, TOKENIZE_URL

TEXT = "The quick brown fox jumps over the lazy dog. "
STRING = {"type": "string", "maxLength": 20}


def fields(count: int) -> Body:
    """Return a schema of an object with so many fields."""
    names = [f"field_{n}" for n in range(count)]
    return {"type": "object", "properties": dict.fromkeys(names, STRING), "required": names}


def asked(text: str, **more: object) -> Body:
    """Return a chat of one long message."""
    return chat(messages=[{"role": "user", "content": text}], ignore_eos=True, **more)


def sampled(count: int, max_tokens: int) -> Body:
    """Return what asks for so many long answers of each prompt."""
    return {"n": count, "max_tokens": max_tokens, "ignore_eos": True, "temperature": 1}


HEAVY = {
    request.name: request
    for request in (
        Hostile("16 answers", CHAT_URL, lambda: chat(**sampled(16, 100)), ANSWERED),
        Hostile("16 answers to each of 8 prompts", COMPLETION_URL,
                lambda: completion(prompt=["Hello"] * 8, **sampled(16, 20)), ANSWERED),
        Hostile("128 answers", CHAT_URL, lambda: chat(**sampled(128, 200)), ANSWERED),
        Hostile("128 answers to each of 8 prompts", COMPLETION_URL,
                lambda: completion(prompt=["Hello"] * 8, **sampled(128, 20)), ANSWERED),
        Hostile("1,024 prompts", COMPLETION_URL,
                lambda: completion(prompt=["Hello"] * 1024, ignore_eos=True), ANSWERED),
        Hostile("a long answer", CHAT_URL, lambda: asked(TEXT, max_tokens=800), ANSWERED),
        Hostile("a long question", CHAT_URL, lambda: asked(TEXT * 30, max_tokens=100), ANSWERED),
        Hostile("64 long prompts", COMPLETION_URL,
                lambda: completion(prompt=[TEXT * 30] * 64, max_tokens=8), ANSWERED),
        Hostile("256 prompts", COMPLETION_URL,
                lambda: completion(prompt=[TEXT] * 256, max_tokens=4), ANSWERED),
        Hostile("64 prompts of 1,000 ids", COMPLETION_URL,
                lambda: completion(prompt=[[1] * 1000] * 64, max_tokens=1), ANSWERED),
        Hostile("logprobs of 32 prompts", COMPLETION_URL,
                lambda: completion(prompt=[TEXT * 5] * 32, echo=True, logprobs=5), ANSWERED),
        Hostile("tokens of 100,000 characters", TOKENIZE_URL,
                lambda: {"prompt": TEXT * 2200}, ANSWERED),
        Hostile("count a long message", COUNT_TOKENS_URL,
                lambda: {"messages": [{"role": "user", "content": TEXT * 30}]}, ANSWERED),
        Hostile("a schema of 50 fields", CHAT_URL,
                lambda: shaped(fields(50)) | {"max_tokens": 300}, ANSWERED),
        Hostile("one of 500 values", CHAT_URL,
                lambda: shaped({"enum": [f"value {n}" for n in range(500)]}) | {"max_tokens": 20},
                ANSWERED),
        Hostile("100 messages", CHAT_URL,
                lambda: chat(messages=[{"role": "user", "content": "Hi"},
                                       {"role": "assistant", "content": "Hello"}] * 40
                             + [{"role": "user", "content": "Hi"}], max_tokens=50), ANSWERED),
        Hostile("1,000 biases", CHAT_URL,
                lambda: chat(logit_bias={str(n): 1 for n in range(1000)}, max_tokens=50), ANSWERED),
    )
}  # fmt: skip
