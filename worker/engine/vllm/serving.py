"""vLLM's own serving classes by url, and what they answer; the text of a request that runs.

Besides those that write plainly and those that pool there are Anthropic's messages, OpenAI's
responses, and the counting of tokens. Nothing is kept between requests: a response that refers to
another one is refused before it gets here (contract/openai/fields.py).
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
from worker.engine.vllm.forms import lacking, make_forms
from worker.engine.vllm.preflight import named
from worker.machine.packages import installed

log = logging.getLogger(__name__)

#: Of a text, quotes would be escaped.
_NO_EMBEDDING = re.compile(rb'"embedding":\s*\[\s*\]')
#: The status of what vLLM's errors say it has not: no second try has it.
NOT_IMPLEMENTED = 501


@dataclass(frozen=True, slots=True)
class Served:
    """What serves one url: vLLM's form of its requests, the call that takes one, and the fields
    of our lines that the running vLLM does not know."""

    form: pydantic.TypeAdapter[Any]
    call: Any
    lacks: frozenset[str]

    def read(self, body: dict[str, Any]) -> Any:
        """Return a body in vLLM's form.

        The form of embeddings asks of each token id whether it is a sequence, 20 µs; a body's have
        been checked already (contract/openai/pooling.py).
        """
        ids: Any = body.get("input")
        if not are_token_ids(ids):
            return self.form.validate_python(body)
        found = self.form.validate_python(body | {"input": [[0]] if _is_list(ids[0]) else [0]})
        found.input = ids
        return found


def are_token_ids(value: Any) -> bool:
    """Whether it is the token ids of a prompt, or a list of such."""
    if not _is_list(value):
        return False
    prompts = value if _is_list(value[0]) else [value]
    return all(_is_list(ids) and all(type(one) is int for one in ids) for ids in prompts)


def _is_list(value: Any) -> bool:
    return isinstance(value, list) and bool(value)


def pooling(state: State) -> list[Any]:
    """Return vLLM's serving classes for pooling; none where the model generates."""
    found = (getattr(state, name, None) for name in ("serving_embedding", "serving_scores"))
    return [serving for serving in found if serving is not None]


def by_url(state: State, context: int, default_max_tokens: int) -> dict[str, Served]:
    """Return what vLLM has made for the model's task: it generates, or it pools.

    Args:
        state: as vLLM's init_app_state filled it.
        context: the model's, in tokens.
        default_max_tokens: the limit of requests that name none, if the model names none either.
    """
    serving: dict[str, tuple[Any, Any]] = {}
    if chat := getattr(state, "openai_serving_chat", None):
        completion = state.openai_serving_completion
        for generating in (chat, completion):
            # Used where a request names no limit, and cut to what the context leaves;
            # a model's own generation_config wins.
            generating.default_sampling_params.setdefault("max_tokens", default_max_tokens)
        default = completion.default_sampling_params["max_tokens"]
        forms = make_forms(context, default, completion.override_max_tokens)
        serving[CHAT_URL] = forms[0], chat.create_chat_completion
        serving[COMPLETION_URL] = forms[1], completion.create_completion
        serving |= other_urls(state, forms[0], default_max_tokens)
    else:  # tokens can be counted by any model
        serving |= other_urls(state, object, default_max_tokens)
    if embedding := getattr(state, "serving_embedding", None):
        serving[EMBEDDINGS_URL] = names.EmbeddingRequest, embedding
    if scores := getattr(state, "serving_scores", None):
        serving |= dict.fromkeys(SCORE_URLS, (names.ScoreRequest, scores))
        serving |= dict.fromkeys(RERANK_URLS, (names.RerankRequest, scores))
    return {
        url: Served(pydantic.TypeAdapter(form), call, lacking(url, form))
        for url, (form, call) in serving.items()
    }


def refuse_unserved(serving: Mapping[str, Served], url: str, body: Mapping[str, Any]) -> None:
    """Refuse a url that the model does not serve, and a field that the release does not know."""
    if url not in serving:
        raise RequestRejected(
            f"field url: this worker's model serves {', '.join(serving)}, not {url}; "
            "send the request to the queue of a model that does",
            code="unknown_url",
            field="url",
        )
    for name in serving[url].lacks:
        if body.get(name) is not None:
            raise RequestRejected(
                f"field body.{name}: vLLM {named(installed())} of this worker does not know "
                "it; leave it out, or send the request to a worker with another release",
                field=f"body.{name}",
            )


def tell_what_is_lacking(serving: Mapping[str, Served]) -> None:
    """Log which fields of requests the running release does not know."""
    lacks = {name for served in serving.values() for name in served.lacks}
    if lacks:
        text = "vLLM %s does not know %s; requests with these fields are refused"
        extra = {"action": "fields_unknown"}
        log.info(text, named(installed()), ", ".join(sorted(lacks)), extra=extra)


