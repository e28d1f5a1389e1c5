"""vLLM's request classes for chats and completions, with the same limits on every release.

Up to 0.31 vLLM reserves `max_tokens` in the context; since 0.32 it silently gives fewer tokens than
were asked for. So a prompt that leaves too few tokens is refused on every release, at the latest
when vLLM makes the sampling parameters: the prompt's length is known only then.
"""

from dataclasses import replace
from typing import Annotated, Any, ClassVar, get_args

from pydantic import Field, PrivateAttr

from contract.openai.body import field_names
from worker.engine.vllm.names import ChatCompletionRequest, CompletionRequest, VLLMValidationError

Limit = Annotated[int, Field(ge=1)]


class _Limited:
    """Mixin before vLLM's class; `make_forms` sets what all requests of an engine share.

    In tokens: `default` is the limit of requests without one, `ceiling` that of all requests by the
    server's options, `context` the model's.
    """

    default: ClassVar[int] = 1
    ceiling: ClassVar[int | None] = None
    context: ClassVar[int] = 0
    truncate_prompt_tokens: int | None

    def limit(self) -> tuple[str, int | None]:
        """Return the name and value of the field that limits the answer."""
        raise NotImplementedError

    def build_tok_params(self, model_config: Any) -> Any:
        """Return vLLM's limits of the prompt; -1 cuts it to what the answer leaves.

        An answer without a limit gets the default, at most half of the context.
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

    def to_sampling_params(self, max_tokens: int, *more: Any, **named: Any) -> Any:
        self._refuse_less(max_tokens)
        return super().to_sampling_params(max_tokens, *more, **named)  # type: ignore[misc]

    def to_beam_search_params(self, max_tokens: int, *more: Any, **named: Any) -> Any:
        self._refuse_less(max_tokens)
        return super().to_beam_search_params(max_tokens, *more, **named)  # type: ignore[misc]

    def _refuse_less(self, granted: int) -> None:
        """Refuse a request that would get fewer tokens than it asked for."""
        name, limit = self.limit()
        wanted = limit or 1
        if self.ceiling is not None:
            wanted = min(wanted, self.ceiling)
        if granted < wanted:
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
        # vLLM's field warns of its deprecation at each access
        return "max_tokens", self.__dict__["max_tokens"]


class _Completion(_Limited, CompletionRequest):
    # vLLM would fill in OpenAI's old 16; chat has no such default.
    max_tokens: Limit | None = None
    _limit: int | None = PrivateAttr(None)

    def limit(self) -> tuple[str, int | None]:
        return "max_tokens", self._limit

    def build_tok_params(self, model_config: Any) -> Any:
        self._limit = self.max_tokens
        params = super().build_tok_params(model_config)
        if self.max_tokens is None:  # with `echo` vLLM needs a number, which is not reserved
            self.max_tokens = self.default
        return params


def make_forms(context: int, default: int, ceiling: int | None) -> tuple[type[Any], type[Any]]:
    """Return one engine's request classes of chats and completions; all arguments are tokens."""
    shared = {"__module__": __name__, "context": context, "default": default, "ceiling": ceiling}
    return type("Chat", (_Chat,), shared), type("Completion", (_Completion,), shared)


def unknown_fields(url: str, form: Any) -> frozenset[str]:
    """Return a line's fields that vLLM's request class does not know."""
    return frozenset(field_names(url) - fields_of(form))


def fields_of(form: Any) -> set[str]:
    """Return the fields of a class, or of all classes of a union."""
    if hasattr(form, "model_fields"):
        return set(form.model_fields)
    return {name for part in get_args(form) for name in fields_of(part)}
