"""Token ids that a model has no embedding for never reach the engine."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest

from worker.engine.vllm.limits import guard_vocabulary
from worker.engine.vllm.names import VLLMValidationError

SIZE = 1024


def engine(size: int | None = SIZE) -> tuple[Any, list[Any]]:
    """Return an AsyncLLM's likeness, and the list of what it takes."""
    taken: list[Any] = []
    config = SimpleNamespace(get_vocab_size=lambda: size)
    made = SimpleNamespace(
        output_processor=SimpleNamespace(
            add_request=lambda request, *_, **__: taken.append(request)
        ),
        vllm_config=SimpleNamespace(model_config=config),
    )
    guard_vocabulary(made)
    return made, taken


def request(ids: list[int] | None, *media: tuple[int, int], **params: Any) -> Any:
    """Return a request with so many ids; `media` are offset and length of places for pictures."""
    places = [SimpleNamespace(offset=offset, length=length) for offset, length in media]
    features = [SimpleNamespace(mm_position=place) for place in places]
    sampling = SimpleNamespace(**{"allowed_token_ids": None} | params) if params else None
    return SimpleNamespace(
        prompt_token_ids=ids, mm_features=features or None, sampling_params=sampling
    )


@pytest.mark.parametrize("ids", [[5, 6, SIZE], [SIZE + 300], [SIZE, 0], [2**40]])
def test_an_id_past_the_vocabulary_is_named_with_the_bound(ids: list[int]) -> None:
    made, taken = engine()
    with pytest.raises(
        VLLMValidationError,
        match=rf"prompt has the token id {max(ids)}, and the model's are 0 to 1023",
    ):
        made.output_processor.add_request(request(ids), None, None, 0, None)
    assert taken == []


@pytest.mark.parametrize("ids", [[0, SIZE - 1], [], None])
def test_other_prompts_are_taken(ids: list[int] | None) -> None:
    made, taken = engine()
    made.output_processor.add_request(request(ids), None, None, 0, None)
    assert len(taken) == 1


def test_places_of_pictures_have_ids_of_their_own() -> None:
    made, taken = engine()
    add = made.output_processor.add_request
    add(request([1, SIZE, SIZE, 2, SIZE + 9, 3], (4, 1), (1, 2)), None, None, 0, None)
    assert len(taken) == 1
    with pytest.raises(VLLMValidationError, match="token id 1033"):
        add(request([1, SIZE, SIZE, 2, SIZE + 9, 3], (1, 2)), None, None, 0, None)


def test_those_who_look_on_see_what_vllm_is_given() -> None:
    """As the fast path does, by the names of vLLM's own parameters."""
    made, _ = engine()
    names = [*inspect.signature(made.output_processor.add_request).parameters]
    assert names == ["request", "_", "__"]


@pytest.mark.parametrize("size", [0, None])
def test_a_model_without_a_vocabulary_is_not_looked_at(size: int | None) -> None:
    made, taken = engine(size)
    made.output_processor.add_request(request([7]), None, None, 0, None)
    assert len(taken) == 1


@pytest.mark.parametrize(
    ("params", "told"),
    [
        ({"_bad_words_token_ids": [[1], [2, SIZE]]}, "bad_words has the token id 1024"),
        ({"allowed_token_ids": [3, SIZE + 5]}, "allowed_token_ids has the token id 1029"),
    ],
)
def test_ids_that_the_sampler_would_look_up_are_compared_too(
    params: dict[str, Any], told: str
) -> None:
    made, taken = engine()
    with pytest.raises(VLLMValidationError, match=told):
        made.output_processor.add_request(request([1], **params), None, None, 0, None)
    assert taken == []
    made.output_processor.add_request(request([1], allowed_token_ids=[7]), None, None, 0, None)
    assert len(taken) == 1
