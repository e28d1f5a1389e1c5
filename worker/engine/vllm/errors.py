"""Classify vLLM's errors, and word them for the author of a request."""

import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pydantic
from jinja2 import TemplateError

from contract.errors import RequestFailed, RequestRejected, WarmqError
from worker.engine.vllm.names import VLLMClientError, VLLMValidationError

#: What vLLM's server answers with 400 (entrypoints/serve/exception_handling): its own class of
#: errors, and the classes that it still raises without it.
CLIENT_ERRORS = (
    VLLMClientError, VLLMValidationError, pydantic.ValidationError, ValueError, TypeError,
    OverflowError, NotImplementedError, TemplateError,
)  # fmt: skip
#: What vLLM's code raises, at every try, for a request that it cannot handle.
REFUSALS = (LookupError, AttributeError, AssertionError, ArithmeticError, RecursionError)
#: Parameters that vLLM names when a prompt does not fit.
LENGTH_PARAMETERS = {"input_tokens", "input_text", "max_tokens", "max_completion_tokens"}
#: Modules whose errors are caused by a picture, an audio or video file, or its URL.
_READ_MEDIA = ("/vllm/multimodal/media/", "/vllm/multimodal/video", "/vllm/multimodal/image",
               "/vllm/multimodal/audio")  # fmt: skip
#: But these come from the network or this machine; the same request may succeed later.
_TEMPORARY = (OSError, TimeoutError, MemoryError, ImportError, WarmqError)
#: The folder of this package.
_OURS = f"{Path(__file__).parents[2]}{os.sep}"


class Aborted(Exception):
    """The engine aborted a request, as it does when it is asked to end."""


def rejected(error: Exception, body: Mapping[str, Any]) -> RequestRejected:
    """Return the error of a request's line, in vLLM's words."""
    if isinstance(error, pydantic.ValidationError):
        field, problem = wrong_field(error, body)
        return RequestRejected(f"field body.{field}: {problem}", field=f"body.{field}")
    parameter = getattr(error, "parameter", None)
    too_long = parameter in LENGTH_PARAMETERS or "context length" in str(error)
    code = "context_length_exceeded" if too_long else "invalid_request"
    # An object's address helps only an attacker; vLLM's server hides it, too.
    message = re.sub(r" at 0x[0-9a-f]+>", ">", str(error))
    if isinstance(error, REFUSALS):  # their messages mean little without their class
        message = f"vLLM cannot take this request: {type(error).__name__}: {message}"
    return RequestRejected(message or type(error).__name__, code=code, field=parameter)


def in_media(error: BaseException) -> bool:
    """Whether a request's media caused the error."""
    if isinstance(error, _TEMPORARY) or type(error).__module__.partition(".")[0] == "aiohttp":
        return False
    return any(part in name for name in _files(error) for part in _READ_MEDIA)


def is_ours(error: BaseException) -> bool:
    """Whether this package's own code raised the error."""
    *_, innermost = "", *_files(error)
    return innermost.startswith(_OURS)


def _files(error: BaseException) -> Iterator[str]:
    trace = error.__traceback__
    while trace is not None:
        yield trace.tb_frame.f_code.co_filename
        trace = trace.tb_next


def failed(error: Exception, body: Mapping[str, Any]) -> WarmqError:
    """Return the line's error for one that vLLM does not explain."""
    if type(error).__name__ == "GenerationError":
        return ended_in_error(body)
    return RequestFailed(f"{type(error).__name__}: {error}")


def ended_in_error(body: Mapping[str, Any]) -> WarmqError:
    """Return the error of an answer with the finish_reason `error`.

    vLLM gives it where no text follows the constraint, and logs why. Without a constraint a retry
    may help.
    """
    form, chosen = body.get("response_format"), body.get("tool_choice")
    asked = body.get("structured_outputs") or chosen == "required" or isinstance(chosen, dict)
    if asked or (isinstance(form, dict) and form.get("type") != "text"):
        return RequestRejected(
            "vLLM ended this answer with finish_reason error: no text of this model follows the "
            "schema, regex, choice, grammar or tools that the request names; its log has the reason"
        )
    return RequestFailed("GenerationError: Internal server error")


