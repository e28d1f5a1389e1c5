"""Keeps token ids from the engine for which the model has no embedding: one of them ends it.

vLLM compares a prompt's ids with the tokenizer's largest or the model's, whichever is larger. A
tokenizer may know more tokens than the model, and counts one too many.
"""

from collections.abc import Iterator
from functools import wraps
from typing import Any

from worker.engine.vllm.names import VLLMValidationError


def guard(engine: Any) -> None:
    """Look at the ids of each request, of whatever url, before an AsyncLLM takes it."""
    processor = engine.output_processor
    size = int(engine.vllm_config.model_config.get_vocab_size() or 0)
    if not size:  # it embeds no tokens
        return
    add = processor.add_request

    @wraps(add)  # others look at its signature (the fast path)
    def add_request(request: Any, *more: Any, **named: Any) -> Any:
        refuse_unknown(request, size)
        return add(request, *more, **named)

    processor.add_request = add_request


def refuse_unknown(request: Any, size: int) -> None:
    """Look at what EngineCore would be given, of a model with so many tokens.

    Raises:
        VLLMValidationError: naming an id that the model does not have.
    """
    ids = request.prompt_token_ids
    if ids and max(ids) >= size:
        _compare("prompt", max(_outside_media(ids, request), default=0), size)
    params = getattr(request, "sampling_params", None)
    if params is None:
        return
    # Words are made of the tokenizer's tokens, and forbidden among the model's.
    for word in getattr(params, "_bad_words_token_ids", None) or ():
        _compare("bad_words", max(word), size)
    if params.allowed_token_ids:  # which vLLM before 0.30 compares with the tokenizer's
        _compare("allowed_token_ids", max(params.allowed_token_ids), size)


def _compare(parameter: str, highest: int, size: int) -> None:
    if highest >= size:
        raise VLLMValidationError(
            f"{parameter} has the token id {highest}, and the model's are 0 to {size - 1}",
            parameter=parameter,
        )


def _outside_media(ids: list[int], request: Any) -> Iterator[int]:
    """Yield the ids that are embedded: places of pictures and sounds have ids of their own."""
    at = 0
    for feature in sorted(getattr(request, "mm_features", None) or (), key=_offset):
        yield from ids[at : _offset(feature)]
        at = _offset(feature) + feature.mm_position.length
    yield from ids[at:]


def _offset(feature: Any) -> int:
    return int(feature.mm_position.offset)
