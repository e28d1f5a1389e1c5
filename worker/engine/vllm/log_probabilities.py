"""A bound of the log probabilities of one answer.

Of each token of a prompt, and of each token that is written, vLLM may tell 20 others. It makes an
object of each and an answer of all, on the event loop: 400,000 stop it for 2 s, and make 50 MB.
What is asked for is known once the prompts' tokens are, before the engine gets any of them.

Of one answer alone (`n` is 1, and there is one prompt) what is written is not counted: it takes
longer to write than to tell.
"""

from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from functools import wraps
from typing import Any

from contract.openai.amounts import sequences_of
from worker.engine.vllm.names import VLLMValidationError
from worker.engine.vllm.token_texts import remember_texts

#: Most of one request; of a prompt of 128,000 tokens that is each token's own and one more.
MOST = 262_144
#: -1 asks for those of the whole vocabulary.
_ALL = 32_768
#: How many the task's request has of each token of its prompts, and of all answers at most.
ASKED: ContextVar[tuple[int, int]] = ContextVar("asked", default=(0, 0))
_RENDERING = ("render_cmpl_async", "render_chat_async")


def begin(body: Mapping[str, Any], default_max_tokens: int) -> None:
    """Note what the task's request asks for; it has an answer of the default length, or its own."""
    of_prompt, of_answer = _of_token(body)
    sequences = sequences_of(body) if of_answer else 1
    limits = (body.get(name) for name in ("max_completion_tokens", "max_tokens"))
    length = next((limit for limit in limits if limit is not None), default_max_tokens)
    ASKED.set((of_prompt, of_answer * sequences * length if sequences > 1 else 0))


def _of_token(body: Mapping[str, Any]) -> tuple[int, int]:
    """Return how many there are of a token of a prompt, and of one of an answer."""
    logprobs, top = body.get("logprobs"), body.get("top_logprobs") or 0
    wanted: int | None = None
    if isinstance(logprobs, bool):
        wanted = top if logprobs else None
    elif logprobs is not None:
        wanted = logprobs
    more = len(body.get("logprob_token_ids") or ())
    of_answer = 0 if wanted is None and not more else _own_and(wanted or 0) + more
    of_prompt = body.get("prompt_logprobs")
    if of_prompt is None and body.get("echo"):
        of_prompt = wanted
    return 0 if of_prompt is None else _own_and(of_prompt), of_answer


def _own_and(others: int) -> int:
    return 1 + (_ALL if others < 0 else others)


def guard(renderer: Any) -> None:
    """Let vLLM's renderer refuse prompts whose request asks for more than MOST.

    The texts of tokens, which log probabilities have, are made once from now on.
    """
    remember_texts()
    for name in _RENDERING:
        if hasattr(renderer, name):
            setattr(renderer, name, _refusing(getattr(renderer, name)))


def _refusing(render: Any) -> Any:
    @wraps(render)  # the fast path looks up how its parameters are called
    async def rendered(*given: Any, **named: Any) -> Any:
        found = await render(*given, **named)
        of_prompt, of_answers = ASKED.get()
        if of_prompt or of_answers:
            _refuse(of_prompt * sum(_lengths(found)), of_answers)
        return found

    return rendered


def _refuse(of_prompts: int, of_answers: int) -> None:
    if of_prompts + of_answers > MOST:
        raise VLLMValidationError(
            f"the request asks for {of_prompts} log probabilities of its prompts' tokens and up to "
            f"{of_answers} of its answers'; ask for at most {MOST} altogether: fewer for each "
            "token, fewer prompts, a smaller n or max_tokens",
            parameter="prompt_logprobs" if of_prompts > of_answers else "logprobs",
        )


def _lengths(found: Any) -> Iterator[int]:
    """Yield how many tokens each prompt has, of what a renderer returns."""
    prompts = found[1] if isinstance(found, tuple) else found  # a chat's conversations come first
    for prompt in prompts:
        yield len(prompt.get("prompt_token_ids") or ())
