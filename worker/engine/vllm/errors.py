"""Whose mistake an error of vLLM's is, and its words as the author of a request may read them."""

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
#: errors, and the others as long as it still raises them itself.
CLIENT_ERRORS = (
    VLLMClientError, VLLMValidationError, pydantic.ValidationError, ValueError, TypeError,
    OverflowError, NotImplementedError, TemplateError,
)  # fmt: skip
#: What its code raises for a request that it cannot take, and again each time.
REFUSALS = (LookupError, AttributeError, AssertionError, ArithmeticError, RecursionError)
#: Parameters that vLLM names when a prompt does not fit.
LENGTH_PARAMETERS = {"input_tokens", "input_text", "max_tokens", "max_completion_tokens"}
#: Modules that read what a request brought: whatever they raise, a picture, an audio or a video
#: file, or its URL, is the cause.
_READ_MEDIA = ("/vllm/multimodal/media/", "/vllm/multimodal/video", "/vllm/multimodal/image",
               "/vllm/multimodal/audio")  # fmt: skip
#: Where the code of this package is.
_OURS = f"{Path(__file__).parents[2]}{os.sep}"
#: But a network or this machine causes these; the same request may succeed later.
_PASSES = (OSError, TimeoutError, MemoryError, ImportError, WarmqError)


class Aborted(Exception):
    """The engine gave a request up, as it does when it is told to end."""


def rejected(error: Exception, body: Mapping[str, Any]) -> RequestRejected:
    """Return the error of a request's line, in vLLM's words; `body` is the request's."""
    if isinstance(error, pydantic.ValidationError):
        field, problem = told(error, body)
        return RequestRejected(f"field body.{field}: {problem}", field=f"body.{field}")
    parameter = getattr(error, "parameter", None)
    too_long = parameter in LENGTH_PARAMETERS or "context length" in str(error)
    code = "context_length_exceeded" if too_long else "invalid_request"
    # Where an object lies in memory is of use to an attacker only; vLLM's server hides it, too.
    message = re.sub(r" at 0x[0-9a-f]+>", ">", str(error))
    if isinstance(error, REFUSALS):  # they say little without their names
        message = f"vLLM cannot take this request: {type(error).__name__}: {message}"
    return RequestRejected(message or type(error).__name__, code=code, field=parameter)


def in_media(error: BaseException) -> bool:
    """Say whether an error arose where vLLM reads a request's media, and the media are wrong."""
    if isinstance(error, _PASSES) or type(error).__module__.partition(".")[0] == "aiohttp":
        return False
    return any(part in name for name in _files(error) for part in _READ_MEDIA)


def is_ours(error: BaseException) -> bool:
    """Say whether an error arose in this package's own code: then it is nobody's mistake."""
    *_, innermost = "", *_files(error)
    return innermost.startswith(_OURS)


def _files(error: BaseException) -> Iterator[str]:
    trace = error.__traceback__
    while trace is not None:
        yield trace.tb_frame.f_code.co_filename
        trace = trace.tb_next


def failed(error: Exception, body: Mapping[str, Any]) -> WarmqError:
    """Return what an error that vLLM does not explain is to the line of a request's body."""
    if type(error).__name__ == "GenerationError":
        return ended_in_error(body)
    return RequestFailed(f"{type(error).__name__}: {error}")


def ended_in_error(body: Mapping[str, Any]) -> WarmqError:
    """Return the error of an answer with the finish_reason `error`: vLLM gives it to what follows
    no constraint, and tells why in its log only. Without one, a retry may help."""
    form, chosen = body.get("response_format"), body.get("tool_choice")
    asked = body.get("structured_outputs") or chosen == "required" or isinstance(chosen, dict)
    if asked or (isinstance(form, dict) and form.get("type") != "text"):
        return RequestRejected(
            "vLLM ended this answer with finish_reason error: no text of this model follows the "
            "schema, regex, choice, grammar or tools that the request names; its log says why"
        )
    return RequestFailed("GenerationError: Internal server error")


class Folders:
    """Takes folders of this machine out of messages: a model is called by its name."""

    def __init__(self, models: Iterable[tuple[str, str]]) -> None:
        """Take folders, or names on a hub, each with what it is served as."""
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


# -- which of pydantic's errors tells what is wrong ----------------------------------
# Where a value may have several forms, pydantic gives the errors of all forms, and only one of them
# was meant.

_PLAIN = frozenset(("str", "int", "float", "bool", "bytes", "dict", "list", "none"))
#: What pydantic says of a value that is no list, no text, or of another class altogether.
_OTHER_FORM = ("_type", "_parsing", "is_instance_of")
#: The fields by which a form is told.
_TELLS = ("type", "role")

Error = Mapping[str, Any]


def told(error: pydantic.ValidationError, body: Mapping[str, Any]) -> tuple[str, str]:
    """Return the field that is wrong, with its whole path in the body, and what is wrong with it.

    Args:
        error: as one of vLLM's forms raised it.
        body: the request's.
    """
    errors: Sequence[Error] = error.errors(include_url=False)
    found = min(errors, key=lambda one: _off(one, errors))
    path = [str(part) for part in found["loc"] if not _is_form(part)]
    if path and path[0].isdigit():  # of a message's content, whose parts vLLM reads one by one
        path = [*_where(errors, int(path[0]), body), *path]
    message = found["msg"]
    if _tells_form(found):  # of no form: all that there are
        same = [one for one in errors if _tells_form(one) and _depth(one) == _depth(found)]
        kinds = dict.fromkeys(str(one["ctx"]["expected"]) for one in same)
        message = f"Input should be {', '.join(kinds)}"
    return ".".join(path), message


def _is_form(part: object) -> bool:
    """Whether a part of a path names one of several forms, and no field or index."""
    text = str(part)
    return isinstance(part, str) and (text[:1].isupper() or "[" in text or text in _PLAIN)


def _forms(error: Error) -> tuple[str, ...]:
    return tuple(str(part) for part in error["loc"] if _is_form(part))


def _depth(error: Error) -> int:
    return sum(not _is_form(part) for part in error["loc"])


def _tells_form(error: Error) -> bool:
    return error["type"] == "literal_error" and error["loc"][-1] in _TELLS


def _off(error: Error, errors: Sequence[Error]) -> tuple[bool, int, bool, int, bool]:
    """Return how far the form of an error is from the one that was meant: one of another type of
    value, one that ends to fit early, one of another kind."""
    forms = _forms(error)
    around = [one for one in errors if forms[: len(_forms(one))] == _forms(one)]
    other = any(
        _is_form(one["loc"][-1]) and one["type"].endswith(_OTHER_FORM)
        for one in around
        if one["loc"]
    )
    unlike = any(_tells_form(one) for one in around)
    lacks = [_depth(one) for one in around if _tells_form(one) or one["type"] == "missing"]
    fits = min(lacks, default=_depth(error))
    return other, -fits, unlike, unlike * -_depth(error), unlike and not _tells_form(error)


def _where(errors: Sequence[Error], index: int, body: Mapping[str, Any]) -> list[str]:
    """Return the path to the content that has the part of an index which some errors are about."""
    inputs = [one["input"] for one in errors]
    for number, message in enumerate(body.get("messages") or ()):
        content = message.get("content") if isinstance(message, Mapping) else None
        if isinstance(content, list) and len(content) > index:
            part = content[index]
            values = list(part.values()) if isinstance(part, Mapping) else []
            if any(one in (part, *values) for one in inputs):
                return ["messages", str(number), "content"]
    return []
