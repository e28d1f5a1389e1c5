"""What makes the answers of an OpenAI-compatible server those of another model."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

from worker.engine.openai import OpenAISettings
from worker.engine.openai.engine import OpenAIEngine
from worker.engine.openai.upstream import Upstream

CARD: dict[str, Any] = {"id": "m", "owned_by": "vllm", "root": "/models/m", "max_model_len": 100}


def server(card: dict[str, Any] | None, release: str = "0.30") -> Upstream:
    made = Upstream("http://127.0.0.1:1/v1", Mock(), "m", None, "")
    made.models, made.model, made.release = ({} if card is None else {"m": card}), "m", release
    return made


def engine(*servers: Upstream) -> OpenAIEngine:
    settings = OpenAISettings(_env_file=None, openai_base_urls="http://127.0.0.1:1/v1")
    made = OpenAIEngine(settings)
    made._servers.servers = servers
    return made


def test_what_differs_in_each_reply_changes_nothing() -> None:
    first = server(CARD | {"created": 1, "permission": [{"id": "a"}]})
    later = server(CARD | {"created": 2, "permission": [{"id": "b"}]})
    assert first.identity == later.identity


def test_another_model_length_or_release_is_another_identity() -> None:
    cards = [CARD, CARD | {"root": "/models/other"}, CARD | {"max_model_len": 200}]
    found = {server(card).identity for card in cards} | {server(CARD, "0.31").identity}
    assert len(found) == 4


def test_servers_that_differ_or_list_no_model_have_none() -> None:
    same, other = server(CARD), server(CARD | {"root": "/models/other"})
    assert engine(same, server(CARD))._identity() == same.identity
    assert engine(same, other)._identity() == ""
    assert engine(same, server(None))._identity() == ""
    assert engine()._identity() == ""
