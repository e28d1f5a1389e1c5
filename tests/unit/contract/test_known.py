"""What makes two requests the same question to the same model, and the filter before that."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.known import (
    BodyFilter,
    Offer,
    answer_digest,
    body_hash,
    identity_of,
    offer_of,
    second,
)
from contract.openai.body import CHAT_URL, COMPLETION_URL
from contract.openai.pooling import EMBEDDINGS_URL

GREEDY: dict[str, Any] = {"prompt": "Hi", "temperature": 0}
SEEDED: dict[str, Any] = {"prompt": "Hi", "seed": 7}


def digest(body: dict[str, Any], identity: str = "m", url: str = COMPLETION_URL) -> str:
    return answer_digest(identity, url, body)


@pytest.mark.parametrize(
    "body", [GREEDY, SEEDED, SEEDED | {"temperature": 1}, SEEDED | {"n": 3, "temperature": 0.5}]
)
def test_a_greedy_or_seeded_request_has_a_digest(body: dict[str, Any]) -> None:
    assert len(digest(body)) == 32


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": "Hi"}, {"prompt": "Hi", "temperature": 1}, GREEDY | {"n": 2},
        {"prompt": "Hi", "seed": None}, {"prompt": "Hi", "seed": "7"},
        SEEDED | {"use_beam_search": True}, SEEDED | {"vllm_xargs": {"a": 1}},
    ],
)  # fmt: skip
def test_a_request_whose_answers_vary_has_none(body: dict[str, Any]) -> None:
    assert digest(body) == ""


def test_a_picture_at_an_address_has_none_and_an_embedding_always_has_one() -> None:
    part = {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}
    chat = {"messages": [{"role": "user", "content": [part]}], "temperature": 0}
    assert digest(chat, url=CHAT_URL) == ""
    assert digest({"input": "Hi"}, url=EMBEDDINGS_URL)


def test_the_order_of_fields_and_who_asks_change_nothing() -> None:
    assert digest({"temperature": 0, "prompt": "Hi"}) == digest(GREEDY)
    assert digest(GREEDY | {"user": "me", "priority": 3}) == digest(GREEDY)


@pytest.mark.parametrize(
    "other",
    [
        digest(GREEDY | {"prompt": "Ho"}), digest(GREEDY | {"max_tokens": 5}),
        digest(GREEDY | {"model": "adapter"}), digest(GREEDY, "another model"),
        digest(GREEDY, url=CHAT_URL),
    ],
)  # fmt: skip
def test_another_body_model_or_url_is_another_question(other: str) -> None:
    assert other and other != digest(GREEDY)


def test_an_identity_keeps_its_parts_apart() -> None:
    assert identity_of("ab", "c") != identity_of("a", "bc")


def worker(identity: str | None, queue: str = "warmq", most: int = 10) -> dict[str, Any]:
    known = {} if identity is None else {"identity": identity, "known_answers": most}
    return {"queue": queue, "state": "ready"} | known


def test_the_workers_of_a_queue_offer_answers_only_if_their_models_agree() -> None:
    assert offer_of([], "warmq") is None
    assert offer_of([worker(None)], "warmq") is None
    assert offer_of([worker("a"), worker("a", most=4), worker(None)], "warmq") == Offer("a", 4)
    assert offer_of([worker("a"), worker("b")], "warmq") is None
    assert offer_of([worker("a"), worker("b", "warmq.other")], "warmq") == Offer("a", 10)


def written(hashes: list[int], size: int) -> bytes:
    """Return a filter as Redis writes it: the highest bit of a byte comes first."""
    bits = bytearray(size // 8)
    for number in [*hashes, *map(second, hashes)]:
        at = number % size
        bits[at // 8] |= 0x80 >> at % 8
    return bytes(bits)


@given(st.lists(st.binary(max_size=20), max_size=30), st.lists(st.binary(max_size=20), max_size=30))
def test_the_filter_never_misses_a_body_that_is_known(new: list[bytes], old: list[bytes]) -> None:
    hashes = [list(map(body_hash, bodies)) for bodies in (new, old)]
    both = BodyFilter(written(hashes[0], 8192), written(hashes[1], 16384))
    all_known = hashes[0] + hashes[1]
    assert both.likely(all_known) == list(range(len(all_known)))


def test_the_filter_passes_over_nearly_all_others() -> None:
    known = [body_hash(b"known %d" % n) for n in range(1000)]
    bits = BodyFilter(written(known, 32768))
    others = [body_hash(b"other %d" % n) for n in range(10_000)]
    assert len(bits.likely(others)) < 100
    assert bits and not BodyFilter() and not BodyFilter(b"", b"")
