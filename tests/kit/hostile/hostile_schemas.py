"""Schemas, regexes and grammars of some kilobytes that take a compiler seconds to hours."""

from __future__ import annotations

from typing import Any

import orjson
from kit.hostile.hostile_request import (
    EITHER,
    Body,
    Hostile,
    chain,
    chat,
    completion,
    names,
    nested,
    shaped,
    tool,
    tree,
)

from contract.openai.body import CHAT_URL, COMPLETION_URL, MESSAGES_URL, RESPONSES_URL

#: xgrammar takes about n^2.5 for it: minutes.
WIDE = "^[a-z]{0,50000}$"


def structured(**how: Any) -> Body:
    """Return a chat with vLLM's own field for structured outputs."""
    return chat(structured_outputs=how)


SCHEMAS = (
    Hostile("pattern of 50,000", CHAT_URL, lambda: shaped({"type": "string", "pattern": WIDE})),
    Hostile(
        "pattern of patterns",
        CHAT_URL,
        lambda: shaped({"type": "string", "pattern": "^((a{0,99}){0,99}){0,99}$"}),
    ),
    Hostile(
        "pattern of 3,000",
        CHAT_URL,
        lambda: shaped({"type": "string", "pattern": "^[a-z]{0,3000}$"}),
        EITHER,
    ),
    Hostile(
        "minLength of 100,000",
        CHAT_URL,
        lambda: shaped({"type": "string", "minLength": 100_000, "maxLength": 200_000}),
        EITHER,
    ),
    Hostile(
        "minItems of 100,000",
        CHAT_URL,
        lambda: shaped({"type": "array", "items": {"type": "integer"}, "minItems": 100_000}),
        EITHER,
    ),
    Hostile(
        "minProperties of 100,000",
        CHAT_URL,
        lambda: shaped(
            {
                "type": "object",
                "minProperties": 100_000,
                "additionalProperties": {"type": "integer"},
            }
        ),
        EITHER,
    ),
    Hostile(
        "integers up to 10^300",
        CHAT_URL,
        lambda: orjson.dumps(shaped({"type": "integer", "minimum": 1, "maximum": 2})).replace(
            b'"maximum":2', b'"maximum":' + b"9" * 300
        ),
    ),
    Hostile("enum of 100,000", CHAT_URL, lambda: shaped({"enum": names(100_000)})),
    Hostile("enum of one long text", CHAT_URL, lambda: shaped({"enum": ["x" * 1_000_000]})),
    Hostile("const of 300,000", CHAT_URL, lambda: shaped({"const": "y" * 300_000})),
    Hostile(
        "5,000 properties",
        CHAT_URL,
        lambda: shaped(
            {"type": "object", "properties": {n: {"type": "string"} for n in names(5000)}}
        ),
    ),
    Hostile(
        "300 optional properties",
        CHAT_URL,
        lambda: shaped(
            {
                "type": "object",
                "properties": {n: {"type": "string"} for n in names(300)},
                "additionalProperties": False,
            }
        ),
        EITHER,
    ),
    Hostile(
        "anyOf of 20,000",
        CHAT_URL,
        lambda: shaped({"anyOf": [{"type": "string", "pattern": f"^{n}$"} for n in range(20_000)]}),
    ),
    Hostile(
        "allOf of 5,000",
        CHAT_URL,
        lambda: shaped({"allOf": [{"type": "string", "maxLength": n + 1} for n in range(5000)]}),
    ),
    Hostile("tree of 16,384 objects", CHAT_URL, lambda: shaped(tree(14))),
    Hostile("arrays 150 deep", CHAT_URL, lambda: shaped(nested(150)), EITHER),
    Hostile("$ref to itself", CHAT_URL, lambda: shaped({"$ref": "#"})),
    Hostile(
        "$ref in a ring",
        CHAT_URL,
        lambda: shaped(
            {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}
        ),
    ),
    Hostile("$ref doubled 500 times", CHAT_URL, lambda: shaped(chain(500)), EITHER),
    Hostile("$ref to a file", CHAT_URL, lambda: shaped({"$ref": "file:///etc/passwd"}), EITHER),
    Hostile(
        "a key of patternProperties",
        CHAT_URL,
        lambda: shaped(
            {"type": "object", "patternProperties": {"^(a|b){0,20000}$": {"type": "integer"}}}
        ),
    ),
    Hostile(
        "tool of 100,000 values",
        CHAT_URL,
        lambda: tool(
            {"type": "object", "properties": {"a": {"enum": names(100_000)}}, "required": ["a"]}
        ),
    ),
    Hostile(
        "tool with a pattern",
        CHAT_URL,
        lambda: tool({"type": "object", "properties": {"a": {"type": "string", "pattern": WIDE}}}),
    ),
    Hostile(
        "5,000 tools",
        CHAT_URL,
        lambda: chat(
            tools=[
                {
                    "type": "function",
                    "function": {
                        "name": f"f{n}",
                        "parameters": {"type": "object", "properties": {"a": {"type": "string"}}},
                    },
                }
                for n in range(5000)
            ],
            tool_choice="required",
        ),
        EITHER,
    ),
    Hostile(
        "pattern in a response",
        RESPONSES_URL,
        lambda: {
            "input": "Hello",
            "max_output_tokens": 4,
            "text": {
                "format": {
                    "type": "json_schema",
                    "name": "s",
                    "schema": {"type": "string", "pattern": WIDE},
                }
            },
        },
    ),
    Hostile(
        "enum of a message's tool",
        MESSAGES_URL,
        lambda: {
            "messages": [{"role": "user", "content": "Hello"}],
            "max_tokens": 4,
            "tool_choice": {"type": "any"},
            "tools": [
                {
                    "name": "f",
                    "input_schema": {
                        "type": "object",
                        "properties": {"a": {"enum": names(100_000)}},
                    },
                }
            ],
        },
    ),
    Hostile(
        "pattern of a message's tool",
        MESSAGES_URL,
        lambda: {
            "messages": [{"role": "user", "content": "Hello"}],
            "max_tokens": 4,
            "tool_choice": {"type": "any"},
            "tools": [
                {
                    "name": "f",
                    "input_schema": {
                        "type": "object",
                        "properties": {"a": {"type": "string", "pattern": WIDE}},
                    },
                }
            ],
        },
    ),
)
GRAMMARS = (
    Hostile("regex of 50,000", CHAT_URL, lambda: structured(regex="[a-z]{0,50000}")),
    Hostile("regex of powers", CHAT_URL, lambda: structured(regex="((a{1,100}){1,100}){1,100}")),
    Hostile("regex of 10,000 words", CHAT_URL, lambda: structured(regex="|".join(names(10_000)))),
    Hostile("regex 5,000 deep", CHAT_URL, lambda: structured(regex="(" * 5000 + "a" + ")" * 5000)),
    Hostile(
        "regex of a completion",
        COMPLETION_URL,
        lambda: completion(structured_outputs={"regex": "(a|b|ab){50000}"}),
    ),
    Hostile("choice of 100,000", CHAT_URL, lambda: structured(choice=names(100_000))),
    Hostile("choice of one long text", CHAT_URL, lambda: structured(choice=["x" * 1_000_000])),
    Hostile(
        "grammar of 20,000 rules",
        CHAT_URL,
        lambda: structured(
            grammar="root ::= r0\n"
            + "\n".join(f'r{n} ::= "a" r{n + 1} | "b"' for n in range(20_000))
            + '\nr20000 ::= "c"'
        ),
    ),
    Hostile(
        "grammar that repeats",
        CHAT_URL,
        lambda: structured(grammar='root ::= ("a" | "b"){1,50000}'),
    ),
    Hostile(
        "grammar that refers to itself",
        CHAT_URL,
        lambda: structured(grammar="root ::= root root | root"),
        EITHER,
    ),
    Hostile("grammar that is none", CHAT_URL, lambda: structured(grammar="root ::= ((((")),
    Hostile(
        "structural tags",
        CHAT_URL,
        lambda: structured(
            structural_tag=orjson.dumps(
                {
                    "type": "structural_tag",
                    "structures": [
                        {
                            "begin": f"<f{n}>",
                            "schema": {"type": "string", "pattern": "^[a-z]{0,900}$"},
                            "end": f"</f{n}>",
                        }
                        for n in range(300)
                    ],
                    "triggers": ["<f"],
                }
            ).decode()
        ),
    ),
    Hostile(
        "structural tag with a pattern",
        CHAT_URL,
        lambda: chat(
            response_format={
                "type": "structural_tag",
                "structures": [
                    {"begin": "<f>", "schema": {"type": "string", "pattern": WIDE}, "end": "</f>"}
                ],
                "triggers": ["<f"],
            }
        ),
    ),
    Hostile(
        "schema of vLLM's own field",
        CHAT_URL,
        lambda: structured(json={"type": "string", "pattern": WIDE}),
    ),
    Hostile(
        "schema as text",
        CHAT_URL,
        lambda: structured(json=orjson.dumps({"enum": names(100_000)}).decode()),
    ),
)
