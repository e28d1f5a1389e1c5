"""Maps urls to vLLM's serving classes, converts their answers, and reads running requests' text.

Nothing is kept between requests: a request that refers to an earlier response has been refused
before (contract/openai/fields.py).
"""

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import orjson
import pydantic
from starlette.datastructures import State

from contract.errors import EngineDead, RequestRejected
from contract.openai.body import (
    CHAT_URL,
    COMPLETION_URL,
    COUNT_TOKENS_URL,
    COUNTING,
    MESSAGES_URL,
    RESPONSES_URL,
    TOKENIZE_URL,
)
from contract.openai.pooling import EMBEDDINGS_URL, RERANK_URLS, SCORE_URLS
from worker.engine import Completion
from worker.engine.vllm import names
from worker.engine.vllm.errors import Aborted
from worker.engine.vllm.preflight import vllm_version
from worker.engine.vllm.request_classes import make_request_classes, unknown_fields
from worker.machine.packages import installed

log = logging.getLogger(__name__)

#: Matches an empty embedding in an answer. (In a text the quotes would be escaped.)
_NO_EMBEDDING = re.compile(rb'"embedding":\s*\[\s*\]')
#: HTTP status of vLLM's errors for features that it does not support; a retry does not help.
NOT_IMPLEMENTED = 501
#: Urls that neither vLLM's classes for chats and completions nor those for pooling serve.
OTHER_URLS = frozenset((MESSAGES_URL, COUNT_TOKENS_URL, RESPONSES_URL, TOKENIZE_URL))

#: For each url, vLLM's request class and the function that runs such a request.
Calls = dict[str, tuple[Any, Any]]


@dataclass(frozen=True, slots=True)
class Served:
    """Serves one url: vLLM's request class, its function, and the fields that this vLLM lacks."""

    form: pydantic.TypeAdapter[Any]
    call: Any
    unknown: frozenset[str]

    def read(self, body: dict[str, Any]) -> Any:
        """Return a body as an object of vLLM's request class.

        vLLM's class for embeddings checks each token id, which takes 20 µs for each. The ids have
        been checked before (contract/openai/pooling.py), so they are set after the validation.
        """
        ids: Any = body.get("input")
        if not are_token_ids(ids):
            return self.form.validate_python(body)
        request = self.form.validate_python(body | {"input": [[0]] if _is_list(ids[0]) else [0]})
        request.input = ids
        return request


def are_token_ids(value: Any) -> bool:
    """Whether the value is a list of token ids, or a list of such lists."""
    if not _is_list(value):
        return False
    prompts = value if _is_list(value[0]) else [value]
    return all(_is_list(ids) and all(type(one) is int for one in ids) for ids in prompts)


def _is_list(value: Any) -> bool:
    return isinstance(value, list) and bool(value)


def pooling(state: State) -> list[Any]:
    """Return vLLM's serving classes for pooling; empty for a generative model."""
    classes = (getattr(state, name, None) for name in ("serving_embedding", "serving_scores"))
    return [serving for serving in classes if serving is not None]


def by_url(state: State, context: int, default_max_tokens: int) -> dict[str, Served]:
    """Return the served urls, from the state that vLLM's init_app_state has filled.

    `default_max_tokens` is for requests without a limit, unless the model's generation_config has
    a default.
    """
    calls: Calls = {}
    chat_class: type[Any] = object
    if chat := getattr(state, "openai_serving_chat", None):
        completion = state.openai_serving_completion
        for generating in (chat, completion):
            generating.default_sampling_params.setdefault("max_tokens", default_max_tokens)
        default = completion.default_sampling_params["max_tokens"]
        chat_class, request_class = make_request_classes(
            context, default, completion.override_max_tokens
        )
        calls[CHAT_URL] = chat_class, chat.create_chat_completion
        calls[COMPLETION_URL] = request_class, completion.create_completion
    if names.AnthropicMessagesRequest is not None:
        calls |= _other_calls(state, chat_class, default_max_tokens)
    if embedding := getattr(state, "serving_embedding", None):
        calls[EMBEDDINGS_URL] = names.EmbeddingRequest, embedding
    if scores := getattr(state, "serving_scores", None):
        calls |= dict.fromkeys(SCORE_URLS, (names.ScoreRequest, scores))
        calls |= dict.fromkeys(RERANK_URLS, (names.RerankRequest, scores))
    return {
        url: Served(pydantic.TypeAdapter(request_class), call, unknown_fields(url, request_class))
        for url, (request_class, call) in calls.items()
    }


def _other_calls(state: State, chat: type[Any], default_max_tokens: int) -> Calls:
    calls: Calls = {}
    if messages := getattr(state, "anthropic_serving_messages", None):
        calls |= _messages(messages, chat)
    if responses := getattr(state, "openai_serving_responses", None):
        responses.default_sampling_params.setdefault("max_tokens", default_max_tokens)
        _raise_aborts(responses)
        calls[RESPONSES_URL] = names.ResponsesRequest, responses.create_responses
    if tokenization := getattr(state, "serving_tokenization", None):

        async def tokenize(request: Any) -> Any:
            return await tokenization.create_tokenize(request, None)

        calls[TOKENIZE_URL] = names.TokenizeRequest, tokenize
    return calls


