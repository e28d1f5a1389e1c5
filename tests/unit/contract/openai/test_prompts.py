"""The length of a prompt that is only text."""

from __future__ import annotations

from typing import Any

import pytest

from contract.openai.prompts import text_length


@pytest.mark.parametrize(
    ("body", "length"),
    [
        ({"messages": [{"role": "system", "content": "Hm."}, {"role": "user", "content": "eh"}]},
         (len("system" "Hm." "user" "eh"), 2)),
        ({"prompt": "한국어"}, (3, 0)),
        ({"prompt": [1, 2, 3]}, (0, 0)),
        ({"prompt": ["two", "texts"]}, (0, 0)),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
         (0, 0)),
        ({"messages": [{"role": "user", "content": "hm"}], "tools": [{"type": "x"}]}, (0, 0)),
        ({"messages": [{"role": "assistant", "content": None}]}, (0, 0)),
        ({"input": "embed this"}, (0, 0)),
        # Bodies of embeddings: what a server takes must not end its answer here
        ({"messages": [{"content": "embed this"}]}, (0, 0)),
        ({"messages": [{"role": 5, "content": "embed this"}]}, (0, 0)),
    ],
)  # fmt: skip
def test_only_prompts_that_are_text_have_a_length(
    body: dict[str, Any], length: tuple[int, int]
) -> None:
    assert text_length(body) == length
