"""Answers put together from streams against the installed vLLM: which fields an answer has."""

from __future__ import annotations

from typing import Any

import pytest

from worker.engine.openai import reassembly

pytestmark = pytest.mark.timeout(180)  # importing vLLM takes seconds


#: Null where nothing is said, and of some releases only: an answer that is put together has none.
NEWER = {"weight_versions"}  # since 0.33
#: What only an answer at once has. Since 0.33 streams have kv_transfer_params, too.
NEVER_STREAMED = {"prompt_logprobs", "ec_transfer_params", "routed_experts"}
NEVER_STREAMED |= {"service_tier"}  # always null in vLLM


def nullable(model: Any) -> set[str]:
    """Return the fields that are null where nothing is said."""
    return {
        name
        for name, field in model.model_fields.items()
        if field.default is None and not field.default_factory and name not in NEWER
    }


def test_the_nulls_of_an_answer_are_those_of_vllms_models() -> None:
    from vllm.entrypoints.openai.chat_completion import protocol as chat
    from vllm.entrypoints.openai.completion import protocol as completion

    usage = chat.UsageInfo
    assert nullable(chat.ChatCompletionResponse) == set(reassembly.CHAT)
    choice = chat.ChatCompletionResponseChoice
    assert nullable(choice) | {"finish_reason"} == set(reassembly.CHAT_CHOICE)
    assert nullable(chat.ChatMessage) == set(reassembly.CHAT_MESSAGE)
    assert nullable(completion.CompletionResponse) == set(reassembly.COMPLETION)
    assert nullable(completion.CompletionResponseChoice) == set(reassembly.COMPLETION_CHOICE)
    assert nullable(usage) == set(reassembly.USAGE)


def test_a_stream_lacks_no_field_that_is_not_asked_for_at_once() -> None:
    from vllm.entrypoints.openai.chat_completion import protocol as chat
    from vllm.entrypoints.openai.completion import protocol as completion

    def only_whole(whole: Any, chunk: Any) -> set[str]:
        return set(whole.model_fields) - set(chunk.model_fields)

    lacking = (
        only_whole(chat.ChatCompletionResponse, chat.ChatCompletionStreamResponse)
        | only_whole(completion.CompletionResponse, completion.CompletionStreamResponse)
        | only_whole(
            completion.CompletionResponseChoice, completion.CompletionResponseStreamChoice
        )
        | only_whole(
            chat.ChatCompletionResponseChoice, chat.ChatCompletionResponseStreamChoice
        ) - {"message"}
    )  # fmt: skip
    assert lacking - {"kv_transfer_params"} == NEVER_STREAMED