def parses_chats(config: Any) -> bool:
    """Say whether vLLM takes a part of what a model writes out of a chat's content.

    Args:
        config: the engine's VllmConfig.
    """
    harmony = getattr(config.model_config.hf_config, "model_type", "") == "gpt_oss"
    return harmony or bool(config.structured_outputs_config.reasoning_parser)


def pooled(raw: bytes, model: str | None) -> Completion:
    """Return the completion of an embeddings, score or rerank response.

    Args:
        raw: the response's JSON.
        model: what the line calls the model, if it does.

    Raises:
        EngineDead: the answer is empty; vLLM makes such of what it was told to give up.
    """
    # Its numbers are not decoded: there may be millions, and the loop waits.
    answer = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
    if _NO_EMBEDDING.search(raw):
        raise EngineDead("the engine was told to end", inside=False)
    if model:
        answer["model"] = msgspec.Raw(orjson.dumps(model))
        raw = msgspec.json.encode(answer)
    return Completion(raw, orjson.loads(bytes(answer["usage"]))["prompt_tokens"], 0)


# -- messages, responses, counted tokens ---------------------------------------------

OTHER_URLS = frozenset((MESSAGES_URL, COUNT_TOKENS_URL, RESPONSES_URL, TOKENIZE_URL))

Forms = dict[str, tuple[Any, Any]]


def other_urls(state: State, chat: type[Any], default_max_tokens: int) -> Forms:
    """Return form and call by url of what vLLM has made for the model.

    Args:
        state: as vLLM's init_app_state filled it.
        chat: our form of chats (forms.py), which a message becomes.
        default_max_tokens: the limit of responses that name none.
    """
    found: Forms = {}
    if names.AnthropicMessagesRequest is None:
        return found
    if messages := getattr(state, "anthropic_serving_messages", None):
        found |= _messages(messages, chat)
    if responses := getattr(state, "openai_serving_responses", None):
        responses.default_sampling_params.setdefault("max_tokens", default_max_tokens)
        _watch_aborts(responses)
        found[RESPONSES_URL] = names.ResponsesRequest, responses.create_responses
    if tokenization := getattr(state, "serving_tokenization", None):

        async def tokenize(form: Any) -> Any:
            return await tokenization.create_tokenize(form, None)

        found[TOKENIZE_URL] = names.TokenizeRequest, tokenize
    return found


def _messages(serving: Any, chat: type[Any]) -> Forms:
    """Return what serves messages: vLLM makes a chat of each, and we a chat with our limits."""

    class Messages(names.AnthropicMessagesRequest):
        model: str = ""  # one model is served, whatever it is called
        request_id: str = ""

    class CountTokens(names.AnthropicCountTokensRequest):
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


def completion_of(url: str, answer: Any, model: str | None) -> Completion:
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


class Detokenized:
    """The text that vLLM has for requests in one engine, read where vLLM itself keeps it.

    vLLM detokenizes every request at every step, to look for stop texts; which output a request
    asked for only decides what it hands on. So the text of a request that asked for the final
    output alone can be read at any time, and the request runs no differently for it.

    `found` holds on to choices that ended before others, `prompts` says how many a completion has,
    if several. `forget` a request that ended.
    """

    def __init__(self) -> None:
        self.found: dict[str, dict[int, Any]] = {}
        self.prompts: dict[str, int] = {}

    def forget(self, request_id: str) -> None:
        """Drop what is held of a request."""
        self.found.pop(request_id, None)
        self.prompts.pop(request_id, None)

    def texts(self, processor: Any, request_id: str) -> list[str]:
        """Return each choice's text so far.

        Args:
            processor: vLLM's OutputProcessor.
            request_id: ours, from which vLLM's serving classes make theirs.
        """
        found = self.found.get(request_id, {})
        for place, name in enumerate(self._names(processor.external_req_ids, request_id)):
            for internal in processor.external_req_ids.get(name, ()):
                state = processor.request_states.get(internal)
                if state is not None and state.detokenizer is not None:
                    several = state.parent_req.n if state.parent_req is not None else 1
                    found[place * several + state.request_index] = state.detokenizer
        if found:
            self.found[request_id] = found
        # Not finished: what may yet become a stop text is held back.
        return [
            found[n].get_next_output_text(False, False) if n in found else ""
            for n in range(max(found, default=-1) + 1)
        ]

    def _names(self, known: Any, request_id: str) -> list[str]:
        """Return vLLM's names: one of a chat or response, a completion's of its prompts."""
        chat, response = f"chatcmpl-{request_id}", f"{response_id(request_id)}_0"
        if chat in known:
            return [chat]
        if response in known:
            return [response]
        return [f"cmpl-{request_id}-{n}" for n in range(self.prompts.get(request_id, 1))]
