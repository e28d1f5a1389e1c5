"""EMULATED: a compiled model through the whole of warmq, tokens compared with transformers'."""

from __future__ import annotations

from typing import Any

import pytest
from kit.engines.emulated_batch import assert_settled, lines_of, prompts
from kit.engines.emulated_npu import Emulated

pytestmark = pytest.mark.timeout(300)


def test_64_requests_over_batch_4_through_the_queue(left: Emulated, greedy: Any) -> None:
    asked, before = prompts(64), len(left.steps())
    run = left.run("many", lines_of(asked))
    assert len(run.answers) == 64
    assert run.all_tokens() == greedy(asked)
    decodes = left.decodes(before)
    assert {rows for rows, _ in decodes} == {4}, "the compiled batch, not the 8 asked for"
    assert max(live for _, live in decodes) == 4, "the batch was never full"
    assert {rows for kind, rows, _ in left.steps() if kind == "prefill"} == {1}
    assert_settled(left.store, left.redis.folder, "many", lines_of(asked))


def test_what_was_asked_for_in_vain_is_warned_about_by_name(left: Emulated) -> None:
    told = left.log(whole=True)
    assert "--max-num-seqs 8 has no effect: the compiled batch size is 4" in told
    assert "emulated on the CPU" in told
    assert ", 4 requests at once of up to 512 tokens" in told


def test_a_prompt_longer_than_compiled_fails_alone(left: Emulated, greedy: Any) -> None:
    asked = prompts(6, seed=5)
    lines = lines_of(asked)
    lines[3]["prompt"] = list(range(4, 604))
    run = left.run("long", lines)
    code = "context_length_exceeded"
    assert list(run.errors) == ["r3"] and run.errors["r3"]["error"]["code"] == code
    expected = greedy(asked)
    assert all(run.tokens(f"r{n}") == expected[n] for n in range(6) if n != 3)
    assert_settled(left.store, left.redis.folder, "long", lines, failed={"r3": code})


def test_a_repeated_prefix_comes_from_the_cache(left: Emulated, greedy: Any) -> None:
    asked = [[*range(4, 304), 9]]
    first = left.run("prefix1", lines_of(asked))
    before = len(left.steps())
    second = left.run("prefix2", lines_of(asked))
    usage = second.answers["r0"]["response"]["body"]["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 256, usage
    assert left.prefills(before) == 1, "301 tokens are three chunks, two of them cached"
    assert first.all_tokens() == second.all_tokens() == greedy(asked)
