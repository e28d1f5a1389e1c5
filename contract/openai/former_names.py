"""Gives the remedy for a field name of earlier releases of vLLM, or of other servers."""

import json
from typing import Any

from contract.openai.body import MESSAGES_URL

#: Key of `structured_outputs` -> an example of its value.
_EXAMPLES: dict[str, Any] = {
    "choice": ["good", "bad"],
    "json": {"type": "object"},
    "regex": "[0-9]+",
    "grammar": 'root ::= "yes" | "no"',
    "json_object": True,
}
#: Former name -> key of `structured_outputs`. The names without `guided_` are those of SGLang, TGI
#: and llama.cpp, or of the fields inside `structured_outputs`.
_STRUCTURED = {
    **{f"guided_{key}": key for key in _EXAMPLES},
    "guided_whitespace_pattern": "json",
    "guided_decoding": "choice",
    "choice": "choice",
    "json": "json",
    "json_schema": "json",
    "regex": "regex",
    "grammar": "grammar",
    "ebnf": "grammar",
}
#: Most characters of a given value that an error repeats.
_SHOWN = 300
_OUTPUT_CONFIG = (
    "is not a field of Anthropic's API; give `output_config` the value "
    '{"format": {"type": "json_schema", "schema": {"type": "object"}}}'
)
#: Other former name -> problem and remedy.
_REMEDIES = {
    "guided_decoding_backend": "is an option of the engine now, --structured-outputs-config; "
    "remove it",
    "extra_body": "is an argument of OpenAI's client; write its fields into the body itself",
}
#: All former names.
FORMER = frozenset((*_STRUCTURED, *_REMEDIES))


def remedy_for_name(name: str, url: str = "", value: object = None) -> str:
    """Return the problem and the remedy for a former or foreign name; '' for another name.

    The remedy has the field's `value` in the form of today if it is short, otherwise an example.
    """
    structured = name in _STRUCTURED or name in ("structured_outputs", "response_format")
    if url == MESSAGES_URL and structured:
        return _OUTPUT_CONFIG
    if name not in _STRUCTURED:
        return _REMEDIES.get(name, "")
    guided = name.startswith("guided_")
    problem = "was renamed in vLLM" if guided else "is not a field of vLLM's requests"
    return f"{problem}; give `structured_outputs` the value {_form(name, value)}"


def _form(name: str, value: object) -> str:
    """Return the JSON of `structured_outputs` that a former field stands for."""
    key = _STRUCTURED[name]
    form = {key: _EXAMPLES[key]}
    if name == "guided_whitespace_pattern":
        form["whitespace_pattern"] = " ?"
    if name.removeprefix("guided_") == key:
        if key == "choice" and isinstance(value, str):
            value = [text.strip() for text in value.split(",")]
        if value and isinstance(value, type(form[key])):
            own = json.dumps({key: value}, ensure_ascii=False)
            if len(own) <= _SHOWN and own.isprintable():
                return own
    return json.dumps(form)
