"""What vLLM itself makes of one request, noted while its serving class answers it.

The lean path (lean.py) knows nothing of how vLLM reads a body: for the first request of each form
it looks on, and does the same with the next ones. Noted are the limits of the prompt and of its
template, the request as EngineCore gets it, and the output from which the answer is written.
"""

import inspect
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Run:
    """A request as EngineCore got it, and what came of it."""

    request: Any
    output: Any = None


@dataclass(slots=True)
class Lesson:
    """What was noted; `calls` counts prompts and requests, of which a plain body has one each.

    `contexts` are the PoolingServeContexts of pooling classes.
    """

    prompt: Any = None
    tok_params: Any = None
    chat_params: Any = None
    runs: list[Run] = field(default_factory=list)
    contexts: list[Any] = field(default_factory=list)
    calls: int = 0


LESSON: ContextVar[Lesson | None] = ContextVar("lesson", default=None)


def look_on(renderer: Any, processor: Any) -> None:
    """Note from now on what is made of a request whose task has a lesson; others cost a look.

    Args:
        renderer: vLLM's, which templates and tokenizes.
        processor: vLLM's OutputProcessor.
    """
    _note_rendering(renderer, "render_cmpl_async", "prompts")
    _note_rendering(renderer, "render_chat_async", "conversations")
    note_requests(processor)


def note_requests(processor: Any) -> None:
    """The same of requests and their outputs alone."""
    add = processor.add_request

    def add_request(request: Any, *more: Any, **named: Any) -> Any:
        if lesson := LESSON.get():
            bound = inspect.signature(add).bind(request, *more, **named).arguments
            _note_request(lesson, bound)
        return add(request, *more, **named)

    processor.add_request = add_request


def note_contexts(serving: Any) -> None:
    """The same of what one of vLLM's serving classes for pooling has before it renders texts."""
    # 0.26 renders in a thread, where the lesson is not known.
    name = "_preprocessing_async" if hasattr(serving, "_preprocessing_async") else "_preprocessing"
    prepare = getattr(serving, name)

    def noting(*given: Any, **named: Any) -> Any:  # whatever a release hands over
        if lesson := LESSON.get():
            lesson.contexts += [one for one in given if hasattr(one, "engine_inputs")]
        return prepare(*given, **named)

    setattr(serving, name, noting)


def _note_rendering(renderer: Any, name: str, prompts: str) -> None:
    render = getattr(renderer, name)
    signature = inspect.signature(render)

    async def noting(*given: Any, **named: Any) -> Any:
        if lesson := LESSON.get():
            bound = signature.bind(*given, **named).arguments
            lesson.calls += len(bound[prompts])
            lesson.prompt = bound[prompts][0]
            lesson.tok_params = bound.get("tok_params")
            lesson.chat_params = bound.get("chat_params")
        return await render(*given, **named)

    setattr(renderer, name, noting)


def _note_request(lesson: Lesson, bound: dict[str, Any]) -> None:
    lesson.calls += 1
    run = Run(bound["request"])
    lesson.runs.append(run)
    queue = bound["queue"]
    put = queue.put

    def noting(output: Any) -> None:
        run.output = output
        put(output)

    queue.put = noting
