"""One request's result, as a program reads it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import orjson

from contract.results import ResultLine
from producer.collect.answers import text_of


@dataclass(frozen=True, slots=True)
class ResultError:
    """Why a request has no response. docs/architecture.md lists the codes."""

    code: str
    message: str
    param: str | None = None


class Result:
    """One request of a batch and what became of it. It is decoded when it is looked at."""

    def __init__(self, line: ResultLine) -> None:
        self._line = line

    @property
    def json(self) -> bytes:
        """OpenAI's batch output line, without a line end."""
        return self._line.json

    @property
    def ok(self) -> bool:
        """Whether there is a response."""
        return not self._line.failed

    @cached_property
    def _decoded(self) -> dict[str, Any]:
        decoded: dict[str, Any] = orjson.loads(self._line.json)
        return decoded

    @property
    def custom_id(self) -> str:
        """The request's own custom_id, or `line-7` for the seventh if it has none."""
        return str(self._decoded["custom_id"])

    @property
    def line(self) -> int:
        """Which line, row or request of the input it was, from 1."""
        told = self._decoded["error"] or self._decoded["warmq"]
        return int(told["line"])

    @property
    def body(self) -> dict[str, Any] | None:
        """The engine's response, as OpenAI's API would give it; None for a failed request."""
        response = self._decoded["response"]
        return response["body"] if response else None

    @property
    def error(self) -> ResultError | None:
        """What went wrong; None for a response."""
        told = self._decoded["error"]
        if not told:
            return None
        return ResultError(told["code"], told["message"], told.get("param"))

    @property
    def text(self) -> str | None:
        """The text of the first choice, of a response or message; None if there is none, as for
        embeddings and failed requests."""
        return text_of(self.body or {})

    def __repr__(self) -> str:
        what = f"text={self.text!r}" if self.ok else f"error={self.error!r}"
        return f"Result(custom_id={self.custom_id!r}, {what})"
