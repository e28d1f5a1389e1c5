"""What is noted while vLLM's pooling classes prepare a request, whatever they hand over."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from worker.engine.vllm.lessons import LESSON, Lesson, note_contexts

CONTEXT = SimpleNamespace(request_id="embd-a", engine_inputs=None)


class Renders:
    """As of 0.30: a method that is awaited."""

    async def _preprocessing(self, processor: Any, context: Any) -> list[Any]:
        return [processor, context]


class RendersInThread:
    """As of 0.26: what is awaited is an attribute, and calls the method in a thread."""

    def __init__(self) -> None:
        self._preprocessing_async = Renders()._preprocessing

    def _preprocessing(self, processor: Any, context: Any) -> None:
        raise AssertionError("it would run on the loop")


async def test_the_context_of_a_request_with_a_lesson_is_noted() -> None:
    for serving, name in (
        (Renders(), "_preprocessing"), (RendersInThread(), "_preprocessing_async")
    ):  # fmt: skip
        note_contexts(serving)
        assert await getattr(serving, name)("processor", CONTEXT) == ["processor", CONTEXT]
        token = LESSON.set(lesson := Lesson())
        assert await getattr(serving, name)("processor", CONTEXT) == ["processor", CONTEXT]
        LESSON.reset(token)
        assert lesson.contexts == [CONTEXT]
