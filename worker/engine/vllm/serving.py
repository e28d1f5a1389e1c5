"""vLLM's own serving classes by url, what they answer, and its errors for a request's author."""

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import orjson
import pydantic
from jinja2 import TemplateError
from starlette.datastructures import State

from contract.errors import EngineDead, RequestRejected
from contract.openai.body import CHAT_URL, COMPLETION_URL
from contract.openai.pooling import EMBEDDINGS_URL, RERANK_URLS, SCORE_URLS
from worker.engine import Completion
from worker.engine.vllm.form_errors import told
from worker.engine.vllm.forms import lacking, make_forms
from worker.engine.vllm.names import (
    EmbeddingRequest,
    RerankRequest,
    ScoreRequest,
    VLLMClientError,
    VLLMValidationError,
)
from worker.engine.vllm.other_urls import other_urls
from worker.engine.vllm.releases import named
from worker.machine.packages import installed

log = logging.getLogger(__name__)

#: What vLLM's server answers with 400 (entrypoints/serve/exception_handling): its own class of
#: errors, and the others as long as it still raises them itself.
CLIENT_ERRORS = (
    VLLMClientError, VLLMValidationError, pydantic.ValidationError, ValueError, TypeError,
    OverflowError, NotImplementedError, TemplateError,
)  # fmt: skip
#: Of a text, quotes would be escaped.
_NO_EMBEDDING = re.compile(rb'"embedding":\s*\[\s*\]')
#: The status of what vLLM's errors say it has not: no second try has it.
NOT_IMPLEMENTED = 501
#: What its code raises for a request that it cannot take, and again each time.
REFUSALS = (LookupError, AttributeError, AssertionError, ArithmeticError, RecursionError)
#: Parameters that vLLM names when a prompt does not fit.
LENGTH_PARAMETERS = {"input_tokens", "input_text", "max_tokens", "max_completion_tokens"}


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
        serving[EMBEDDINGS_URL] = EmbeddingRequest, embedding
    if scores := getattr(state, "serving_scores", None):
        serving |= dict.fromkeys(SCORE_URLS, (ScoreRequest, scores))
        serving |= dict.fromkeys(RERANK_URLS, (RerankRequest, scores))
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


def rejected(error: Exception, body: Mapping[str, Any]) -> RequestRejected:
    """Return the error of a request's line, in vLLM's words; `body` is the request's."""
    if isinstance(error, pydantic.ValidationError):
        field, problem = told(error, body)
        return RequestRejected(f"field body.{field}: {problem}", field=f"body.{field}")
    parameter = getattr(error, "parameter", None)
    too_long = parameter in LENGTH_PARAMETERS or "context length" in str(error)
    code = "context_length_exceeded" if too_long else "invalid_request"
    # Where an object lies in memory is of use to an attacker only; vLLM's server hides it, too.
    message = re.sub(r" at 0x[0-9a-f]+>", ">", str(error))
    if isinstance(error, REFUSALS):  # they say little without their names
        message = f"vLLM cannot take this request: {type(error).__name__}: {message}"
    return RequestRejected(message or type(error).__name__, code=code, field=parameter)