def _messages(serving: Any, chat: type[Any]) -> Calls:
    """Serve /v1/messages. vLLM turns a request into a chat, which gets our class's limits."""

    class Messages(names.AnthropicMessagesRequest):
        model: str = ""  # the one served model runs it under any name
        request_id: str = ""

    class CountTokens(names.AnthropicCountTokensRequest):
        model: str = ""

    create_chat = serving.create_chat_completion

    async def create_named(chat_request: Any, request_id: str) -> Any:
        own_request = chat.model_construct(chat_request.model_fields_set, **chat_request.__dict__)
        own_request.request_id = request_id
        own_request.max_completion_tokens = None  # vLLM also sets max_tokens, which errors name
        return await create_chat(own_request)

    async def create(request: Any) -> Any:
        # vLLM passes its second argument, normally the HTTP request, to `create_named`.
        return await serving.create_messages(request, request.request_id)

    serving.create_chat_completion = create_named
    _raise_aborts(serving)
    return {
        MESSAGES_URL: (Messages, create),
        COUNT_TOKENS_URL: (CountTokens, serving.count_tokens),
    }


def _raise_aborts(serving: Any) -> None:
    """Make a serving class raise Aborted if the engine aborted the request."""
    raise_if_error = serving._raise_if_error

    def raise_if_ended(finish_reason: str | None, *args: Any) -> None:
        if finish_reason == "abort":
            raise Aborted
        raise_if_error(finish_reason, *args)

    serving._raise_if_error = raise_if_ended


def refuse_unserved(serving: Mapping[str, Served], url: str, body: Mapping[str, Any]) -> None:
    """Refuse a url or a field that this vLLM does not have."""
    if url not in serving:
        raise RequestRejected(
            f"field url: this worker's model serves {', '.join(serving)}, not {url}; "
            "send the request to the queue of a model that does",
            code="unknown_url",
            field="url",
        )
    for name in serving[url].unknown:
        if body.get(name) is not None:
            raise RequestRejected(
                f"field body.{name}: vLLM {vllm_version(installed())} of this worker does not know "
                "it; leave it out, or send the request to a worker with another release",
                field=f"body.{name}",
            )


def log_unknown_fields(serving: Mapping[str, Served]) -> None:
    """Log the request fields that this vLLM does not have."""
    unknown = {name for served in serving.values() for name in served.unknown}
    if unknown:
        text = "vLLM %s does not know %s; requests with these fields are refused"
        extra = {"action": "fields_unknown"}
        log.info(text, vllm_version(installed()), ", ".join(sorted(unknown)), extra=extra)


def parses_chats(config: Any) -> bool:
    """Whether vLLM, with this VllmConfig, removes reasoning from the content of chats."""
    harmony = getattr(config.model_config.hf_config, "model_type", "") == "gpt_oss"
    return harmony or bool(config.structured_outputs_config.reasoning_parser)


# -- answers -------------------------------------------------------------------------


def pooled(raw: bytes, model: str | None) -> Completion:
    """Return the completion of a pooling answer, with the model name that the request has.

    Raises:
        EngineDead: the answer is empty, as vLLM's is for an aborted request.
    """
    # The numbers are not decoded: there may be millions, and the event loop would wait.
    answer = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
    if _NO_EMBEDDING.search(raw):
        raise EngineDead("the engine was asked to end", inside=False)
    if model:
        answer["model"] = msgspec.Raw(orjson.dumps(model))
        raw = msgspec.json.encode(answer)
    return Completion(raw, orjson.loads(bytes(answer["usage"]))["prompt_tokens"], 0)


def body_for(url: str, body: dict[str, Any], request_id: str) -> dict[str, Any]:
    """Return the body for vLLM's request class of one of OTHER_URLS, with the answer's id."""
    if url == RESPONSES_URL:
        # vLLM's default of `store` is true.
        return body | {"request_id": response_id(request_id), "store": False}
    return body | {"request_id": request_id} if url == MESSAGES_URL else body


def response_id(request_id: str) -> str:
    """Return the id of the response to a request."""
    return f"resp_{request_id}"


def completion_of(url: str, answer: Any, model: str | None) -> Completion:
    """Return the completion for one of OTHER_URLS from vLLM's answer. Counting uses no tokens.

    Raises:
        Aborted: the engine aborted the request.
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


class RunningTexts:
    """Reads the text of running requests from vLLM's detokenizers.

    vLLM detokenizes every request at every step, to search for stop texts. So the text of a
    request that asked only for its final output can be read at any time, at no cost for the engine.

    `ended` keeps the detokenizers of choices that ended before the other choices of their request.
    `prompts` has the number of prompts of a completion with several.
    """

    def __init__(self) -> None:
        self.ended: dict[str, dict[int, Any]] = {}
        self.prompts: dict[str, int] = {}

    def forget(self, request_id: str) -> None:
        """Drop the data of a request that has ended."""
        self.ended.pop(request_id, None)
        self.prompts.pop(request_id, None)

    def read(self, processor: Any, request_id: str) -> list[str]:
        """Return each choice's text so far, from vLLM's OutputProcessor."""
        detokenizers = self.ended.get(request_id, {})
        for place, name in enumerate(self._names(processor.external_req_ids, request_id)):
            for internal in processor.external_req_ids.get(name, ()):
                state = processor.request_states.get(internal)
                if state is not None and state.detokenizer is not None:
                    choices_each = state.parent_req.n if state.parent_req is not None else 1
                    detokenizers[place * choices_each + state.request_index] = state.detokenizer
        if detokenizers:
            self.ended[request_id] = detokenizers
        # The arguments mark the text as unfinished: vLLM omits an end that may become a stop text.
        return [
            detokenizers[n].get_next_output_text(False, False) if n in detokenizers else ""
            for n in range(max(detokenizers, default=-1) + 1)
        ]

    def _names(self, names_in_vllm: Any, request_id: str) -> list[str]:
        """Return vLLM's names for a request: one for each prompt of a completion."""
        for name in (f"chatcmpl-{request_id}", f"{response_id(request_id)}_0"):
            if name in names_in_vllm:
                return [name]
        return [f"cmpl-{request_id}-{n}" for n in range(self.prompts.get(request_id, 1))]
