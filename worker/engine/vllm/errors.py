"""Turns vLLM's exceptions into the errors that the author of a request gets."""

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

#: Errors that vLLM's server answers with 400 (entrypoints/serve/exception_handling): its own class,
#: and other classes that vLLM still raises for bad requests.
CLIENT_ERRORS = (
    VLLMClientError, VLLMValidationError, pydantic.ValidationError, ValueError, TypeError,
    OverflowError, NotImplementedError, TemplateError,
)  # fmt: skip
#: Errors that vLLM's code raises, at every try, for a request that it cannot handle.
REFUSALS = (LookupError, AttributeError, AssertionError, ArithmeticError, RecursionError)
#: Parameters that vLLM names in the error for a prompt that is too long.
LENGTH_PARAMETERS = {"input_tokens", "input_text", "max_tokens", "max_completion_tokens"}
#: Parts of the paths of vLLM's modules that read images, audio and video, or fetch their URLs.
_READ_MEDIA = ("/vllm/multimodal/media/", "/vllm/multimodal/video", "/vllm/multimodal/image",
               "/vllm/multimodal/audio")  # fmt: skip
#: Errors in those modules that are caused by the network or this machine, so that a retry may help.
_TEMPORARY = (OSError, TimeoutError, MemoryError, ImportError, WarmqError)
#: The folder of the package `worker/engine`.
_OURS = f"{Path(__file__).parents[2]}{os.sep}"


class Aborted(Exception):
    """The engine aborted a request, as it does after SIGTERM."""


def rejected(error: Exception, body: Mapping[str, Any]) -> RequestRejected:
    """Return the error for a request that vLLM refuses, with vLLM's error text."""
    if isinstance(error, pydantic.ValidationError):
        field, problem = wrong_field(error, body)
        return RequestRejected(f"field body.{field}: {problem}", field=f"body.{field}")
    parameter = getattr(error, "parameter", None)
    too_long = parameter in LENGTH_PARAMETERS or "context length" in str(error)
    code = "context_length_exceeded" if too_long else "invalid_request"
    # An object's address helps only an attacker; vLLM's server removes it, too.
    message = re.sub(r" at 0x[0-9a-f]+>", ">", str(error))
    if isinstance(error, REFUSALS):  # these texts need their class to be understood
        message = f"vLLM cannot take this request: {type(error).__name__}: {message}"
    return RequestRejected(message or type(error).__name__, code=code, field=parameter)


def in_media(error: BaseException) -> bool:
    """Whether an image, audio or video of the request caused the error."""
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
    """Return the error for a failure that vLLM does not explain."""
    if type(error).__name__ == "GenerationError":
        return ended_in_error(body)
    return RequestFailed(f"{type(error).__name__}: {error}")


def ended_in_error(body: Mapping[str, Any]) -> WarmqError:
    """Return the error for an answer with finish_reason `error`.

    vLLM sends it if no text fulfils the request's schema, regex, choice or grammar, and logs the
    reason. For a request without such a constraint a retry may help.
    """
    response_format, tool_choice = body.get("response_format"), body.get("tool_choice")
    is_constrained = (
        body.get("structured_outputs") or tool_choice == "required" or isinstance(tool_choice, dict)
    )
    if is_constrained or (
        isinstance(response_format, dict) and response_format.get("type") != "text"
    ):
        return RequestRejected(
            "vLLM ended this answer with finish_reason error: no text of this model follows the "
            "schema, regex, choice, grammar or tools that the request names; its log has the reason"
        )
    return RequestFailed("GenerationError: Internal server error")


class Folders:
    """Replaces the paths of this machine's folders in error texts.

    `models` has a pair for each model or adapter: its folder or hub name, and its served name.
    """

    def __init__(self, models: Iterable[tuple[str, str]]) -> None:
        names = {}
        for folder, name in models:
            shown = Path(name).name if name == folder else name
            path = Path(folder)
            for spelling in (folder, str(path), str(path.absolute()), str(path.resolve())):
                names[spelling.rstrip("/")] = shown
        for own_folder in (Path.cwd(), Path(sys.prefix), Path(sys.base_prefix), Path.home()):
            names.setdefault(str(own_folder).rstrip("/"), "…")
        # Short names such as "." or "tiny" are kept: they are also common words.
        long_names = sorted((name for name in names if "/" in name and len(name) > 3), key=len)
        self._names = names
        longest_first = "|".join(re.escape(name) for name in reversed(long_names))
        self._known = (
            re.compile(rf"(?<![\w./-])(?:{longest_first})(?![\w-])") if long_names else None
        )

    def hide(self, error: WarmqError) -> None:
        """Replace the folders in an error's message."""
        shown = self.hidden(error.message)
        if shown != error.message:
            error.message, error.args = shown, (shown,)

    def hidden(self, text: str) -> str:
        """Return a text with its folders replaced."""
        if self._known is None or "/" not in text:
            return text
        return self._known.sub(lambda match: self._names[match[0]], text)


