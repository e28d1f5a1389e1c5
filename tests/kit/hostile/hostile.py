"""What strangers may write: lines of a file, and messages in the queue's lists."""

from __future__ import annotations

import base64
import json
import os
import pickle
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from kit.hostile.hostile_request import deep

from contract import naming
from contract.openai.body import CHAT_URL, COMPLETION_URL, field_names

#: `make fuzz-full` sets it: other examples each time, and so many times more of them.
TIMES = int(os.environ.get("FUZZ_TIMES", "0"))


def examples(count: int) -> settings:
    """Return settings for so many examples: the same ones in every run, but for fuzz-full."""
    return settings(
        max_examples=count * max(1, TIMES),
        derandomize=TIMES == 0,
        deadline=None,
        # Each example empties the Redis that the fixture gave to the first one.
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )


class Trap:
    """Unpickling it would make a file: the tests look that none appears."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[str, str]]:
        return open, (self.path, "w")


def pickled(path: str) -> bytes:
    """Return a pickle that makes the file `path` when it is loaded."""
    return pickle.dumps(Trap(path))


#: Texts that break what splits, prints, stores or opens them.
TEXTS = [
    "", "\0", "\n", "\r\n", "..", "../../etc/passwd", "/dev/full", "a\0b", "\x1b]0;x\x07",
    "\x06\x16", "%s%n", "celery-task-meta-x", "b1:index", "b1:failed", "__proto__", "null",
    "\ufeff", "\u202e", "\U0001f600", "\ud800", "x" * 256, "y" * 10_240, "\u2028", "'; DROP",
]  # fmt: skip
NUMBERS = [
    0, -1, 1, 2**31, 2**53 + 1, 2**63 - 1, 2**63, 2**64 - 1, 2**64, -(2**63) - 1, 10**30, 1e308,
    1e-320, -0.0, 0.1, 1.5, float("inf"), float("nan"),
]  # fmt: skip

scalars = st.one_of(
    st.none(), st.booleans(), st.sampled_from(NUMBERS), st.sampled_from(TEXTS),
    st.text(max_size=20), st.integers(), st.floats(),
)  # fmt: skip
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=10,
)
_names = st.sampled_from(sorted(field_names(CHAT_URL) | field_names(COMPLETION_URL)) + TEXTS[:-4])
bodies = st.one_of(
    st.fixed_dictionaries({"prompt": scalars}),
    st.fixed_dictionaries({"messages": st.lists(st.fixed_dictionaries({"role": scalars}))}),
    st.dictionaries(_names, values, max_size=5),
    st.builds(
        lambda prompt, more: {"prompt": prompt or "x"} | more,
        st.text(max_size=9), st.dictionaries(_names, values, max_size=2),
    ),
)  # fmt: skip


def dump(value: Any) -> bytes:
    """Return JSON as a careless client writes it: lone surrogates and NaN get through."""
    return json.dumps(value).encode()


_STRUCTURES = [
    deep(1000), deep(1030), deep(5000), b'{"prompt":' + deep(1000) + b"}",
    b'{"prompt":"x","response_format":' + deep(300, b'{"a":', b"}") + b"}",
    b'{"prompt":"x","response_format":' + deep(1000, b'{"a":', b"}") + b"}",
    b'{"custom_id":' + deep(900) + b',"prompt":"x"}', b'{"url":' + deep(900) + b"}",
    b'{"prompt":"\xff\xfe"}', b'{"prompt":"\xed\xa0\x80"}', b'{"prompt":"x","seed":1e999}',
    b'{"prompt":"x","seed":' + b"9" * 5000 + b"}", b"{", b"\xef\xbb\xbf{}", b"NaN", b"\0",
]  # fmt: skip
_structures = st.integers(0, len(_STRUCTURES) - 1).map(_STRUCTURES.__getitem__)


@st.composite
def spoilt(draw: st.DrawFn, texts: st.SearchStrategy[bytes]) -> bytes:
    """Return some text with a piece cut out or put in."""
    text = draw(texts)
    at = draw(st.integers(0, len(text)))
    return text[:at] + draw(st.binary(max_size=6)) + text[at + draw(st.integers(0, 8)) :]


_batch_lines = st.fixed_dictionaries(
    {}, optional={"custom_id": scalars, "method": st.just("POST") | scalars,
                  "url": st.sampled_from([CHAT_URL, COMPLETION_URL]) | values,
                  "body": bodies | values}
)  # fmt: skip
_short_lines = st.builds(lambda custom_id, body: {"custom_id": custom_id} | body, scalars, bodies)
_json_lines = st.builds(dump, st.one_of(_batch_lines, _short_lines, bodies, values))
lines = st.one_of(_json_lines, spoilt(_json_lines), _structures, st.binary(max_size=50))


def _or(value: Any) -> st.SearchStrategy[Any]:
    """Return mostly what is right, sometimes what is not."""
    return st.one_of(st.just(value), st.just(value), st.just(value), values)


def _content(body: Any, wrapped: str, trap: str) -> Any:
    args = {"args": [[body], {}, {}], "bare": body, "kwargs": [[body], {"x": 1}, {}],
            "chain": [[body], {}, {"chain": [1]}], "v1": {"task": naming.TASK_NAME, "args": [body]},
            }.get(wrapped)  # fmt: skip
    if wrapped == "pickle":
        return base64.b64encode(pickled(trap)).decode()
    if wrapped == "base64":
        return base64.b64encode(dump([[body], {}, {}])).decode()
    return dump(args).decode()


_CONTENTS = ["args", "args", "args", "base64", "pickle", "bare", "kwargs", "chain", "v1"]


def _right(request_id: Any, body: Any, ours: Any) -> bytes:
    usable = isinstance(request_id, str) and request_id.isprintable()
    return dump({
        "body": dump([[body], {}, {}]).decode(),
        "content-type": "application/json",
        "headers": {
            "id": request_id if usable else "r0", "task": naming.TASK_NAME, "warmq": ours
        },
        "properties": {"body_encoding": "utf-8"},
    })  # fmt: skip


def envelopes(
    batches: st.SearchStrategy[Any], request_ids: st.SearchStrategy[Any], trap: str
) -> st.SearchStrategy[bytes]:
    """Return messages: right, wrong in a field or two, or no envelope at all.

    Args:
        batches: values for `headers.warmq`.
        request_ids: values for `headers.id`.
        trap: file that a pickled body makes when somebody loads it.
    """
    content = st.builds(_content, bodies | values, st.sampled_from(_CONTENTS), st.just(trap))
    headers = st.fixed_dictionaries(
        {"id": request_ids, "task": _or(naming.TASK_NAME)},
        optional={
            "warmq": batches | values, "eta": values, "expires": scalars | st.datetimes().map(str),
            "ignore_result": st.booleans() | scalars, "retries": values,
        },
    )  # fmt: skip
    properties = st.fixed_dictionaries(
        {}, optional={"body_encoding": st.sampled_from(["utf-8", "base64"]) | values,
                      "delivery_tag": values, "priority": values}
    )  # fmt: skip
    whole = st.fixed_dictionaries(
        {"body": content | values, "headers": headers | _or({}), "properties": properties | values,
         "content-type": st.sampled_from(
             ["application/json", "application/x-python-serialize", "application/x-yaml"]) | values,
         },
        optional={"content-encoding": _or("utf-8")},
    )  # fmt: skip
    right = st.builds(_right, request_ids, bodies, batches)
    texts = st.builds(dump, whole)
    return st.one_of(right, texts, texts, spoilt(right), spoilt(texts), _structures,
                     st.binary(max_size=60), st.just(pickled(trap)))  # fmt: skip
