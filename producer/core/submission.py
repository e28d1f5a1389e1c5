"""What `submit` takes besides the file, checked before anything is read."""

from __future__ import annotations

import difflib
import hashlib
import re
from dataclasses import dataclass, field
from typing import Any

import orjson

from contract.errors import RequestRejected, WarmqError
from contract.openai.body import BODY_TYPES, field_names, smallest
from contract.openai.lines import check_body

#: Part of every digest; a change of chunk boundaries or of the message's form changes it.
_FORMAT = 2
_BATCH_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


class BadOption(WarmqError):
    """An option of the command line is wrong; the message says what it takes."""

    code = "bad_option"


def parse_overrides(pairs: tuple[str, ...]) -> dict[str, Any]:
    """Return the body fields of `--set name=value` options.

    A value is JSON where it parses and fits, else the text as it stands.

    Raises:
        BadOption: for a name or value that no request body can have.
    """
    overrides: dict[str, Any] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals:
            raise BadOption(f"--set {pair}: write name=value, for example max_tokens=256")
        overrides[name] = _override(name, text)
    return overrides


def _override(name: str, text: str) -> Any:
    urls = [url for url in BODY_TYPES if name in field_names(url)]
    if not urls:
        known = sorted(set().union(*(field_names(url) for url in BODY_TYPES)))
        near = difflib.get_close_matches(name, known, 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise BadOption(f"--set {name}: unknown to any of {', '.join(BODY_TYPES)}{hint}")
    try:
        values = [orjson.loads(text), text]
    except orjson.JSONDecodeError:
        values = [text]
    problem: RequestRejected | None = None
    for value in values:
        for url in urls:
            try:
                check_body(url, smallest(url) | {name: value}, "")
            except RequestRejected as error:
                problem = problem or error
            else:
                return value
    raise BadOption(f"--set {problem.message if problem else name}")


@dataclass(frozen=True, slots=True)
class Submission:
    """Everything besides the file that shapes a batch's messages."""

    batch_id: str
    queue: str
    priority: int
    model: str = ""
    overrides: dict[str, Any] = field(default_factory=dict)
    deadline: str = ""  # as producer/cli/deadline.py returns it

    def check(self) -> None:
        """Raise BadOption for names that cannot be part of a Redis key."""
        if not _BATCH_ID.fullmatch(self.batch_id):
            raise BadOption(
                f"--batch-id {self.batch_id[:140]!r}: use 1 to 128 letters, digits, `.`, `_` or "
                "`-`, beginning with a letter or digit"
            )
        if _CONTROL.search(self.queue):
            raise BadOption(f"--model {self.model!r}: control characters are not allowed")

    @property
    def options(self) -> str:
        """The options as JSON; equal for equal messages."""
        shaping = {"queue": self.queue, "priority": self.priority, "set": self.overrides}
        if self.deadline:  # without one the digest stays what it was before there were deadlines
            shaping["deadline"] = self.deadline
        return orjson.dumps(shaping, option=orjson.OPT_SORT_KEYS).decode()

    @property
    def seed(self) -> str:
        """The digest (hex) that the first chunk follows."""
        return hashlib.sha256(b"warmq %d\n" % _FORMAT + self.options.encode()).hexdigest()
