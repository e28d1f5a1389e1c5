"""Joins what comes of a field in pieces: texts, lists of content, objects, tool calls.

However a server cuts its answer, what is joined is the same: neighbours of a type are one.
"""

from operator import itemgetter
from typing import Any

Json = dict[str, Any]

#: Fields of an object in pieces whose text goes on where the piece before ended. Others (ids,
#: names, signatures) are said anew or not at all.
TEXTS = frozenset(
    ("text", "thinking", "reasoning", "content", "refusal", "summary", "arguments", "input",
     "transcript", "data")
)  # fmt: skip


def joined(pieces: list[Any]) -> Any:
    """Return what the pieces of a message's field are together."""
    try:
        return "".join(pieces)
    except TypeError:  # not all are text
        return _field("text", pieces)


def merged(pieces: list[Json]) -> Json:
    """Return what the pieces of one object are together."""
    names = dict.fromkeys(name for piece in pieces for name in piece)
    return {
        name: _field(name, [p[name] for p in pieces if p.get(name) is not None]) for name in names
    }


def _field(name: str, values: list[Any]) -> Any:
    if any(isinstance(value, list) for value in values):
        return _parts(values)
    if values and all(isinstance(value, dict) for value in values):
        return merged(values)
    if name in TEXTS and all(isinstance(value, str) for value in values):
        return "".join(values) if values else None
    return next((value for value in reversed(values) if value), values[-1] if values else None)


def _parts(values: list[Any]) -> list[Any]:
    """Join lists; a text among them is a part as others are."""
    flat: list[Any] = []
    for value in values:
        if isinstance(value, list):
            flat += value
        elif value:
            flat.append({"type": "text", "text": value} if isinstance(value, str) else value)
    groups: list[list[Any]] = []
    known: Json = {}
    for part in flat:
        if not isinstance(part, dict):
            groups.append([part])
            known = {}
            continue
        facts = {k: v for k, v in part.items() if k not in TEXTS and v is not None}
        if _goes_on(known, facts):
            groups[-1].append(part)
            known |= facts
        else:
            groups.append([part])
            known = facts if TEXTS.intersection(part) else {}
    return [merged(group) if isinstance(group[0], dict) else group[0] for group in groups]


def _goes_on(known: Json, facts: Json) -> bool:
    """Whether a part with these facts goes on with the text of the parts before it."""
    same_type = isinstance(known.get("type"), str) and known["type"] == facts.get("type")
    return same_type and all(known.get(name, value) == value for name, value in facts.items())


def tool_calls(parts: list[Json]) -> list[Json]:
    """Return the calls; a part belongs to the latest call of its index.

    Servers that number nothing, or everything 0, begin another call with another id and a name.
    """
    calls: list[tuple[int, list[Json]]] = []
    latest: dict[int, list[Json]] = {}
    for part in parts:
        index = part.get("index")
        if not isinstance(index, int):
            index = calls[-1][0] if calls else 0
        pieces = latest.get(index)
        if pieces is None or _another(pieces[0], part):
            pieces = latest[index] = []
            calls.append((index, pieces))
        pieces.append(part)
    return [_call(pieces) for _, pieces in sorted(calls, key=itemgetter(0))]


def _another(first: Json, part: Json) -> bool:
    named = bool((part.get("function") or {}).get("name"))
    return named and bool(part.get("id")) and part["id"] != first.get("id")


def _call(pieces: list[Json]) -> Json:
    call = merged(pieces)
    call.pop("index", None)
    if isinstance(function := call.get("function"), dict):
        function["arguments"] = function.get("arguments") or ""
    return call
