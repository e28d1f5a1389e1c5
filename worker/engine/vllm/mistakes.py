"""Whose mistake an error of vLLM's is, and its words as a client may read them."""

import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from contract.errors import RequestFailed, RequestRejected, WarmqError

#: Modules that read what a request brought: whatever they raise, a picture, an audio or a video
#: file, or its URL, is the cause.
_READ_MEDIA = ("/vllm/multimodal/media/", "/vllm/multimodal/video", "/vllm/multimodal/image",
               "/vllm/multimodal/audio")  # fmt: skip
#: Where the code of this package is.
_OURS = f"{Path(__file__).parents[2]}{os.sep}"
#: But a network or this machine causes these; the same request may succeed later.
_PASSES = (OSError, TimeoutError, MemoryError, ImportError, WarmqError)


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