# -- which of pydantic's errors to report --------------------------------------------
# For a value of a union type, pydantic reports the errors of all member types. The client meant
# only one of them.

#: Names of plain types in the path of an error.
_PLAIN = frozenset(("str", "int", "float", "bool", "bytes", "dict", "list", "none"))
#: Ends of pydantic's error types for a value of the wrong type.
_OTHER_TYPE = ("_type", "_parsing", "is_instance_of")
#: Fields whose value distinguishes the member types of a union.
_DISCRIMINATORS = ("type", "role")

#: An error of pydantic, from `ValidationError.errors()`.
Error = Mapping[str, Any]


def wrong_field(error: pydantic.ValidationError, body: Mapping[str, Any]) -> tuple[str, str]:
    """Return the path of the wrong field in the body, and its problem."""
    errors: Sequence[Error] = error.errors(include_url=False)
    nearest = min(errors, key=lambda one: _distance(one, errors))
    path = [str(part) for part in nearest["loc"] if not _is_member(part)]
    if path and path[0].isdigit():  # vLLM reads a message's content parts one by one
        path = [*_content_path(errors, int(path[0]), body), *path]
    message = nearest["msg"]
    if _discriminates(nearest):  # no member type fits: list the values of all
        alike = [one for one in errors if _discriminates(one) and _depth(one) == _depth(nearest)]
        expected = dict.fromkeys(str(one["ctx"]["expected"]) for one in alike)
        message = f"Input should be {', '.join(expected)}"
    return ".".join(path), message


def _is_member(part: object) -> bool:
    """Whether a part of an error's path names a member type, not a field."""
    text = str(part)
    return isinstance(part, str) and (text[:1].isupper() or "[" in text or text in _PLAIN)


def _members(error: Error) -> tuple[str, ...]:
    return tuple(str(part) for part in error["loc"] if _is_member(part))


def _depth(error: Error) -> int:
    return sum(not _is_member(part) for part in error["loc"])


def _discriminates(error: Error) -> bool:
    return error["type"] == "literal_error" and error["loc"][-1] in _DISCRIMINATORS


def _distance(error: Error, errors: Sequence[Error]) -> tuple[bool, int, bool, int, bool]:
    """Return how far an error's member type is from the type that the client meant.

    The farthest member types expect another type of value. Nearer are those with few fitting
    fields, and then those with another value of a discriminating field.
    """
    members = _members(error)
    of_member = [one for one in errors if members[: len(_members(one))] == _members(one)]
    expects_other_type = any(
        _is_member(one["loc"][-1]) and one["type"].endswith(_OTHER_TYPE)
        for one in of_member
        if one["loc"]
    )
    has_other_value = any(_discriminates(one) for one in of_member)
    depths = [_depth(one) for one in of_member if _discriminates(one) or one["type"] == "missing"]
    fits = min(depths, default=_depth(error))
    return (
        expects_other_type,
        -fits,
        has_other_value,
        has_other_value * -_depth(error),
        has_other_value and not _discriminates(error),
    )


def _content_path(errors: Sequence[Error], index: int, body: Mapping[str, Any]) -> list[str]:
    """Return the path of the message content whose part `index` the errors are about."""
    inputs = [one["input"] for one in errors]
    for number, message in enumerate(body.get("messages") or ()):
        content = message.get("content") if isinstance(message, Mapping) else None
        if isinstance(content, list) and len(content) > index:
            part = content[index]
            values = list(part.values()) if isinstance(part, Mapping) else []
            if any(one in (part, *values) for one in inputs):
                return ["messages", str(number), "content"]
    return []
