"""Shape of the bodies of OpenAI's Responses API, as vLLM serves it, and of `/tokenize`.

Field names are vLLM's, as in body.py. Left out on purpose, beside what body.py leaves out, is all
that needs a server which remembers: `background`, `store`, `previous_response_id`.
"""

from typing import Annotated, Literal

from msgspec import Meta, Struct

from contract.openai.amounts import MAX_MESSAGES
from contract.openai.pooling import (
    CacheSalt,
    Count,
    Int64,
    JsonObject,
    LogitBias,
    NonNegative,
    StopText,
    StopTexts,
    Text,
    Tools,
)

#: Messages and other entries of a conversation.
Entries = Annotated[list[JsonObject], Meta(min_length=1, max_length=MAX_MESSAGES)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]


class ResponsesBody(Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of `/v1/responses`; `input` is a text, or messages and other items of a conversation."""

    input: Text | Entries
    model: Text | None = None
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
    user: str | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    top_logprobs: NonNegative | None = None
    logit_bias: LogitBias | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(gt=0)] | None = None
    seed: Int64 | None = None
    stop: StopText | StopTexts | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    watermarking: bool | None = None
    priority: Int64 | None = None
    session_id: str | None = None
    cache_salt: CacheSalt | None = None
    structured_outputs: JsonObject | None = None
    enable_response_messages: bool | None = None
    previous_input_messages: Entries | None = None
    media_io_kwargs: JsonObject | None = None
    mm_processor_kwargs: JsonObject | None = None
    chat_template_kwargs: JsonObject | None = None
    kv_transfer_params: JsonObject | None = None
    ec_transfer_params: JsonObject | None = None
    vllm_xargs: JsonObject | None = None


class TokenizeBody(Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of `/tokenize`: a text, or a chat as the model reads it."""

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
        """Require a text or a chat, and not both."""
        if self.prompt is None and self.messages is None:
            raise ValueError("Object missing required field `prompt`")  # msgspec's words
        if self.prompt is not None and self.messages is not None:
            raise ValueError("give `prompt` or `messages`, not both")


RESPONSES_URL = "/v1/responses"
TOKENIZE_URL = "/tokenize"
