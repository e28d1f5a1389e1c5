"""vLLM's own serving classes by url, what they answer, and its errors for a request's author.

Imported after engine.py has set what vLLM reads at its import.
"""

import re
from dataclasses import replace
from typing import Any

import orjson
import pydantic
from jinja2 import TemplateError
from starlette.datastructures import State
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.exceptions import VLLMValidationError

from contract.errors import EngineDead, RequestRejected
from contract.openai.body import CHAT_URL, COMPLETION_URL
from contract.openai.pooling import EMBEDDINGS_URL, RERANK_URLS, SCORE_URLS
from worker.engine import Completion

try:
    from vllm.exceptions import VLLMClientError
except ImportError:  # vLLM 0.26, the newest for the PyTorch of some GPU images
    VLLMClientError = ValueError

#: What vLLM's server answers with 400 (entrypoints/serve/exception_handling).
CLIENT_ERRORS = (
    VLLMClientError, pydantic.ValidationError, ValueError, TypeError, OverflowError,
    NotImplementedError, TemplateError,
)  # fmt: skip
#: Parameters that vLLM names when a prompt does not fit.
LENGTH_PARAMETERS = {"input_tokens", "input_text", "max_tokens", "max_completion_tokens"}


class AsLongAsItFits(CompletionRequest):
    """A completion whose max_tokens is a default: it is cut to what the prompt leaves of the
    context, and no reason to refuse the prompt."""

    def build_tok_params(self, model_config: Any) -> Any:
        return replace(super().build_tok_params(model_config), max_output_tokens=0)


def by_url(state: State, default_max_tokens: int) -> dict[str, tuple[Any, Any]]:
    """Return what vLLM has made for the model's task: it generates, or it pools."""
    serving: dict[str, tuple[Any, Any]] = {}
    if chat := getattr(state, "openai_serving_chat", None):
        completion = state.openai_serving_completion
        for generating in (chat, completion):
            # Used where a request names no limit, and cut to what the context leaves;
            # a model's own generation_config wins.
            generating.default_sampling_params.setdefault("max_tokens", default_max_tokens)
        serving[CHAT_URL] = ChatCompletionRequest, chat.create_chat_completion
        serving[COMPLETION_URL] = CompletionRequest, completion.create_completion
    if embedding := getattr(state, "serving_embedding", None):
        from vllm.entrypoints.pooling.embed.protocol import EmbeddingRequest

        serving[EMBEDDINGS_URL] = EmbeddingRequest, embedding
    if scores := getattr(state, "serving_scores", None):
        from vllm.entrypoints.pooling.scoring.protocol import RerankRequest, ScoreRequest

        serving |= dict.fromkeys(SCORE_URLS, (ScoreRequest, scores))
        serving |= dict.fromkeys(RERANK_URLS, (RerankRequest, scores))
    return {url: (pydantic.TypeAdapter(form), call) for url, (form, call) in serving.items()}


def pooled(raw: bytes, model: str | None) -> Completion:
    """Return the completion of an embeddings, score or rerank response.

    Args:
        raw: the response's JSON.
        model: what the line calls the model, if it does.

    Raises:
        EngineDead: the answer is empty; vLLM makes such of what it was told to give up.
    """
    answer = orjson.loads(raw)
    if any(entry.get("embedding") == [] for entry in answer.get("data", ())):
        raise EngineDead("the engine was told to end", inside=False)
    if model:
        answer["model"] = model
        raw = orjson.dumps(answer)
    return Completion(raw, answer["usage"]["prompt_tokens"], 0)


def rejected(error: Exception) -> RequestRejected:
    if isinstance(error, pydantic.ValidationError):
        problem = error.errors(include_url=False, include_input=False)[0]
        # Where vLLM has several forms of a request, its path names their classes, too.
        path = [str(part) for part in problem["loc"]]
        field = ".".join(part for part in path if not part[:1].isupper() and "[" not in part)
        return RequestRejected(f"field body.{field}: {problem['msg']}", field=f"body.{field}")
    parameter = error.parameter if isinstance(error, VLLMValidationError) else None
    too_long = parameter in LENGTH_PARAMETERS or "context length" in str(error)
    code = "context_length_exceeded" if too_long else "invalid_request"
    # Where an object lies in memory is of use to an attacker only; vLLM's server hides it, too.
    message = re.sub(r" at 0x[0-9a-f]+>", ">", str(error))
    return RequestRejected(message or type(error).__name__, code=code, field=parameter)
