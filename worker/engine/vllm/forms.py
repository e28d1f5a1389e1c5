"""Requests that generate, in vLLM's own classes, with the same limits whichever release runs.

Up to 0.31 vLLM reserves `max_tokens` in the context; since 0.32 it gives fewer tokens than were
asked for instead. A batch has nobody who would notice, so a prompt that leaves too little room is
refused on every release: where vLLM does not do it itself, when it makes its sampling parameters
of the request, the first moment at which the prompt's length is known. That costs a comparison.
"""

from dataclasses import replace
from typing import Annotated, Any, ClassVar, get_args

from pydantic import Field, PrivateAttr

from contract.openai.body import field_names
from worker.engine.vllm.names import ChatCompletionRequest, CompletionRequest, VLLMValidationError

Limit = Annotated[int, Field(ge=1)]


class _LeavesRoom:
    """Goes before vLLM's class; `make_forms` sets what every request of an engine shares."""

    #: Tokens of an answer whose request names no limit.
    default: ClassVar[int] = 1
    #: Most tokens of any answer, by the server's options; None without such an option.
    ceiling: ClassVar[int | None] = None
    #: The model's context, prompt and answer.
    context: ClassVar[int] = 0
    truncate_prompt_tokens: int | None

    def limit(self) -> tuple[str, int | None]:
        """Return the field that limits the answer, and its value; None where none is asked for."""
        raise NotImplementedError

    def build_tok_params(self, model_config: Any) -> Any:
        """Return vLLM's limits of the prompt; -1 cuts it to what the answer leaves of the context.

        Where no limit is given that is the default one, and at most half of the context.
        """
        params = super().build_tok_params(model_config)  # type: ignore[misc]
        name, asked = self.limit()
        kept = self.truncate_prompt_tokens
        if kept == -1:
            kept = self.context - (asked or min(self.default, self.context // 2))
            params = replace(params, truncate_prompt_tokens=max(0, kept))
        if kept is not None and not 0 < kept <= self.context - (asked or 0):
            raise VLLMValidationError(
                f"a prompt cut to {kept} tokens and {name}={asked} do not fit into the model's "
                f"context length of {self.context} tokens; ask for fewer",
                parameter=name,
            )
        return params

    def to_sampling_params(self, max_tokens: int, *more: Any, **named: Any) -> Any:
        """As vLLM's, of a request that gets what it asked for."""
        self._refuse_less(max_tokens)
        return super().to_sampling_params(max_tokens, *more, **named)  # type: ignore[misc]

    def to_beam_search_params(self, max_tokens: int, *more: Any, **named: Any) -> Any:
        """As vLLM's, of a request that gets what it asked for."""
        self._refuse_less(max_tokens)
        return super().to_beam_search_params(max_tokens, *more, **named)  # type: ignore[misc]

    def _refuse_less(self, granted: int) -> None:
        name, asked = self.limit()
        wanted = asked or 1
        if self.ceiling is not None:
            wanted = min(wanted, self.ceiling)
        if granted < wanted:
            raise VLLMValidationError(
                f"the prompt has {self.context - granted} tokens, which with "
                f"{name}={asked} is more than the model's context length of {self.context} tokens; "
                "shorten the prompt or ask for fewer tokens"
                if asked
                else f"the prompt fills the model's context length of {self.context} tokens, and "
                "leaves no room for an answer; shorten it",
                parameter="input_tokens",
            )


class _Chat(_LeavesRoom, ChatCompletionRequest):
    max_tokens: Limit | None = None
    max_completion_tokens: Limit | None = None

    def limit(self) -> tuple[str, int | None]:
        if self.max_completion_tokens is not None:
            return "max_completion_tokens", self.max_completion_tokens
        # vLLM calls the other name deprecated, and says so at each look at it
        return "max_tokens", self.__dict__["max_tokens"]


class _Completion(_LeavesRoom, CompletionRequest):
    # vLLM would fill in OpenAI's old 16; chat has no such default.
    max_tokens: Limit | None = None
    _asked: int | None = PrivateAttr(None)

    def limit(self) -> tuple[str, int | None]:
        return "max_tokens", self._asked

    def build_tok_params(self, model_config: Any) -> Any:
        self._asked = self.max_tokens
        params = super().build_tok_params(model_config)
        if self.max_tokens is None:  # with `echo` vLLM wants a number; not one that is reserved
            self.max_tokens = self.default
        return params


def make_forms(context: int, default: int, ceiling: int | None) -> tuple[type[Any], type[Any]]:
    """Return the classes of chats and completions of one engine; all three are tokens."""
    shared = {"__module__": __name__, "context": context, "default": default, "ceiling": ceiling}
    return type("Chat", (_Chat,), shared), type("Completion", (_Completion,), shared)


def lacking(url: str, form: Any) -> frozenset[str]:
    """Return the fields that a line for `url` may have and the running vLLM does not know.

    Args:
        url: of one of vLLM's endpoints.
        form: vLLM's class of its requests, or the union of several.
    """
    return frozenset(field_names(url) - fields_of(form))


def fields_of(form: Any) -> set[str]:
    """Return the fields of a class, or of all classes of a union."""
    if hasattr(form, "model_fields"):
        return set(form.model_fields)
    return {name for part in get_args(form) for name in fields_of(part)}
