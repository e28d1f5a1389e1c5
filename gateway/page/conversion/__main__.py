"""Reads options from stdin, converts the file, and writes frames (running.py) to stdout.

The program runs in a folder in which the file has the user's name for it, which messages then show.
"""

from __future__ import annotations

import os
import resource
import sys
from typing import Any

import orjson

from contract.errors import WarmqError
from gateway.page.conversion.lines import convert_lines, url_of
from gateway.page.conversion.running import (
    COLUMNS,
    CPU_S,
    END,
    ERROR,
    LINE,
    MEMORY_BYTES,
    MOST_PROBLEMS,
    PROBLEM,
)
from producer.input.reader import FilePlace
from producer.input.source import open_source
from producer.input.tables.mapping import PROMPT_EXAMPLE
from producer.input.tables.source import columns_of, kind_of, other_delimiter

#: The page's text in place of PROMPT_EXAMPLE, which has the command's syntax.
_PROMPT_EXAMPLE = "write one in the field User message, for example Summarise: {text}"


def _write(kind: bytes, content: bytes = b"") -> None:
    sys.stdout.buffer.write(kind + content + b"\n")


def _convert(options: dict[str, Any]) -> None:
    name, changed, problems, last = options["name"], False, 0, 0
    delimiter = _delimiter(name, options["pairs"])
    _write(COLUMNS, orjson.dumps(list(columns_of(FilePlace(name), delimiter))))
    source = open_source(name, options["pairs"], delimiter=delimiter)
    url = url_of(getattr(source, "fields", ()))
    for chunk in source.chunks(None, options["longest"]):
        for number, line, problem, is_new in convert_lines(chunk, options["overrides"], url):
            for _ in range(last + 1, number):  # blank lines, so that lines keep their numbers
                _write(LINE)
            last, changed = number, changed or is_new
            if problem:
                _write(PROBLEM, orjson.dumps([number, problem]))
                problems += 1
            else:
                _write(LINE, line)
        if problems >= MOST_PROBLEMS:
            break
    _write(END, orjson.dumps(changed))


def _delimiter(name: str, pairs: dict[str, str]) -> str:
    """Return a CSV file's delimiter if it is not the usual one of its ending; else ''."""
    if kind_of(name) not in (".csv", ".tsv"):
        return ""
    columns = columns_of(FilePlace(name))
    if any(columns[0] in template for template in pairs.values()):
        return ""
    return other_delimiter(columns)


def main() -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.nice(10)
    options = orjson.loads(sys.stdin.buffer.read())
    os.chdir(options["folder"])
    try:
        _convert(options)
    except WarmqError as error:
        message = error.message.replace(PROMPT_EXAMPLE, _PROMPT_EXAMPLE)
        _write(ERROR, orjson.dumps(message))
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
