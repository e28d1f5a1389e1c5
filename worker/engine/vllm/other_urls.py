"""The urls of vLLM's server that neither write plainly nor pool: Anthropic's messages, OpenAI's
responses, and the counting of tokens. vLLM's own classes answer them, too.

Nothing is kept between requests: a response that refers to another one is refused before it gets
here (contract/openai/fields.py).
"""

from typing import Any

from starlette.datastructures import State

from contract.openai.body import (
    COUNT_TOKENS_URL,
    COUNTING,
    MESSAGES_URL,
    RESPONSES_URL,
    TOKENIZE_URL,
)
from worker.engine import Completion
from worker.engine.vllm.names import (
    AnthropicCountTokensRequest,
    AnthropicMessagesRequest,
    ResponsesRequest,
    TokenizeRequest,
)

OTHER_URLS = frozenset((MESSAGES_URL, COUNT_TOKENS_URL, RESPONSES_URL, TOKENIZE_URL))

Forms = dict[str, tuple[Any, Any]]


class Aborted(Exception):
    """The engine gave a request up, as it does when it is told to end."""


def other_urls(state: State, chat: type[Any], default_max_tokens: int) -> Forms:
    """Return form and call by url of what vLLM has made for the model.

    Args:
        state: as vLLM's init_app_state filled it.
        chat: our form of chats (forms.py), which a message becomes.
        default_max_tokens: the limit of responses that name none.
    """
    found: Forms = {}
    if AnthropicMessagesRequest is None:
        return found
    if messages := getattr(state, "anthropic_serving_messages", None):
        found |= _messages(messages, chat)
    if responses := getattr(state, "openai_serving_responses", None):
        responses.default_sampling_params.setdefault("max_tokens", default_max_tokens)
        _watch_aborts(responses)
        found[RESPONSES_URL] = ResponsesRequest, responses.create_responses
    if tokenization := getattr(state, "serving_tokenization", None):

        async def tokenize(form: Any) -> Any:
            return await tokenization.create_tokenize(form, None)

        found[TOKENIZE_URL] = TokenizeRequest, tokenize
    return found


def _messages(serving: Any, chat: type[Any]) -> Forms:
    """Return what serves messages: vLLM makes a chat of each, and we a chat with our limits."""

    class Messages(AnthropicMessagesRequest):
        model: str = ""  # one model is served, whatever it is called
        request_id: str = ""

    class CountTokens(AnthropicCountTokensRequest):
        model: str = ""

    create_chat = serving.create_chat_completion

    async def create_named(made: Any, request_id: str) -> Any:
        ours = chat.model_construct(made.model_fields_set, **made.__dict__)
        ours.request_id = request_id
        ours.max_completion_tokens = None  # vLLM sets both; errors name the one that is left
        return await create_chat(ours)

    async def create(form: Any) -> Any:
        # vLLM hands its second argument, the HTTP request, on to the method above.
        return await serving.create_messages(form, form.request_id)

    serving.create_chat_completion = create_named
    _watch_aborts(serving)
    return {
        MESSAGES_URL: (Messages, create),
        COUNT_TOKENS_URL: (CountTokens, serving.count_tokens),
    }


def _watch_aborts(serving: Any) -> None:
    """Let a serving class raise Aborted; its answers do not tell of it."""
    raise_if_error = serving._raise_if_error

    def raise_if_ended(finish_reason: str | None, *more: Any) -> None:
        if finish_reason == "abort":
            raise Aborted
        raise_if_error(finish_reason, *more)

    serving._raise_if_error = raise_if_ended


def body_for(url: str, body: dict[str, Any], request_id: str) -> dict[str, Any]:
    """Return what vLLM's form of a url is made of; its answer's id comes from `request_id`."""
    if url == RESPONSES_URL:
        # vLLM says `store` for itself where a request does not.
        return body | {"request_id": response_id(request_id), "store": False}
    return body | {"request_id": request_id} if url == MESSAGES_URL else body


def response_id(request_id: str) -> str:
    """Return the id that a response has."""
    return f"resp_{request_id}"


def completion(url: str, answer: Any, model: str | None) -> Completion:
    """Return the completion that vLLM's answer makes; `model` is what the line calls the model.

    Counting tokens uses none.

    Raises:
        Aborted: the engine gave it up.
    """
    if url in COUNTING:
        return Completion(answer.model_dump_json(exclude_none=True).encode(), 0, 0)
    answer.model = model or answer.model
    usage = answer.usage
    if url == MESSAGES_URL:
        cached = (usage.cache_read_input_tokens or 0) + (usage.cache_creation_input_tokens or 0)
        raw = answer.model_dump_json(exclude_none=True)
        return Completion(raw.encode(), usage.input_tokens + cached, usage.output_tokens)
    if answer.status == "cancelled":
        raise Aborted
    raw = answer.model_dump_json(by_alias=True)
    return Completion(raw.encode(), usage.input_tokens, usage.output_tokens)
