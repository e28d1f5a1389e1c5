"""POP reads what `producer` writes without decoding it, and just as if it had decoded it."""

from __future__ import annotations

from importlib.resources import files

import orjson
import pytest
import redis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kit.protocol.lessee import QUEUE, chat

from contract.message import MessageWriter
from contract.openai.body import CHAT_URL

#: Returns what POP reads of a message, or why it cannot.
READ = (
    "\n".join(
        (files("contract") / "lua" / f"{name}.lua").read_text()
        for name in ("failures", "common", "message")
    )
    + """
local r, reason = read_message(ARGV[1])
return r and cjson.encode(r) or reason
"""
)

TEXTS = st.text(st.characters(codec="utf-8"), min_size=1, max_size=40)


@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    batch=TEXTS, custom_id=st.none() | TEXTS, queue=TEXTS, line=st.integers(0, 2**60),
    deadline=st.none() | st.floats(0, 4e12) | st.integers(0, 2**53), priority=st.integers(0, 9),
    text=TEXTS,
)  # fmt: skip
def test_what_the_producer_writes_is_read_as_if_it_were_decoded(
    redis_client: redis.Redis, batch: str, custom_id: str | None, queue: str, line: int,
    deadline: float | None, priority: int, text: str,
) -> None:  # fmt: skip
    write = MessageWriter(batch, 1, "mark.1", queue, priority, deadline)
    message = write.write("an-id", custom_id, line, CHAT_URL, orjson.dumps(chat(text)))
    # A space more, and it is not what the producer writes
    other = b'"v": 1}}'.join(message.rsplit(b'"v":1}}', 1))
    short, decoded = (redis_client.eval(READ, 0, raw) for raw in (message, other))
    assert orjson.loads(short) == orjson.loads(decoded)
    assert orjson.loads(short)["id"] == "an-id"
    assert orjson.loads(short)["batch"] == batch


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"id":"an-id"', b'"id":"an\nid"'),
        (b'"id":"an-id"', b'"id":""'),
        (b'"id":"an-id"', b'"id":"an\xffid"'),
        (b'"id":"an-id"', b'"id":"' + b"i" * 256 + b'"'),
        (b'"c1"', b'"c\xff1"'),
        (b'"c1"', b'"c1","custom_id":"c2"'),
        (b'"deadline":null', b'"deadline":0x10'),
        (b'"deadline":null', b'"deadline":1.2.3'),
        (b'"origin":"warmq"', b'"origin":"warmq","ignore_result":true'),
        (b'"batch":"b1"', b'"batch":""'),
        (b'"batch":"b1"', b'"batch":7'),
        (b'"priority":6', b'"priority":-6'),
        (b'"priority":6', b'"priority":6.5'),
        (b'"}}', b'"}},"headers":{"id":"other"}}'),
        (b'"}}', b'"}} '),
        (b'"}}', b'"}}}'),
    ],
)
def test_what_looks_almost_like_it_is_judged_as_if_it_were_decoded(
    redis_client: redis.Redis, old: bytes, new: bytes
) -> None:
    write = MessageWriter("b1", 1, "mark.1", QUEUE, 6)
    message = write.write("an-id", "c1", 1, CHAT_URL, orjson.dumps(chat()))
    head, _, rest = message.rpartition(old)
    changed = head + new + rest
    other = b'"v": 1}}'.join(changed.rsplit(b'"v":1}}', 1))
    short, decoded = (redis_client.eval(READ, 0, raw) for raw in (changed, other))
    assert changed not in (message, other)
    assert short == decoded or orjson.loads(short) == orjson.loads(decoded)
