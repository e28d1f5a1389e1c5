"""Requests that would stop the event loop, or the engine, are refused first, by bounds."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest

from contract.errors import RequestRejected
from contract.openai.body import (
    CHAT_URL,
    COMPLETION_URL,
    COUNT_TOKENS_URL,
    MESSAGES_URL,
    RESPONSES_URL,
    TOKENIZE_URL,
)
from contract.openai.pooling import EMBEDDINGS_URL, RERANK_URLS, SCORE_URLS
from worker.engine.vllm.limits import (
    LEAST,
    MOST_IN_ALL,
    PER_TOKEN,
    guard_vocabulary,
    refuse_inflated,
    refuse_long,
)
from worker.engine.vllm.media import MAX_IMAGE_PIXELS
from worker.engine.vllm.names import VLLMValidationError

CONTEXT = 32_768
LIMIT = PER_TOKEN * CONTEXT
#: By name: url, and a body with a text of so many characters.
PLACES: dict[str, tuple[str, Any]] = {
    "tokenize": (TOKENIZE_URL, lambda text: {"prompt": text}),
    "tokenize a chat": (TOKENIZE_URL, lambda text: {"messages": [{"content": text}]}),
    "count": (COUNT_TOKENS_URL, lambda text: {"messages": [], "system": [{"text": text}]}),
    "count tools": (COUNT_TOKENS_URL, lambda text: {"tools": [{"description": text}]}),
    "cut": (COMPLETION_URL, lambda text: {"prompt": text, "truncate_prompt_tokens": 10}),
    "whole": (COMPLETION_URL, lambda text: {"prompt": text}),
    "one of many": (COMPLETION_URL, lambda text: {"prompt": ["x", text]}),
    "chat": (CHAT_URL, lambda text: {"messages": [{"content": [{"type": "text", "text": text}]}]}),
    "message": (MESSAGES_URL, lambda text: {"messages": [{"content": text}]}),
    "role": (CHAT_URL, lambda text: {"messages": [{"role": text, "content": ""}]}),
    "type of a part": (CHAT_URL, lambda text: {"messages": [{"content": [{"type": text}]}]}),
    "key of a tool's use": (
        COUNT_TOKENS_URL,
        lambda text: {"messages": [{"content": [{"type": "tool_use", "input": {text: 1}}]}]},
    ),
    "response": (RESPONSES_URL, lambda text: {"input": [{"content": text}]}),
    "embedding": (EMBEDDINGS_URL, lambda text: {"input": text, "truncate_prompt_tokens": -1}),
    "embeddings": (EMBEDDINGS_URL, lambda text: {"input": ["x", text]}),
    "embedded chat": (EMBEDDINGS_URL, lambda text: {"messages": [{"content": text}]}),
    "score": (SCORE_URLS[0], lambda text: {"text_1": "x", "text_2": [text]}),
    "rerank": (RERANK_URLS[0], lambda text: {"query": "x", "documents": [text]}),
}


@pytest.mark.parametrize("name", PLACES)
def test_a_text_is_refused_by_its_characters_wherever_it_stands(name: str) -> None:
    url, body = PLACES[name]
    refuse_long(url, body("x" * LIMIT), CONTEXT)
    with pytest.raises(RequestRejected, match=f"{LIMIT + 9} characters; give at most") as caught:
        refuse_long(url, body("x" * (LIMIT + 9)), CONTEXT)
    assert caught.value.code == "context_length_exceeded"


def test_parts_of_a_chat_count_together_and_texts_of_a_list_apart() -> None:
    half = "x" * (LIMIT // 2 + 1)
    with pytest.raises(RequestRejected):
        refuse_long(CHAT_URL, {"messages": [{"content": half}, {"content": half}]}, CONTEXT)
    refuse_long(COMPLETION_URL, {"prompt": [half] * 40}, CONTEXT)
    refuse_long(EMBEDDINGS_URL, {"input": [half] * 4}, CONTEXT)
    with pytest.raises(RequestRejected, match=f"give at most {MOST_IN_ALL}"):
        refuse_long(EMBEDDINGS_URL, {"input": [half] * 40}, CONTEXT)


def test_a_small_model_takes_whole_documents_and_media_count_for_nothing() -> None:
    refuse_long(EMBEDDINGS_URL, {"input": "x" * LEAST}, 512)
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 9_000_000}}
    refuse_long(CHAT_URL, {"messages": [{"content": [image]}]}, 512)
    refuse_long(COMPLETION_URL, {"prompt": [1] * 400_000}, 512)


@pytest.mark.parametrize(
    ("field", "options"),
    [
        ("mm_processor_kwargs", {"size": {"longest_edge": 100_000}}),
        ("mm_processor_kwargs", {"min_pixels": 10**12}),
        ("mm_processor_kwargs", {"size": {"height": 5000, "width": 5000}}),
        ("mm_processor_kwargs", {"num_crops": 4096}),
        ("mm_processor_kwargs", {"images_kwargs": {"max_dynamic_patch": 1000}}),
        ("media_io_kwargs", {"video": {"num_frames": -1}}),
        ("media_io_kwargs", {"video": {"num_frames": 100_000}}),
        ("media_io_kwargs", {"video": {"frames_indices": [0] * 1000}}),
    ],
)
def test_options_that_make_more_of_media_are_refused(field: str, options: Any) -> None:
    with pytest.raises(RequestRejected, match=f"body.{field}"):
        refuse_inflated({field: options})


def test_ordinary_options_of_media_are_taken() -> None:
    refuse_inflated({
        "mm_processor_kwargs": {"max_pixels": MAX_IMAGE_PIXELS, "size": {"longest_edge": 1536},
                                "num_crops": 16, "do_resize": True, "sampling_rate": 48_000},
        "media_io_kwargs": {"video": {"num_frames": 32, "fps": 2}, "image": None},
    })  # fmt: skip


# -- log probabilities ---------------------------------------------------------------

LONG_CONTEXT, DEFAULT = 131_072, 1024
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}]}


async def rendered(body: dict[str, Any], *lengths: int) -> Any:
    import worker.engine.vllm.engine  # noqa: F401 - sets what vLLM reads at its import
    from worker.engine.vllm import limits

    prompts = [{"prompt_token_ids": [1] * length} for length in lengths]

    async def render() -> Any:
        return ([], prompts) if "messages" in body else prompts

    renderer = SimpleNamespace(render_cmpl_async=render, render_chat_async=render)
    limits.guard_log_probabilities(renderer)
    limits.note_log_probabilities(body, DEFAULT)
    chat = "messages" in body
    return await (renderer.render_chat_async if chat else renderer.render_cmpl_async)()


def prompts(count: int, **more: Any) -> dict[str, Any]:
    return {"prompt": ["x"] * count, "max_tokens": 1} | more


@pytest.mark.parametrize(
    ("body", "lengths"),
    [
        (prompts(64, prompt_logprobs=20), [300] * 64),
        (prompts(1, prompt_logprobs=20), [LONG_CONTEXT]),
        (prompts(1, prompt_logprobs=-1), [9]),
        (prompts(400, echo=True, logprobs=20), [40] * 400),
        (prompts(16, n=16, logprobs=5, max_tokens=1000), [3] * 16),
        (CHAT | {"n": 128, "logprobs": True, "top_logprobs": 20}, [3]),
        (CHAT | {"n": 128, "logprobs": True, "max_completion_tokens": 9000}, [3]),
        (CHAT | {"n": 2, "logprob_token_ids": [1] * 1000}, [3]),
    ],
)
async def test_more_than_the_limit_are_refused(body: dict[str, Any], lengths: list[int]) -> None:
    with pytest.raises(Exception, match=r"ask for at most 262144 altogether") as caught:
        await rendered(body, *lengths)
    assert getattr(caught.value, "parameter", "") in ("prompt_logprobs", "logprobs")


@pytest.mark.parametrize(
    ("body", "lengths"),
    [
        (prompts(1, prompt_logprobs=1), [LONG_CONTEXT]),
        (prompts(1, prompt_logprobs=20), [12_000]),
        (prompts(32, echo=True, logprobs=5), [1024] * 32),
        (prompts(2000), [LONG_CONTEXT] * 2000),
        (CHAT | {"logprobs": True, "top_logprobs": 20, "max_tokens": 100_000}, [3]),
        (CHAT | {"n": 16, "logprobs": True, "max_tokens": 16_000}, [3]),
        (CHAT | {"n": 8, "logprobs": True, "top_logprobs": 20}, [3]),
        (CHAT | {"n": 128, "logprobs": False, "top_logprobs": None}, [3]),
    ],
)
async def test_what_clients_ask_for_is_taken(body: dict[str, Any], lengths: list[int]) -> None:
    assert await rendered(body, *lengths)


def test_each_token_is_decoded_once_and_another_tokenizer_has_its_own() -> None:
    import worker.engine.vllm.engine  # noqa: F401 - sets what vLLM reads at its import
    from worker.engine.vllm.limits import remembering

    asked: list[tuple[str, int]] = []

    def make(tokenizer: Any, tokens: list[int]) -> list[str]:
        asked.extend((tokenizer, token) for token in tokens)
        return [f"{tokenizer}{token}" for token in tokens]

    texts = remembering(make)
    assert texts("a", [3, 1, 3, 2]) == ["a3", "a1", "a3", "a2"]
    assert texts("a", [2, 4, 2]) == ["a2", "a4", "a2"]
    assert sorted(asked) == [("a", 1), ("a", 2), ("a", 3), ("a", 4)]
    assert texts("b", [1]) == ["b1"]
    assert texts("a", [1]) == ["a1"]
    assert texts("a", []) == []


# -- token ids -----------------------------------------------------------------------

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
