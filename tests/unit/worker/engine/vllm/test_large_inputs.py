"""Texts that take too long to make tokens of, options that inflate media, folders in errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from contract.errors import RequestFailed, RequestRejected
from contract.openai.body import (
    CHAT_URL,
    COMPLETION_URL,
    COUNT_TOKENS_URL,
    MESSAGES_URL,
    RESPONSES_URL,
    TOKENIZE_URL,
)
from contract.openai.pooling import EMBEDDINGS_URL, RERANK_URLS, SCORE_URLS
from worker.engine.vllm.errors import Folders, in_media
from worker.engine.vllm.limits import (
    LEAST,
    MOST_TOGETHER,
    PER_TOKEN,
    refuse_inflated,
    refuse_long,
)
from worker.engine.vllm.media import MAX_IMAGE_PIXELS

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
    with pytest.raises(RequestRejected, match=f"give at most {MOST_TOGETHER}"):
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


@pytest.mark.parametrize("written", ["./models/tiny", "{here}/models/tiny", "models/tiny"])
def test_no_error_says_where_the_model_lies(written: str) -> None:
    here = str(Path.cwd())
    folder = written.format(here=here)
    for name in ("tiny", folder):
        folders = Folders([(folder, name), ("/adapters/one", "one")])
        for told in (folder, f"{here}/models/tiny"):
            error = RequestRejected(f"{told} is not a multimodal model")
            folders.hide(error)
            assert error.message == str(error) == "tiny is not a multimodal model"
        failed = RequestFailed(f"ValueError: no {here}/worker/x.py, no /adapters/one/a.json")
        folders.hide(failed)
        assert str(failed) == "ValueError: no …/worker/x.py, no one/a.json"


def test_other_words_with_slashes_are_left_alone() -> None:
    folders = Folders([("tiny", "tiny"), (".", "x"), ("org/model", "org/model")])
    for told in ("see https://example.com/models/tiny", "tiny. 1/2", "regex /a/b/", "a/org/model"):
        assert folders.hidden(told) == told


def test_only_what_media_brought_is_a_mistake() -> None:
    def raised(error: Exception, file: str) -> Exception:
        scope: dict[str, Any] = {"error": error}
        try:
            exec(compile("raise error", file, "exec"), scope)
        except Exception as caught:
            return caught
        raise AssertionError

    media = "/x/vllm/multimodal/media/connector.py"
    assert in_media(raised(RuntimeError("Cannot load local files"), media))
    assert not in_media(raised(ConnectionError("no route"), media))
    assert not in_media(raised(TimeoutError("slow"), media))
    assert not in_media(raised(MemoryError(), media))
    assert not in_media(raised(RuntimeError("CUDA error"), "/x/vllm/v1/engine/core.py"))
