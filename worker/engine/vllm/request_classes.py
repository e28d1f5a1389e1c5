"""Makes vLLM's request classes for chats and completions apply the same limits in every release.

Up to 0.31 vLLM reserves `max_tokens` in the context. Since 0.32 it silently generates fewer tokens
than requested if the context is full. Here, a prompt that leaves too few tokens is refused for
every release. The refusal happens at the latest when vLLM makes the sampling parameters: only then
is the length of every prompt known.
"""

from dataclasses import replace
from typing import Annotated, Any, ClassVar, get_args

from pydantic import Field, PrivateAttr

from contract.openai.body import field_names
from worker.engine.vllm.names import ChatCompletionRequest, CompletionRequest, VLLMValidationError

#: The type of max_tokens and max_completion_tokens.
Limit = Annotated[int, Field(ge=1)]


class _Limited:
    """Mixin with the limits; comes before vLLM's class in the list of base classes.

    `make_request_classes` sets these class attributes, in tokens: `default` is the limit of answers
    without one, `ceiling` the most that the server's options allow, `context` the model's context
    length.
    """

    default: ClassVar[int] = 1
    ceiling: ClassVar[int | None] = None
    context: ClassVar[int] = 0
    truncate_prompt_tokens: int | None

    def limit(self) -> tuple[str, int | None]:
        """Return the name and value of the field that limits the answer."""
        raise NotImplementedError

    def build_tok_params(self, model_config: Any) -> Any:
        """Return vLLM's limits of the prompt.

        With truncate_prompt_tokens -1, the prompt is cut to the tokens that the answer leaves. An
        answer without a limit gets `default`, but at most half of the context.
        """
        params = super().build_tok_params(model_config)  # type: ignore[misc]
        name, limit = self.limit()
        kept = self.truncate_prompt_tokens
        if kept == -1:
            kept = self.context - (limit or min(self.default, self.context // 2))
            params = replace(params, truncate_prompt_tokens=max(0, kept))
        if kept is not None and not 0 < kept <= self.context - (limit or 0):
            raise VLLMValidationError(
                f"a prompt cut to {kept} tokens and {name}={limit} do not fit into the model's "
                f"context length of {self.context} tokens; ask for fewer",
                parameter=name,
            )
        return params

    def to_sampling_params(self, max_tokens: int, *args: Any, **kwargs: Any) -> Any:
        self._refuse_if_less(max_tokens)
        return super().to_sampling_params(max_tokens, *args, **kwargs)  # type: ignore[misc]

    def to_beam_search_params(self, max_tokens: int, *args: Any, **kwargs: Any) -> Any:
        self._refuse_if_less(max_tokens)
        return super().to_beam_search_params(max_tokens, *args, **kwargs)  # type: ignore[misc]

    def _refuse_if_less(self, granted: int) -> None:
        """Refuse a request that would get fewer output tokens than it asks for."""
        name, limit = self.limit()
        needed = limit or 1
        if self.ceiling is not None:
            needed = min(needed, self.ceiling)
        if granted < needed:
            raise VLLMValidationError(
                f"the prompt has {self.context - granted} tokens, which with "
                f"{name}={limit} is more than the model's context length of {self.context} tokens; "
                "shorten the prompt or ask for fewer tokens"
                if limit
                else f"the prompt fills the model's context length of {self.context} tokens and "
                "leaves none for an answer; shorten it",
                parameter="input_tokens",
            )


class _Chat(_Limited, ChatCompletionRequest):
    max_tokens: Limit | None = None
    max_completion_tokens: Limit | None = None

    def limit(self) -> tuple[str, int | None]:
        if self.max_completion_tokens is not None:
            return "max_completion_tokens", self.max_completion_tokens
        # Read from __dict__, because vLLM's attribute logs a deprecation warning at each access.
        return "max_tokens", self.__dict__["max_tokens"]


class _Completion(_Limited, CompletionRequest):
    # None instead of vLLM's default, OpenAI's old 16; chats have no such default.
    max_tokens: Limit | None = None
    _limit: int | None = PrivateAttr(None)

    def limit(self) -> tuple[str, int | None]:
        return "max_tokens", self._limit

    def build_tok_params(self, model_config: Any) -> Any:
        self._limit = self.max_tokens
        params = super().build_tok_params(model_config)
        if self.max_tokens is None:  # with `echo` vLLM needs a number, but does not reserve it
            self.max_tokens = self.default
        return params


def make_request_classes(
    context: int, default: int, ceiling: int | None
) -> tuple[type[Any], type[Any]]:
    """Return an engine's request classes for chats and completions. Arguments are in tokens."""
    shared = {"__module__": __name__, "context": context, "default": default, "ceiling": ceiling}
    return type("Chat", (_Chat,), shared), type("Completion", (_Completion,), shared)


def unknown_fields(url: str, request_class: Any) -> frozenset[str]:
    """Return the fields that requests may have and vLLM's request class lacks."""
    return frozenset(field_names(url) - fields_of(request_class))


def fields_of(request_class: Any) -> set[str]:
    """Return the fields of a class, or of all classes in a union."""
    if hasattr(request_class, "model_fields"):
        return set(request_class.model_fields)
    return {name for member in get_args(request_class) for name in fields_of(member)}
