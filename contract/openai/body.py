"""Shape of a request body: vLLM's chat and completion fields with their ranges.

Field names are those of all supported releases of vLLM (tests/unit/worker/engine/vllm/test_drift.py
compares them with the installed one; a worker refuses what its own does not know).
Values are checked here without vLLM so that a bad line fails in the producer, by
name. What only the engine can know (model length, tokens, schema compilation) is
checked by vLLM's own classes in the worker.
Left out on purpose: `stream*`, because a batch has no open connection, and
`request_id`, which warmq derives.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from contract.openai.amounts import MAX_MESSAGES, MAX_PROMPTS
from contract.openai.messages import COUNT_TOKENS_URL, MESSAGES_URL, CountTokensBody, MessagesBody
from contract.openai.pooling import (
    FORMS,
    POOLING_TYPES,
    AllowedTokens,
    BadWords,
    CacheSalt,
    Count,
    FewTokens,
    FromMinusOne,
    Int64,
    JsonObject,
    LogitBias,
    NonNegative,
    StopText,
    StopTexts,
    Text,
    Tools,
)
from contract.openai.responses import (
    RESPONSES_URL,
    TOKENIZE_URL,
    Penalty,
    ResponsesBody,
    TokenizeBody,
)

Tokens = list[NonNegative]


class Sampling(Struct, forbid_unknown_fields=True, kw_only=True):
    """Fields that chat and completion requests share."""

    model: Text | None = None
    max_tokens: Count | None = None
    n: Annotated[int, Meta(ge=1, le=128)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: FromMinusOne | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    seed: Int64 | None = None
    stop: StopText | StopTexts | None = None
    stop_token_ids: FewTokens | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: NonNegative | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(gt=0)] | None = None
    length_penalty: float | None = None
    logit_bias: LogitBias | None = None
    prompt_logprobs: FromMinusOne | None = None
    logprob_token_ids: FewTokens | None = None
    allowed_token_ids: AllowedTokens | None = None
    bad_words: BadWords | None = None
    use_beam_search: bool | None = None
    watermarking: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: FromMinusOne | None = None
    truncation_side: Literal["left", "right"] | None = None
    response_format: JsonObject | None = None
    structured_outputs: JsonObject | None = None
    repetition_detection: JsonObject | None = None
    thinking_token_budget: Int64 | JsonObject | None = None
    priority: Int64 | None = None
    user: str | None = None
    session_id: str | None = None
    cache_salt: CacheSalt | None = None
    return_tokens_as_token_ids: bool | None = None
    return_token_ids: bool | None = None
    return_token_offsets: bool | None = None
    return_weight_versions: bool | None = None
    routed_experts_prompt_start: NonNegative | None = None
    kv_transfer_params: JsonObject | None = None
    ec_transfer_params: JsonObject | None = None
    vllm_xargs: JsonObject | None = None
    echo: bool | None = None


class Message(Struct, kw_only=True):
    """One chat message; further fields (tool calls, names) are vLLM's to judge."""

    role: Text
    content: str | list[JsonObject] | None = None


class ChatBody(Sampling, forbid_unknown_fields=True, kw_only=True):
    """Body of `/v1/chat/completions`."""

    messages: Annotated[list[Message], Meta(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: FromMinusOne | None = None
    tools: Tools | None = None
    tool_choice: str | JsonObject | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Text | None = None
    include_reasoning: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    documents: Annotated[list[dict[str, str]], Meta(max_length=MAX_PROMPTS)] | None = None
    chat_template: str | None = None
    chat_template_kwargs: JsonObject | None = None
    media_io_kwargs: JsonObject | None = None
    mm_processor_kwargs: JsonObject | None = None
    return_prompt_text: bool | None = None
    return_assistant_tokens_mask: bool | None = None


class CompletionBody(Sampling, forbid_unknown_fields=True, kw_only=True):
    """Body of `/v1/completions`; `prompt` is text, token ids, or a list of either."""

    prompt: Text | Annotated[list[Text | NonNegative | Tokens], Meta(min_length=1)]
    logprobs: NonNegative | None = None
    suffix: str | None = None
    prompt_embeds: str | Annotated[list[str], Meta(max_length=MAX_PROMPTS)] | None = None


CHAT_URL = "/v1/chat/completions"
COMPLETION_URL = "/v1/completions"
GENERATING = (CHAT_URL, COMPLETION_URL)
#: Of the urls whose answers are generated, the fields that limit how many tokens are.
LIMITS = {
    CHAT_URL: ("max_tokens", "max_completion_tokens"),
    COMPLETION_URL: ("max_tokens",),
    MESSAGES_URL: ("max_tokens",),
    RESPONSES_URL: ("max_output_tokens",),
}
#: Urls whose answers are numbers of tokens; no model computes them.
COUNTING = (COUNT_TOKENS_URL, TOKENIZE_URL)
BODY_TYPES: dict[str, type[Struct]] = {
    CHAT_URL: ChatBody,
    COMPLETION_URL: CompletionBody,
    **POOLING_TYPES,
    MESSAGES_URL: MessagesBody,
    COUNT_TOKENS_URL: CountTokensBody,
    RESPONSES_URL: ResponsesBody,
    TOKENIZE_URL: TokenizeBody,
}
_SMALLEST: dict[str, dict[str, Any]] = {
    CHAT_URL: {"messages": [{"role": "user", "content": "Hello"}]},
    COMPLETION_URL: {"prompt": "x"},
    MESSAGES_URL: {"max_tokens": 16, "messages": [{"role": "user", "content": "Hello"}]},
    COUNT_TOKENS_URL: {"messages": [{"role": "user", "content": "Hello"}]},
    RESPONSES_URL: {"input": "Hello"},
    TOKENIZE_URL: {"prompt": "x"},
}


def smallest(url: str) -> dict[str, Any]:
    """Return the smallest valid body for `url`."""
    if url in _SMALLEST:
        return dict(_SMALLEST[url])
    return dict.fromkeys(FORMS[BODY_TYPES[url]][0], "x")


def limits_tokens(url: str, body: Mapping[str, Any]) -> bool:
    """Say whether a body names how many tokens may be written, or writes none."""
    return url not in LIMITS or any(body.get(name) is not None for name in LIMITS[url])


def field_names(url: str) -> set[str]:
    """Return the field names a body for `url` may have."""
    return {field.name for field in msgspec.structs.fields(BODY_TYPES[url])}
