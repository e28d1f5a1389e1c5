"""Requests that ask for very many log probabilities are refused once their tokens are known."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

CONTEXT, DEFAULT = 131_072, 1024
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}]}


async def rendered(body: dict[str, Any], *lengths: int) -> Any:
    import worker.engine.vllm.engine  # noqa: F401 - sets what vLLM reads at its import
    from worker.engine.vllm import limits

    prompts = [{"prompt_token_ids": [1] * length} for length in lengths]

    async def render() -> Any:
        return ([], prompts) if "messages" in body else prompts

    renderer = SimpleNamespace(render_cmpl_async=render, render_chat_async=render)
    limits.guard_log_probabilities(renderer)
    limits.note_log_probabilities(body, DEFAULT)
    chat = "messages" in body
    return await (renderer.render_chat_async if chat else renderer.render_cmpl_async)()


def prompts(count: int, **more: Any) -> dict[str, Any]:
    return {"prompt": ["x"] * count, "max_tokens": 1} | more


@pytest.mark.parametrize(
    ("body", "lengths"),
    [
        (prompts(64, prompt_logprobs=20), [300] * 64),
        (prompts(1, prompt_logprobs=20), [CONTEXT]),
        (prompts(1, prompt_logprobs=-1), [9]),
        (prompts(400, echo=True, logprobs=20), [40] * 400),
        (prompts(16, n=16, logprobs=5, max_tokens=1000), [3] * 16),
        (CHAT | {"n": 128, "logprobs": True, "top_logprobs": 20}, [3]),
        (CHAT | {"n": 128, "logprobs": True, "max_completion_tokens": 9000}, [3]),
        (CHAT | {"n": 2, "logprob_token_ids": [1] * 1000}, [3]),
    ],
)
async def test_more_than_the_limit_are_refused(body: dict[str, Any], lengths: list[int]) -> None:
    with pytest.raises(Exception, match=r"ask for at most 262144 altogether") as caught:
        await rendered(body, *lengths)
    assert getattr(caught.value, "parameter", "") in ("prompt_logprobs", "logprobs")


@pytest.mark.parametrize(
    ("body", "lengths"),
    [
        (prompts(1, prompt_logprobs=1), [CONTEXT]),
        (prompts(1, prompt_logprobs=20), [12_000]),
        (prompts(32, echo=True, logprobs=5), [1024] * 32),
        (prompts(2000), [CONTEXT] * 2000),
        (CHAT | {"logprobs": True, "top_logprobs": 20, "max_tokens": 100_000}, [3]),
        (CHAT | {"n": 16, "logprobs": True, "max_tokens": 16_000}, [3]),
        (CHAT | {"n": 8, "logprobs": True, "top_logprobs": 20}, [3]),
        (CHAT | {"n": 128, "logprobs": False, "top_logprobs": None}, [3]),
    ],
)
async def test_what_clients_ask_for_is_taken(body: dict[str, Any], lengths: list[int]) -> None:
    assert await rendered(body, *lengths)
