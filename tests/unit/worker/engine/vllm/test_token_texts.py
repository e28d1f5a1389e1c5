"""Texts of tokens are made once for each token of a tokenizer."""

from __future__ import annotations

from typing import Any


def test_each_token_is_decoded_once_and_another_tokenizer_has_its_own() -> None:
    import worker.engine.vllm.engine  # noqa: F401 - sets what vLLM reads at its import
    from worker.engine.vllm.limits import remembering

    asked: list[tuple[str, int]] = []

    def make(tokenizer: Any, tokens: list[int]) -> list[str]:
        asked.extend((tokenizer, token) for token in tokens)
        return [f"{tokenizer}{token}" for token in tokens]

    texts = remembering(make)
    assert texts("a", [3, 1, 3, 2]) == ["a3", "a1", "a3", "a2"]
    assert texts("a", [2, 4, 2]) == ["a2", "a4", "a2"]
    assert sorted(asked) == [("a", 1), ("a", 2), ("a", 3), ("a", 4)]
    assert texts("b", [1]) == ["b1"]
    assert texts("a", [1]) == ["a1"]
    assert texts("a", []) == []