class Folders:
    """Replaces this machine's folders in messages.

    `models` are folders, or names on a hub, each with the name that it is served as.
    """

    def __init__(self, models: Iterable[tuple[str, str]]) -> None:
        names = {}
        for folder, name in models:
            shown = Path(name).name if name == folder else name
            path = Path(folder)
            for written in (folder, str(path), str(path.absolute()), str(path.resolve())):
                names[written.rstrip("/")] = shown
        for here in (Path.cwd(), Path(sys.prefix), Path(sys.base_prefix), Path.home()):
            names.setdefault(str(here).rstrip("/"), "…")
        # A word such as "." or "tiny" may mean anything in a message.
        known = sorted((name for name in names if "/" in name and len(name) > 3), key=len)
        self._names = names
        longest_first = "|".join(re.escape(name) for name in reversed(known))
        self._known = re.compile(rf"(?<![\w./-])(?:{longest_first})(?![\w-])") if known else None

    def hide(self, error: WarmqError) -> None:
        """Change an error's message in place."""
        shown = self.hidden(error.message)
        if shown != error.message:
            error.message, error.args = shown, (shown,)

    def hidden(self, text: str) -> str:
        """Return a text without folders."""
        if self._known is None or "/" not in text:
            return text
        return self._known.sub(lambda found: self._names[found[0]], text)


# -- which of pydantic's errors to report --------------------------------------------
# For a value of a union pydantic reports the errors of all members, and only one was meant.

_PLAIN = frozenset(("str", "int", "float", "bool", "bytes", "dict", "list", "none"))
#: Endings of pydantic's types of error for a value of another type altogether.
_OTHER_TYPE = ("_type", "_parsing", "is_instance_of")
#: The fields that tell a union's members apart.
_DISCRIMINATORS = ("type", "role")

Error = Mapping[str, Any]


def wrong_field(error: pydantic.ValidationError, body: Mapping[str, Any]) -> tuple[str, str]:
    """Return the wrong field, with its whole path in the body, and its problem."""
    errors: Sequence[Error] = error.errors(include_url=False)
    found = min(errors, key=lambda one: _distance(one, errors))
    path = [str(part) for part in found["loc"] if not _is_member(part)]
    if path and path[0].isdigit():  # of a message's content, whose parts vLLM reads one by one
        path = [*_content_path(errors, int(path[0]), body), *path]
    message = found["msg"]
    if _discriminates(found):  # no member fits: name the values of all
        same = [one for one in errors if _discriminates(one) and _depth(one) == _depth(found)]
        kinds = dict.fromkeys(str(one["ctx"]["expected"]) for one in same)
        message = f"Input should be {', '.join(kinds)}"
    return ".".join(path), message


def _is_member(part: object) -> bool:
    """Whether a path's part names a union's member, not a field."""
    text = str(part)
    return isinstance(part, str) and (text[:1].isupper() or "[" in text or text in _PLAIN)


def _members(error: Error) -> tuple[str, ...]:
    return tuple(str(part) for part in error["loc"] if _is_member(part))


def _depth(error: Error) -> int:
    return sum(not _is_member(part) for part in error["loc"])


def _discriminates(error: Error) -> bool:
    return error["type"] == "literal_error" and error["loc"][-1] in _DISCRIMINATORS


def _distance(error: Error, errors: Sequence[Error]) -> tuple[bool, int, bool, int, bool]:
    """Return how far an error's member is from the one that was meant.

    Farthest is one of another type of value, then one that fits fewest fields, then one of another
    discriminator.
    """
    members = _members(error)
    around = [one for one in errors if members[: len(_members(one))] == _members(one)]
    other = any(
        _is_member(one["loc"][-1]) and one["type"].endswith(_OTHER_TYPE)
        for one in around
        if one["loc"]
    )
    unlike = any(_discriminates(one) for one in around)
    lacks = [_depth(one) for one in around if _discriminates(one) or one["type"] == "missing"]
    fits = min(lacks, default=_depth(error))
    return other, -fits, unlike, unlike * -_depth(error), unlike and not _discriminates(error)


def _content_path(errors: Sequence[Error], index: int, body: Mapping[str, Any]) -> list[str]:
    """Return the path of the content whose part `index` the errors are about."""
    inputs = [one["input"] for one in errors]
    for number, message in enumerate(body.get("messages") or ()):
        content = message.get("content") if isinstance(message, Mapping) else None
        if isinstance(content, list) and len(content) > index:
            part = content[index]
            values = list(part.values()) if isinstance(part, Mapping) else []
            if any(one in (part, *values) for one in inputs):
                return ["messages", str(number), "content"]
    return []
