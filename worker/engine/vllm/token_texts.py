"""The text of each token of a vocabulary, made once.

vLLM makes the text of each token of each log probability anew, on the event loop: 20 of each token
of a step's prompts are 160,000 texts, and take a second in which the loop does nothing else.
"""

import logging
from collections.abc import Sequence
from typing import Any

from worker.engine.vllm.names import engine_logprobs

log = logging.getLogger(__name__)

TEXTS = "convert_ids_list_to_tokens"


def remember_texts() -> None:
    """Let vLLM look texts of tokens up from now on; a release without the function goes on."""
    make = getattr(engine_logprobs, TEXTS, None)
    if make is None:
        extra = {"action": "token_texts_not_kept"}
        log.warning("this vLLM makes the texts of log probabilities in another way", extra=extra)
        return
    setattr(engine_logprobs, TEXTS, remembering(getattr(make, "replaces", make)))


def remembering(make: Any) -> Any:
    """Return what does as `make`, which makes the texts of a tokenizer's tokens one by one."""
    known: dict[int, str] = {}
    of: list[Any] = [None]  # the tokenizer; an engine has one

    def texts(tokenizer: Any, tokens: Sequence[int]) -> list[str]:
        if of[0] is not tokenizer:
            known.clear()
            of[0] = tokenizer
        missing = [*{token for token in tokens if token not in known}]
        if missing:
            known.update(zip(missing, make(tokenizer, missing), strict=True))
        return [known[token] for token in tokens]

    texts.replaces = make  # type: ignore[attr-defined]  # an engine may be built again
    return texts
