"""Which answers of a worker may be reused, and under which digests they are noted."""

from __future__ import annotations

from typing import Any

import orjson

from contract.known import answer_digest, body_hash
from contract.message import MessageWriter, encode_args, read_body, read_delivery
from contract.naming import request_id
from contract.openai.body import COMPLETION_URL
from contract.redis.known import KnownAnswer, known_text
from worker.drain.endings import Ending
from worker.drain.known import Offers, known_of
from worker.engine import Capacity, EngineRequest
from worker.engine.simulated import SimulatedSettings

BODY: dict[str, Any] = {"prompt": "Hi", "temperature": 0}
ID = request_id("b1", "a")


def delivered(body: bytes, rid: str = ID) -> Any:
    writer = MessageWriter("b1", 1, "life", "warmq", 6)
    return read_delivery("w/1", writer.write(rid, "a", 1, COMPLETION_URL, body))


def offers(
    identity: str = "model", most: int = 10, served: str = "m", **more: Any
) -> Offers | None:
    settings = SimulatedSettings(_env_file=None, known_answers=most)
    capacity = Capacity(1, 10, "m", identity=lambda: identity, **more)
    return Offers.of(settings, capacity, served)


def asked(**fields: Any) -> EngineRequest:
    return EngineRequest(COMPLETION_URL, BODY | fields)


def test_without_the_setting_or_an_identity_nothing_is_noted() -> None:
    settings = SimulatedSettings(_env_file=None)
    assert Offers.of(settings, Capacity(1, 10, "m", identity=lambda: "x"), "m") is None
    settings = SimulatedSettings(_env_file=None, known_answers=5)
    assert Offers.of(settings, Capacity(1, 10, "m"), "m") is None
    made = offers("")
    assert made is not None and made.digest_of(asked()) == "" and made.identity == ""


def test_the_worker_hashes_the_text_that_the_submitter_sent() -> None:
    made, text = offers(), b'{ "prompt":"H\\u00e9\\n\\"", "temperature": 0}'
    assert made is not None
    delivery = delivered(text)
    assert made.hash_of(delivery) == body_hash(encode_args(text))
    assert made.digest_of(EngineRequest(COMPLETION_URL, read_body(delivery))) == answer_digest(
        made.identity, COMPLETION_URL, orjson.loads(text)
    )


def test_other_ids_and_requests_without_a_batch_are_not_noted() -> None:
    made = offers()
    assert made is not None
    assert made.hash_of(delivered(b"{}", "an id with spaces")) is None
    delivery = delivered(b"{}")
    delivery.batch = ""
    assert made.hash_of(delivery) is None


def test_the_identity_follows_the_engines_and_the_served_name() -> None:
    first, other = offers("a"), offers("b")
    named = offers("a", served="other")
    assert first and other and named
    assert len({first.identity, other.identity, named.identity}) == 3
    now = ["a"]
    settings = SimulatedSettings(_env_file=None, known_answers=5)
    made = Offers.of(settings, Capacity(1, 10, "m", identity=lambda: now[0]), "m")
    assert made is not None and made.identity == first.identity
    now[0] = "b"
    assert made.identity == other.identity
    now[0] = ""
    assert made.identity == ""


def test_an_adapter_that_is_loaded_on_demand_is_not_noted() -> None:
    made = offers(on_demand=lambda: ["poet"], details={"served_names": ["m", "fixed"]})
    assert made is not None
    assert made.digest_of(asked()) and made.digest_of(asked(model="fixed"))
    assert made.digest_of(asked(model="poet")) == ""


def test_answers_are_noted_for_their_tenants() -> None:
    mine, theirs = delivered(b"{}"), delivered(b"{}", request_id("b1", "b"))
    mine.tenant, theirs.tenant = "me", "them"
    endings = [
        Ending(mine, "completed", known=("aa", 1)), Ending(mine, "completed"),
        Ending(theirs, "completed", known=("bb", 2)),
    ]  # fmt: skip
    found = known_of(endings)
    assert found == {
        "me": [KnownAnswer("aa", 1, ID)], "them": [KnownAnswer("bb", 2, request_id("b1", "b"))],
    }  # fmt: skip
    assert known_text(found["me"]) == f"aa 1 {ID}"
