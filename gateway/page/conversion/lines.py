"""Converts one line in the short form to a line of OpenAI's Batch API."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from contract.errors import RequestRejected
from contract.openai.body import CHAT_URL, COMPLETION_URL
from contract.openai.decode import decode, encode
from contract.openai.lines import infer_url, parse_line, refuse_second_content
from contract.openai.pooling import EMBEDDINGS_URL
from gateway.batches.runner.row_errors import line_of_error
from producer.input.reader import RawChunk
from producer.submit.lines import in_line

_FIELDS = frozenset(("method", "url", "body"))
#: Field with a request's content -> its url.
_URLS = {"messages": CHAT_URL, "prompt": COMPLETION_URL, "input": EMBEDDINGS_URL}


def batch_line(raw: bytes, number: int, overrides: dict[str, Any]) -> bytes:
    """Return a line with url, body and custom_id; raise RequestRejected if it is no request.

    A line without a custom_id gets `line-<number>`, as at `producer submit`. `overrides` replace
    fields of the body, which is not checked.
    """
    value = decode(raw)
    if not isinstance(value, dict):
        raise RequestRejected("not a JSON object; write {...} on each line", code="invalid_json")
    if not value.keys().isdisjoint(_FIELDS):
        body = value.get("body")
        if not overrides and value.get("custom_id") is not None:
            return raw.strip()
        if isinstance(body, dict):
            refuse_second_content(body, overrides, "body.")
        new = value | {"body": body | overrides} if isinstance(body, dict) else value
    else:
        refuse_second_content(value, overrides, "")
        body = {name: value[name] for name in value if name != "custom_id"} | overrides
        new = {"method": "POST", "url": infer_url(body), "body": body}
    custom_id = value.get("custom_id")
    return encode(new | {"custom_id": f"line-{number}" if custom_id is None else custom_id})


def url_of(fields: Collection[str]) -> str:
    """Return the url of a table's requests, whose fields come from columns; '' if rows name it."""
    if not _FIELDS.isdisjoint(fields):
        return ""
    return next((url for name, url in _URLS.items() if name in fields), "")


def _bad_row(raw: bytes, number: int, url: str) -> bytes:
    """Return the line of a row that is no request, so that it fails alone."""
    custom_id = decode(raw)[2] or f"line-{number}"
    return encode({"custom_id": custom_id, "method": "POST", "url": url})


def convert_lines(
    chunk: RawChunk, overrides: dict[str, Any], url: str = ""
) -> Iterator[tuple[int, bytes, str, bool]]:
    """Yield number, line, problem and whether the line has changed, for a chunk's lines.

    A line with a problem is empty. A wrong body, or a bad row of a table whose requests have this
    url, becomes a line that carries its error: the batch runner refuses only that request.
    """
    explain = chunk.explain or in_line
    for number, raw in chunk.lines:
        if number in chunk.too_long:
            size = chunk.too_long[number]
            yield number, b"", f"line {number}: it has {size} bytes; shorten it", True
            continue
        try:
            is_row = bool(url) and raw.startswith(b"[")
            line = _bad_row(raw, number, url) if is_row else batch_line(raw, number, overrides)
        except RequestRejected as error:
            yield number, b"", explain(number, raw, error).message, True
            continue
        is_new = line != raw.strip()
        if is_new:
            try:
                parse_line(raw, overrides)
            except RequestRejected as error:
                line = line_of_error(line, overrides, explain(number, raw, error))
        yield number, line, "", is_new
