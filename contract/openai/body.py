"""Defines the body types of generating and token-counting endpoints: fields with their ranges.

Field names are those of all supported releases of vLLM (tests/unit/worker/engine/vllm/test_drift.py
compares them with the installed release; a worker refuses fields that its own vLLM does not have).
Values are checked without vLLM, so that a bad line fails in the producer. vLLM in the worker checks
the content of messages and tools, and what depends on the model: context length, tokens, schemas.

Three kinds of fields are left out: `stream*`, because a batch has no open connection; `request_id`,
which warmq derives; and fields of Responses that need a server with memory (`background`, `store`,
`previous_response_id`).
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from contract.openai.amounts import MAX_MESSAGES, MAX_PROMPTS
from contract.openai.pooling import (
    FORMS,
    POOLING_TYPES,
    AllowedTokens,
    CacheSalt,
    Count,
    FewTokens,
    FromMinusOne,
    Int64,
    JsonObject,
    LogitBias,
    NonNegative,
    Text,
    Tools,
)

Tokens = list[NonNegative]
#: Type of a list of messages and other entries of a conversation.
Entries = Annotated[list[JsonObject], Meta(min_length=1, max_length=MAX_MESSAGES)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
#: Types of stop texts and bad words. They are bounded, because vLLM searches for stop texts in each
#: step and tokenizes bad words, both on its main loop.
StopText = Annotated[str, Meta(min_length=1, max_length=1024)]
StopTexts = Annotated[list[StopText], Meta(max_length=128)]
BadWords = Annotated[list[Annotated[str, Meta(max_length=1024)]], Meta(max_length=1024)]


class Generating(Struct, forbid_unknown_fields=True, kw_only=True):
    """Fields of chats, completions and Responses."""

    model: Text | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    seed: Int64 | None = None
    stop: StopText | StopTexts | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(gt=0)] | None = None
    logit_bias: LogitBias | None = None
    watermarking: bool | None = None
    skip_special_tokens: bool | None = None
    structured_outputs: JsonObject | None = None
    priority: Int64 | None = None
    user: str | None = None
    session_id: str | None = None
    cache_salt: CacheSalt | None = None
    kv_transfer_params: JsonObject | None = None
    ec_transfer_params: JsonObject | None = None
    vllm_xargs: JsonObject | None = None


class Sampling(Generating, forbid_unknown_fields=True, kw_only=True):
    """Fields of chats and completions."""

    max_tokens: Count | None = None
    n: Annotated[int, Meta(ge=1, le=128)] | None = None
    top_k: FromMinusOne | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    stop_token_ids: FewTokens | None = None
    min_tokens: NonNegative | None = None
    length_penalty: float | None = None
    prompt_logprobs: FromMinusOne | None = None
    logprob_token_ids: FewTokens | None = None
    allowed_token_ids: AllowedTokens | None = None
    bad_words: BadWords | None = None
    use_beam_search: bool | None = None
    spaces_between_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: FromMinusOne | None = None
    truncation_side: Literal["left", "right"] | None = None
    response_format: JsonObject | None = None
    repetition_detection: JsonObject | None = None
    thinking_token_budget: Int64 | JsonObject | None = None
    return_tokens_as_token_ids: bool | None = None
    return_token_ids: bool | None = None
    return_token_offsets: bool | None = None
    return_weight_versions: bool | None = None
    routed_experts_prompt_start: NonNegative | None = None
    echo: bool | None = None


class Message(Struct, kw_only=True):
    """One chat message; further fields (tool calls, names) are checked by vLLM."""

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


class AnthropicMessage(Struct, kw_only=True):
    """One message of Anthropic's API."""

    role: Literal["user", "assistant", "system"]
    content: str | list[JsonObject]


