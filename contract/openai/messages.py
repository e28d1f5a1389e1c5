"""Shape of the bodies of Anthropic's Messages API, as vLLM serves it.

Field names are vLLM's, as in body.py. What is in a message, a tool or a system text is vLLM's to
judge.
"""

from typing import Annotated, Literal

from msgspec import Meta, Struct

from contract.openai.amounts import MAX_MESSAGES
from contract.openai.pooling import (
    CacheSalt,
    Count,
    JsonObject,
    NonNegative,
    StopTexts,
    Text,
    Tools,
)


class AnyMessage(Struct, kw_only=True):
    """One message of Anthropic's: its content is a text or a list of blocks."""

    role: Literal["user", "assistant", "system"]
    content: str | list[JsonObject]


class CountTokensBody(Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of `/v1/messages/count_tokens`: what the tokens of a prompt are counted of."""

    messages: Annotated[list[AnyMessage], Meta(min_length=1, max_length=MAX_MESSAGES)]
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


MESSAGES_URL = "/v1/messages"
COUNT_TOKENS_URL = "/v1/messages/count_tokens"
