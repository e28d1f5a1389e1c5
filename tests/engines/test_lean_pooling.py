"""Embeddings and scores past vLLM's serving classes are those through them, number by number.

Each text is alone in its step of the engine (`--max-num-seqs 1`) and computed anew: beside others,
or with a beginning that the engine has kept, the same text has other last digits.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from kit.engines.both_ways import Line, answered_both_ways
from kit.engines.run_batch_lines import LENGTH, POOLED, POOLING
from kit.engines.score_models import make_cross_encoder, make_reranker, make_untyped_cross_encoder
from questions import held_out_reading

from contract.openai.pooling import EMBEDDINGS_URL

pytestmark = pytest.mark.timeout(300)
WORDS = f"--max-model-len {LENGTH} --max-num-seqs 1 --no-enable-prefix-caching"
SCORE_URL = "/v1/score"
WEATHER = "Seoul is a city."


def embedding(text: Any, **fields: Any) -> Line:
    return EMBEDDINGS_URL, {"input": text} | fields


def score(one: Any, other: Any, **fields: Any) -> Line:
    return SCORE_URL, {"text_1": one, "text_2": other} | fields


#: What a plan has to fill in, or leave alone.
EMBEDDINGS: dict[str, Line] = {
    "float": embedding("a", encoding_format="float"),
    "base64": embedding("2 + 3 =", encoding_format="base64"),
    "base64 again": embedding("3 + 3 =", encoding_format="base64"),
    "named": embedding("2 + 3 =", model="whatever"),
    "named base64": embedding("2 + 3 =", model="whatever", encoding_format="base64"),
    "a user": embedding("2 + 3 =", user="me"),
    "not normalized": embedding("2 + 3 =", use_activation=False),
    "no special tokens": embedding("2 + 3 =", add_special_tokens=False),
    "Korean": embedding("한국의 수도는?"),
    "signs": embedding('\u0000\u2028"\\\n\t🦊 <|im_end|> </s>'),
    "listed": embedding(["2 + 3 ="]),
    "cut": embedding("2 + 3 = " * 900, truncate_prompt_tokens=9),
    "not cut": embedding("2 + 3", truncate_prompt_tokens=9),
    "cut to fit": embedding("2 + 3 = " * 900, truncate_prompt_tokens=-1),
    "cut on the left": embedding(
        "2 + 3 = " * 9 + "5", truncate_prompt_tokens=5, truncation_side="left"
    ),
    "fits": embedding("2 " * 400),
    "too long": embedding("2 " * 3000),
    "too many characters": embedding("2" * 40_000),
    "empty": embedding(""),
    "two texts": embedding(["2 + 3 =", "3 + 3 ="]),
    "tokens": embedding([5, 6, 7]),
    "messages": (EMBEDDINGS_URL, {"messages": [{"role": "user", "content": "a"}]}),
    "dimensions": embedding("a", dimensions=8),
    "half": embedding("a", embed_dtype="float16", encoding_format="base64"),
    "priority": embedding("a", priority=1),
    "salt": embedding("a", cache_salt="b"),
}
LEAN = {
    "float", "base64", "base64 again", "named", "named base64", "a user", "not normalized",
    "no special tokens", "Korean", "signs", "cut", "not cut", "cut to fit", "cut on the left",
    "fits", "listed",
}  # fmt: skip
SCORES: dict[str, Line] = {
    "score": score("2 + 3 =", "5"),
    "score of one text": score("2 + 3 =", "2 + 3 ="),
    "score of Korean": score("한국의 수도는?", WEATHER),
    "score named": score("2 + 3 =", "5", model="whatever"),
    "score cut": score("2 + 3 = " * 9, "5 " * 9, truncate_prompt_tokens=9),
    "score listed": score("2 + 3 =", ["5"]),
    "score by another name": ("/score", {"data_1": "2 + 3 =", "data_2": WEATHER}),
    "score of documents": (SCORE_URL, {"queries": "2 + 3 =", "documents": WEATHER}),
    "score not activated": score("2 + 3 =", "5", use_activation=False),
    "score of an empty text": score("", "5"),
    "scores": score("2 + 3 =", ["5", WEATHER]),
    "score too long": score("2 " * 3000, "5"),
    "score with an instruction": score("2 + 3 =", "5", instruction="b"),
    "score of a cut document": score("2 + 3 =", "5 6 7 8", max_tokens_per_doc=2),
    "rerank": ("/rerank", {"query": "2 + 3 =", "documents": ["5", WEATHER]}),
}
LEAN_SCORES = {
    "score", "score of one text", "score of Korean", "score named", "score cut",
    "score by another name", "score of documents", "score not activated", "score listed",
}  # fmt: skip


def readings(count: int) -> list[tuple[str, str]]:
    """Return questions, each with the paragraph that answers it."""
    return [(one.question, str(one.paragraph)) for one in held_out_reading(77, count)]


def compare(report: dict[str, Any]) -> set[str]:
    """Return the names of what went leanly, all of whose answers are those of the full way."""
    assert report["left"] == 0
    for name, found in report["answers"].items():
        assert found["lean"] == found["full"], name
    ended = report["ends"]
    assert ended["given_up"] == ["CancelledError"] * len(ended["given_up"])
    assert ended["left"] == 0
    assert set(ended["killed"]) == {"EngineDead"}
    assert set(ended["inside"]) == {True}
    assert not any(ended["read"])
    return {name for name, found in report["answers"].items() if found["leanly"]}


def test_every_embedding_and_score_of_an_embedding_model_is_that_of_the_full_way(
    tmp_path: Path,
) -> None:
    asking = {f"r{n}": embedding(text) for n, (_, text) in enumerate(readings(80))}
    asking |= {f"s{n}": score(*two) for n, two in enumerate(readings(24))}
    batch = {f"batch {one['custom_id']}": (one["url"], one["body"]) for one in POOLED}
    lines = asking | EMBEDDINGS | SCORES | batch
    report = answered_both_ways(tmp_path, lines, f"{POOLING} {WORDS}")
    leanly = compare(report)
    assert leanly & EMBEDDINGS.keys() == LEAN
    assert leanly & SCORES.keys() == LEAN_SCORES
    assert asking.keys() <= leanly
    assert {"batch text", "batch base64", "batch cut"} <= leanly
    assert report["ends"]["leanly"] == [
        "given up embedding", "given up score", "killed embedding", "killed score",
    ]  # fmt: skip


@pytest.mark.parametrize("make", [make_cross_encoder, make_untyped_cross_encoder, make_reranker])
def test_every_score_of_a_cross_encoder_is_that_of_the_full_way(tmp_path: Path, make: Any) -> None:
    asking = {f"s{n}": score(*two) for n, two in enumerate(readings(24))}
    model = make(tmp_path / "model")
    report = answered_both_ways(tmp_path, asking | SCORES, f"--runner pooling {WORDS}", model=model)
    leanly = compare(report)
    assert leanly & SCORES.keys() == LEAN_SCORES
    assert asking.keys() <= leanly
    assert report["ends"]["leanly"] == ["given up score", "killed score"]