class CountTokensBody(Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of `/v1/messages/count_tokens`."""

    messages: Annotated[list[AnthropicMessage], Meta(min_length=1, max_length=MAX_MESSAGES)]
    model: Text | None = None
    system: str | list[JsonObject] | None = None
    tools: Tools | None = None
    tool_choice: JsonObject | None = None
    chat_template_kwargs: JsonObject | None = None


class MessagesBody(CountTokensBody, forbid_unknown_fields=True, kw_only=True):
    """Body of `/v1/messages`."""

    max_tokens: Count
    temperature: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: NonNegative | None = None
    stop_sequences: StopTexts | None = None
    metadata: JsonObject | None = None
    output_config: JsonObject | None = None
    cache_salt: CacheSalt | None = None
    kv_transfer_params: JsonObject | None = None
    ec_transfer_params: JsonObject | None = None
    vllm_xargs: JsonObject | None = None


class ResponsesBody(Generating, forbid_unknown_fields=True, kw_only=True):
    """Body of `/v1/responses`; `input` is a text, or the entries of a conversation."""

    input: Text | Entries
    instructions: str | None = None
    max_output_tokens: Count | None = None
    max_tool_calls: NonNegative | None = None
    metadata: dict[str, str] | None = None
    include: Annotated[list[str], Meta(max_length=64)] | None = None
    reasoning: JsonObject | None = None
    include_reasoning: bool | None = None
    text: JsonObject | None = None
    tools: Tools | None = None
    tool_choice: str | JsonObject | None = None
    parallel_tool_calls: bool | None = None
    truncation: Literal["auto", "disabled"] | None = None
    service_tier: Literal["auto", "default", "flex", "scale", "priority"] | None = None
    prompt_cache_key: str | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    top_logprobs: NonNegative | None = None
    enable_response_messages: bool | None = None
    previous_input_messages: Entries | None = None
    media_io_kwargs: JsonObject | None = None
    mm_processor_kwargs: JsonObject | None = None
    chat_template_kwargs: JsonObject | None = None


class TokenizeBody(Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of `/tokenize`: a text or a chat."""

    model: Text | None = None
    prompt: str | None = None
    messages: Entries | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: JsonObject | None = None
    media_io_kwargs: JsonObject | None = None
    mm_processor_kwargs: JsonObject | None = None
    tools: Tools | None = None

    def __post_init__(self) -> None:
        """Require exactly one of `prompt` and `messages`."""
        if self.prompt is None and self.messages is None:
            raise ValueError("Object missing required field `prompt`")  # msgspec's words
        if self.prompt is not None and self.messages is not None:
            raise ValueError("give `prompt` or `messages`, not both")


CHAT_URL = "/v1/chat/completions"
COMPLETION_URL = "/v1/completions"
MESSAGES_URL = "/v1/messages"
COUNT_TOKENS_URL = "/v1/messages/count_tokens"
RESPONSES_URL = "/v1/responses"
TOKENIZE_URL = "/tokenize"
#: Urls whose answers have OpenAI's `choices`.
GENERATING = (CHAT_URL, COMPLETION_URL)
#: Url whose answers are generated -> its fields that limit the tokens of an answer.
LIMITS = {
    CHAT_URL: ("max_tokens", "max_completion_tokens"),
    COMPLETION_URL: ("max_tokens",),
    MESSAGES_URL: ("max_tokens",),
    RESPONSES_URL: ("max_output_tokens",),
}
#: Urls whose answers are token counts, which no model computes.
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


def min_body(url: str) -> dict[str, Any]:
    """Return a small valid body for `url`."""
    if url in _SMALLEST:
        return dict(_SMALLEST[url])
    return dict.fromkeys(FORMS[BODY_TYPES[url]][0], "x")


def limits_tokens(url: str, body: Mapping[str, Any]) -> bool:
    """Return whether a body limits the tokens of its answer, or its answer has none."""
    return url not in LIMITS or any(body.get(name) is not None for name in LIMITS[url])


def field_names(url: str) -> set[str]:
    """Return the field names of a body for `url`."""
    return {field.name for field in msgspec.structs.fields(BODY_TYPES[url])}


#: Fields that ask for more than the text, unless they are null, false or an empty list. The value 0
#: of `logprobs` also asks for more: for the logprobs of the chosen tokens.
MORE = frozenset((
    "logprobs", "echo", "use_beam_search", "return_token_ids", "return_tokens_as_token_ids",
    "return_token_offsets", "suffix", "top_logprobs",
))  # fmt: skip


#: Most characters of a prompt's beginning that a result has.
BEGINNING = 100


def prompt_beginning(body: dict[str, Any]) -> str:
    """Return the beginning of a checked body's prompt: of its last message, or of its text."""
    content = body.get("messages") or body.get("prompt") or body.get("input")
    if isinstance(content, str):
        return content[:BEGINNING]
    if isinstance(content, list) and content:
        content = content[-1]
    if isinstance(content, dict):
        content = content.get("content")
    if isinstance(content, list):
        parts = (part.get("text") for part in content if isinstance(part, dict))
        content = next((text for text in parts if isinstance(text, str)), "")
    return content[:BEGINNING] if isinstance(content, str) else ""


def text_is_answer(url: str, body: Mapping[str, Any]) -> bool:
    """Return whether the answer is exactly the model's text; ignores reasoning parsers."""
    if url not in LIMITS:
        return False
    if body.get("tools") and body.get("tool_choice") not in ("none", {"type": "none"}):
        return False
    names = MORE.intersection(body)
    return all(body[name] is None or body[name] is False or body[name] == [] for name in names)
