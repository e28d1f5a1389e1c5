"""Defines the columns of an output table, and makes its rows from results.

The table has the kept columns of the input, a column for each property of the answers' JSON schema,
and columns about the result.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from contract.batch import Batch
from contract.openai.structured import answer_schema
from contract.results import ResultLine
from producer.collect.answers import finish_reason_of, text_of, tokens_of
from producer.input.tables.output_types import InputColumns, text_of_json

#: Columns before and after the properties. `text` is the first choice's text, `response` the
#: engine's answer as JSON.
_FIRST = ("custom_id", "line", "status")
_LAST = (
    "text", "finish_reason", "prompt_tokens", "completion_tokens", "error_code", "error_message",
    "response", "id",
)  # fmt: skip
#: Columns with few different texts, which parquet stores in a dictionary.
REPEATED = ("status", "finish_reason", "error_code")
#: Columns of integers.
NUMBERS = ("line", "prompt_tokens", "completion_tokens")
#: Name of the column with the result's id if a kept column is called `id`, as in most tables.
_OTHER_ID = "result_id"
#: Error codes that are also the status of a row.
_ENDED = ("cancelled", "expired")


class OutputColumns:
    """The columns of one batch's output table.

    `columns` is the batch's field `kept_columns`, `overrides` are the body fields of all requests.
    If an earlier column of the output has the same name, a column of the input is called
    `input_<name>`, and a property `answer_<name>`. `renamed` maps such names to the new ones.
    """

    def __init__(self, columns: str = "", overrides: Mapping[str, Any] | None = None) -> None:
        self.input = InputColumns.load(columns)
        self.renamed: dict[str, str] = {}
        self._id = _OTHER_ID if "id" in self.input.keep else "id"
        taken = {*_FIRST, *_LAST[:-1], self._id}
        #: Name in the output of each kept column.
        self.kept = {name: self._free_name(name, "input_", taken) for name in self.input.keep}
        schema = answer_schema(overrides or {}) or {}
        properties = schema.get("properties")
        #: Name in the output, and JSON type, of each property.
        self.properties = {
            name: (self._free_name(name, "answer_", taken), property_type(kind))
            for name, kind in (properties if isinstance(properties, dict) else {}).items()
        }
        self.names = [
            *self.kept.values(), *_FIRST, *(name for name, _ in self.properties.values()),
            *_LAST[:-1], self._id,
        ]  # fmt: skip

    @classmethod
    def of(cls, batch: Batch) -> OutputColumns:
        """Return the columns of a batch's results."""
        options = orjson.loads(batch.fields.get("options") or "{}")
        return cls(batch.fields.get("kept_columns", ""), options.get("set") or {})

    def _free_name(self, name: str, prefix: str, taken: set[str]) -> str:
        """Return a name that is not taken, with the prefix if needed; note it."""
        free = name
        while free in taken:
            free = prefix + free
        if free != name:
            self.renamed[name] = free
        taken.add(free)
        return free

    def row(self, line: ResultLine) -> dict[str, Any]:
        """Return the row of a result; kept cells have the types of JSON."""
        result = orjson.loads(line.json)
        row = dict.fromkeys(self.names)
        row |= {"custom_id": result["custom_id"], "status": "completed", self._id: result["id"]}
        kept = result.get("kept") or {}
        row |= {new: kept.get(name) for name, new in self.kept.items()}
        if error := result["error"]:
            code = error.get("code")
            status = code if code in _ENDED else "failed"
            message = error.get("message")
            return row | {"line": error["line"], "status": status, "error_code": code,
                          "error_message": message}  # fmt: skip
        body = result["response"]["body"]
        row |= {"line": result["warmq"]["line"], "response": orjson.dumps(body).decode()}
        if isinstance(body, dict):
            row["text"], row["finish_reason"] = text_of(body), finish_reason_of(body)
            row["prompt_tokens"], row["completion_tokens"] = tokens_of(body)
            row |= self._property_cells(row["text"])
        return row

    def _property_cells(self, text: str | None) -> dict[str, Any]:
        """Return the cells of the properties; none for an answer that is not the schema's JSON."""
        if not self.properties or text is None:
            return {}
        try:
            answer = orjson.loads(text)
        except orjson.JSONDecodeError:  # for example, the answer was cut off
            return {}
        if not isinstance(answer, dict):
            return {}
        return {
            new: property_value(kind, answer.get(name))
            for name, (new, kind) in self.properties.items()
        }


def property_type(schema: object) -> str:
    """Return `integer`, `number` or `boolean` for a property of that type; otherwise `string`."""
    kinds = schema.get("type") if isinstance(schema, dict) else None
    kinds = [kind for kind in kinds if kind != "null"] if isinstance(kinds, list) else [kinds]
    return str(kinds[0]) if kinds in (["integer"], ["number"], ["boolean"]) else "string"


def property_value(kind: str, value: Any) -> Any:
    """Return a property's value as its column has it; None for a value of another type."""
    if value is None:
        return None
    if kind == "string":
        return text_of_json(value)
    if kind == "boolean":
        return value if isinstance(value, bool) else None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if kind == "number":
        return float(value)
    return int(value) if value == int(value) and abs(value) < 2**63 else None
