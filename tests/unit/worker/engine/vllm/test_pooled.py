"""Answers of pooling models, as vLLM gives them."""

from __future__ import annotations

from typing import Any

import orjson
import pydantic
import pytest

from contract.errors import EngineDead
from worker.engine import Completion

ANSWER = {
    "model": "/models/x", "data": [{"index": 0, "embedding": [0.25]}],
    "usage": {"prompt_tokens": 3, "total_tokens": 3},
}  # fmt: skip


def pooled(raw: bytes, model: str | None) -> Completion:
    import worker.engine.vllm.engine  # noqa: F401 - sets what vLLM reads at its import
    from worker.engine.vllm import serving

    return serving.pooled(raw, model)


def test_an_answer_is_passed_on_with_the_lines_own_name_of_the_model() -> None:
    raw = orjson.dumps(ANSWER)
    assert pooled(raw, None).body == raw
    named = pooled(raw, "mine")
    assert orjson.loads(named.body) == ANSWER | {"model": "mine"}
    assert (named.prompt_tokens, named.completion_tokens) == (3, 0)


def test_what_vllm_was_told_to_give_up_is_no_answer() -> None:
    raw = orjson.dumps(ANSWER | {"data": [{"index": 0, "embedding": []}]})
    with pytest.raises(EngineDead) as caught:
        pooled(raw, None)
    assert not caught.value.inside


@pytest.mark.parametrize("ids", [[1, 2, 3], [[1, 2], [3]], [[7] * 1000] * 100])
def test_token_ids_to_embed_are_taken_as_they_are(ids: Any) -> None:
    import worker.engine.vllm.engine  # noqa: F401 - sets what vLLM reads at its import
    from worker.engine.vllm import serving
    from worker.engine.vllm.names import EmbeddingRequest

    adapter = pydantic.TypeAdapter(EmbeddingRequest)
    served = serving.Served(adapter, None, frozenset())
    body = {"model": "m", "input": ids, "dimensions": 4, "request_id": "r"}
    found = served.read(body)
    if len(ids) < 100:
        assert found == adapter.validate_python(body)
    assert type(found).__name__ == "EmbeddingCompletionRequest"
    assert found.input is ids
    others: list[Any] = ["text", ["a", "b"], [[1], "a"], [1, "a"], [], [[]]]
    assert not any(map(serving.are_token_ids, others))
