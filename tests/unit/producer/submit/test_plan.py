"""`producer plan`'s library: what a file holds, what prompts share, how long it takes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest
from kit.commands.support import chat_line, write_lines

from contract.redis.pace import Pace
from contract.redis.waiting import WaitingList
from contract.settings import Settings
from demo.stack import MODEL
from producer.cli.commands.plan import _deadline_text, _print_plan, _tokens_out, time_text
from producer.input.reader import Input
from producer.submit.expected import Sample, expected, mean_answer
from producer.submit.lines import PreparedChunk
from producer.submit.plan import FileContent, Needed, Plan, kv_tokens, plan, saved_tokens
from producer.submit.prompt_tokens import (
    CharacterCounter,
    NoTokenizer,
    Tokenizer,
    choose_counter,
    prompt_of,
)
from producer.submit.submission import Submission
from producer.time_left import Outlook, Work

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
WORKER: dict[str, Any] = {
    "id": "w",
    "slots": 4,
    "kv_tokens": 1000,
    "prefix_caching": True,
    "mean_answer": 10.0,
}
#: 100 tokens a second, of a slot 25.
PACE = Pace(25.0, 4)


def planned(
    path: Path, lines: list[Any], workers: list[dict[str, Any]] | None = None, **set_: Any
) -> Plan:
    """Plan a file of these lines, tokens estimated."""
    source = Input(str(write_lines(path / "in.jsonl", lines)))
    submission = Submission("plan", "warmq", 6, "", set_)
    return plan(
        Settings(_env_file=None),
        submission,
        source,
        CharacterCounter(),
        workers or [],
        Outlook(PACE),
    )


# -- what a file holds -----------------------------------------------------------


def test_lines_are_counted_as_submit_would_take_them(tmp_path: Path) -> None:
    bad = chat_line("b", temperature=9)
    twice = [chat_line("a"), b"", chat_line("a", "other"), bad, b"no json", chat_line("c")]
    found = planned(tmp_path, twice).content
    assert (found.lines, found.requests, found.bad, found.duplicates) == (6, 2, 3, 1)
    assert [text.partition(",")[0] for text in found.first_bad] == ["line 3", "line 4", "line 5"]
    assert "field custom_id: 'a' was used before" in found.first_bad[0]


def test_only_the_first_ten_bad_lines_are_told(tmp_path: Path) -> None:
    found = planned(tmp_path, [b"no json"] * 25).content
    assert (found.bad, len(found.first_bad)) == (25, 10)


def test_duplicates_are_the_same_whatever_the_order_of_fields(tmp_path: Path) -> None:
    lines = [{"prompt": "x", "seed": 1}, {"seed": 1, "prompt": "x"}, {"prompt": "x", "seed": 2}]
    assert planned(tmp_path, lines).content.duplicates == 1


def test_limits_count_each_choice_and_lines_without_one_are_told(tmp_path: Path) -> None:
    lines = [
        {"prompt": "x", "max_tokens": 10, "n": 3},
        chat_line("a", max_completion_tokens=7, max_tokens=99),
        chat_line("b"),
    ]
    whole = planned(tmp_path, lines)
    assert (whole.content.limits, whole.content.without_limit) == (37, 1)
    told = _tokens_out(whole)
    assert "at most 37 and 1 line without max_tokens" in told
    assert "WARMQ_DEFAULT_MAX_TOKENS" in told


def test_answers_are_expected_as_the_queues_were_unless_a_line_fixes_them(tmp_path: Path) -> None:
    lines = [
        {"prompt": "x", "max_tokens": 100},  # 10, as the worker's answers
        {"prompt": "x", "max_tokens": 4},  # 4: it ends there
        {"prompt": "x", "max_tokens": 50, "ignore_eos": True},  # 50
        {"prompt": "x", "max_tokens": 30, "min_tokens": 30},  # 30
        {"prompt": "x"},  # 10
    ]
    found = planned(tmp_path, lines, [WORKER]).content
    assert (found.expected, found.fixed) == (104, 2)


def test_overrides_are_those_of_submit(tmp_path: Path) -> None:
    found = planned(tmp_path, [{"prompt": "x"}] * 3, max_tokens=5).content
    assert (found.limits, found.without_limit) == (15, 0)


def test_known_answers_are_looked_for_at_the_queue_of_each_lines_model(tmp_path: Path) -> None:
    seen = []

    class Search:
        def find(self, chunk: PreparedChunk) -> None:
            seen.extend(chunk.queues)

    lines = [chat_line("a", model="m"), chat_line("b")]
    submission = replace(Submission("plan", "warmq", 6, ""), routes={"m": "warmq.m"})
    source = Input(str(write_lines(tmp_path / "in.jsonl", lines)))
    search: Any = Search()
    found = plan(
        Settings(_env_file=None), submission, source, CharacterCounter(), reuse=search
    ).content
    assert (seen, found.known) == (["warmq.m", "warmq"], 0)


def test_pooling_requests_write_nothing(tmp_path: Path) -> None:
    line = {"custom_id": "e", "url": "/v1/embeddings", "body": {"input": "abcd" * 10}}
    found = planned(tmp_path, [line], [WORKER])
    assert (found.content.prompt_tokens, found.content.expected) == (10, 0)
    assert found.seconds == 10 / 25  # one request has one slot


# -- tokens ----------------------------------------------------------------------


def test_without_a_tokenizer_four_characters_are_a_token() -> None:
    estimate = CharacterCounter()
    chat = prompt_of(CHAT, {"messages": [{"role": "user", "content": "x" * 36}]}, estimate.chat)
    ids = prompt_of(COMPLETION, {"prompt": [1, 2, 3]}, estimate.chat)
    cut = prompt_of(COMPLETION, {"prompt": "x" * 400, "truncate_prompt_tokens": 7}, estimate.chat)
    # "user" and the text, and what a template adds to a message
    assert estimate.count([chat, ids, cut]) == [4 + 11, 3, 7]
    assert [estimate.exact(prompt) for prompt in (chat, ids, cut)] == [False, True, False]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    pytest.importorskip("transformers")
    return Tokenizer(str(MODEL))


def test_a_tokenizer_counts_the_chat_template_and_special_tokens(tokenizer: Tokenizer) -> None:
    body = {"messages": [{"role": "user", "content": "Hello"}]}
    parts = {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]}
    chat, same = prompt_of(CHAT, body, tokenizer.chat), prompt_of(CHAT, parts, tokenizer.chat)
    assert chat.texts == same.texts
    assert chat.texts != ["Hello"]
    text = prompt_of(COMPLETION, {"prompt": "Hello"}, tokenizer.chat)
    two = prompt_of(COMPLETION, {"prompt": ["Hello", "Hello"]}, tokenizer.chat)
    bare = prompt_of(COMPLETION, {"prompt": "Hello", "add_special_tokens": False}, tokenizer.chat)
    counts = tokenizer.count([chat, text, two, bare])
    assert counts[0] > counts[1] >= counts[3]
    assert counts[2] == 2 * counts[1]
    assert all(tokenizer.exact(prompt) for prompt in (chat, text, two, bare))


def test_texts_of_a_message_are_joined_unless_the_template_takes_them_apart(
    tokenizer: Tokenizer,
) -> None:
    texts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    body = {"messages": [{"role": "user", "content": texts}]}
    joined = "{% for m in messages %}<{{ m.content }}>{% endfor %}"
    apart = (
        "{% for m in messages %}{% for c in m['content'] %}<{{ c.text }}>{% endfor %}{% endfor %}"
    )
    assert tokenizer.chat(body | {"chat_template": joined}) == "<one\ntwo>"
    assert tokenizer.chat(body | {"chat_template": apart}) == "<one><two>"


def test_what_a_tokenizer_cannot_know_is_estimated_and_says_so(tokenizer: Tokenizer) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 4000}}
    body = {"messages": [{"role": "user", "content": [{"type": "text", "text": "See"}, image]}]}
    refused = {"messages": [{"role": "user", "content": "x"}], "chat_template": "{{ 1/0 }}"}
    scores = {"query": "What?", "documents": ["this", "that"]}
    prompts = [
        prompt_of(CHAT, body, tokenizer.chat),
        prompt_of(CHAT, refused, tokenizer.chat),
        prompt_of("/v1/rerank", scores, tokenizer.chat),
        prompt_of(COMPLETION, {"prompt": "x", "truncate_prompt_tokens": -1}, tokenizer.chat),
    ]
    assert not any(map(tokenizer.exact, prompts))
    assert all(0 < count < 100 for count in tokenizer.count(prompts))


def test_the_tokenizer_of_the_workers_model_is_used_where_its_folder_is_here() -> None:
    pytest.importorskip("transformers")
    here, other = {"model": str(MODEL)}, {"model": "another/model"}
    assert choose_counter("", [here, here]).name == str(MODEL)
    assert choose_counter("", [here, other]).name == ""
    assert choose_counter("", [other]).name == ""
    assert choose_counter("", []).name == ""
    # A worker that was started in another folder names its model by a relative path, too
    elsewhere = {"model": "models/of-the-worker", "folder": str(MODEL)}
    assert choose_counter("", [elsewhere]).name == str(MODEL)


def test_without_a_tokenizer_a_token_has_the_characters_that_the_workers_measured(
    tmp_path: Path,
) -> None:
    workers = [WORKER | {"token_characters": 1.5}, WORKER | {"token_characters": 2.5}]
    bodies = [{"prompt": "abcd" * 40, "max_tokens": 100}] * 8
    assert choose_counter("", workers).token_characters == 2.0
    assert choose_counter("", [WORKER]).token_characters == 4.0
    # `submit` estimates alike
    sample = Sample()
    for body in bodies:
        sample.add(COMPLETION, orjson.dumps(body))
    assert sample.tokens(8, workers)[0] == 8 * 160 / 2
    assert sample.tokens(8, [WORKER])[0] == 8 * 160 / 4


def test_a_tokenizer_that_is_named_and_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(NoTokenizer, match="no tokenizer that can be read in"):
        choose_counter(str(tmp_path), [])


# -- time ----------------------------------------------------------------------------


def test_the_time_is_all_tokens_at_the_rate_of_the_workers(tmp_path: Path) -> None:
    found = planned(tmp_path, [{"prompt": "abcd" * 40, "max_tokens": 100}] * 8, [WORKER])
    assert found.content.prompt_tokens == 320
    assert found.seconds == (320 + 8 * 10) / 100
    assert replace(found, pace=None).seconds is None


def test_a_worker_s_first_requests_give_no_time(tmp_path: Path) -> None:
    # They wait for compilation: 20 of them promised 19 minutes for a table that took one
    lines = [{"prompt": "abcd" * 40, "max_tokens": 100}] * 80
    first = replace(PACE, slots=32, of_request=50.0, requests=20)
    found = replace(planned(tmp_path, lines, [WORKER]), workers=1, pace=first)
    assert found.seconds is None
    assert found.needed(40.0) is None
    assert "20 requests in 32 slots are too few" in time_text(found)
    few = replace(found, pace=replace(first, slots=8))
    assert time_text(few).startswith("rough, from 20 requests: 0:00:")
    # `submit` promises none, either
    sample, work = Sample(), Work("b1", "celery", 6, 80)
    sample.add(COMPLETION, orjson.dumps(lines[0]))
    for pace, known in ((first, False), (replace(first, requests=40), True)):
        stored = orjson.loads(expected(sample, work, [WORKER], Outlook(pace)))
        assert (stored["seconds"] is not None) == known
        assert stored["prompt_tokens"] == 80 * 40


def test_a_deadline_needs_slots_and_workers_at_the_rate_of_a_slot(tmp_path: Path) -> None:
    lines = [{"prompt": "abcd" * 40, "max_tokens": 100}] * 80
    found = planned(tmp_path, lines, [WORKER])  # 4,000 tokens, 100 a second on 4 slots: 40 s
    assert found.needed(40.0) == Needed(40.0, True, 100.0, 4, 1)
    assert found.needed(10.0) == Needed(10.0, False, 400.0, 16, 4)
    assert found.needed(15.0) == Needed(15.0, False, pytest.approx(266.7, abs=0.1), 11, 3)
    alone = found.needed(1.0)  # one request takes 2 s
    assert alone is not None
    assert (alone.met, alone.slots, alone.workers) == (False, None, None)
    assert replace(found, pace=None).needed(10.0) is None


def test_a_deadline_needs_no_more_slots_than_requests_and_none_beyond_the_tenant_s_cap(
    tmp_path: Path,
) -> None:
    lines = [{"prompt": "abcd" * 40, "max_tokens": 100}] * 80
    found = planned(tmp_path, lines, [WORKER])  # one request takes 2 s
    exact = found.needed(2.0)
    assert exact is not None
    assert exact.slots == 80
    assert replace(found, before=20).needed(2.0).slots <= 100  # type: ignore[union-attr]
    capped = replace(found, cap=2)
    assert (capped.seconds, capped.capped_s) == (80.0, 80.0)
    assert (capped.needed(79.0).met, capped.needed(79.0).slots) == (False, None)  # type: ignore[union-attr]
    assert (capped.needed(80.0).met, capped.needed(80.0).slots) == (True, 2)  # type: ignore[union-attr]
    assert replace(found, cap=0).seconds is None
    assert replace(found, cap=9).seconds == 40.0


def test_a_prefix_cache_saves_what_is_shared_in_any_order_if_it_fits() -> None:
    sharing = FileContent(requests=100, prompt_tokens=10_000)
    sharing.shared.whole, sharing.shared.repeated, sharing.shared.distinct = 40_000, 30_000, 1_000
    assert saved_tokens(sharing, 1000) == (7500, True)
    sharing.shared.distinct = 10_000  # 2,500 tokens, and the cache has 1,000
    assert saved_tokens(sharing, 1000) == (7500, False)
    assert saved_tokens(sharing, None) == (0, True)


def test_announcements_of_other_versions_are_taken_as_far_as_they_go() -> None:
    odd: list[dict[str, Any]] = [
        {"id": "old"},
        {"id": "odd", "mean_answer": "x", "kv_tokens": None},
        {"id": "shares nothing", "kv_tokens": 9, "prefix_caching": False},
    ]
    assert (mean_answer(odd), kv_tokens(odd)) == (None, None)
    assert (mean_answer([*odd, WORKER]), kv_tokens([*odd, WORKER])) == (10.0, 1000)


def test_prompts_beyond_the_workers_context_are_counted(tmp_path: Path) -> None:
    class Counts(CharacterCounter):
        def exact(self, prompt: Any) -> bool:
            return True

    given = [{"prompt": "x" * 40}, {"prompt": "x" * 44, "custom_id": "b"}, {"prompt": "x" * 80}]
    source = Input(str(write_lines(tmp_path / "in.jsonl", given)))
    settings, submission = Settings(_env_file=None), Submission("plan", "warmq", 6, "")
    found = plan(settings, submission, source, Counts(), [WORKER | {"max_model_len": 10}])
    assert (found.content.too_long, found.context) == (2, 10)
    assert found.content.first_too_long == "line 2 (b)"


class Known:
    """A search that knows the first `count` requests of each chunk."""

    def __init__(self, count: int) -> None:
        self._numbers = range(count)

    def find(self, chunk: PreparedChunk) -> None:
        chunk.known = dict.fromkeys(self._numbers)  # type: ignore[arg-type]


def planned_with(path: Path, known: int, lines: list[Any]) -> Plan:
    source = Input(str(write_lines(path / "in.jsonl", lines)))
    search: Any = Known(known)
    return plan(
        Settings(_env_file=None), Submission("plan", "warmq", 6, ""), source, CharacterCounter(),
        [WORKER], Outlook(PACE, [WaitingList(0, "t", "b", 9)]), reuse=search,
    )  # fmt: skip


def test_known_answers_take_no_tokens_no_time_and_no_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [{"prompt": "a long beginning " * 20 + str(n), "max_tokens": 5} for n in range(4)]
    whole = planned_with(tmp_path, 4, lines)
    assert (whole.seconds, whole.before, whole.content.shared.whole) == (0.0, 0, 0)
    assert whole.needed(5.0) == Needed(5.0, True, 0.0, 0, 0)
    _print_plan("in", whole, None, 5.0)
    rows = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines() if line)
    assert rows["tokens"].startswith(("in   none", "out  none"))
    assert "shared" not in rows
    assert rows["deadline"].endswith("met, as nothing is computed")
    half = planned_with(tmp_path, 2, lines)
    assert half.content.message_bytes < planned_with(tmp_path, 0, lines).content.message_bytes
    assert half.content.limits == 10


def test_a_file_whose_computed_lines_fix_their_length_says_so(tmp_path: Path) -> None:
    line = {"prompt": "x", "max_tokens": 50, "ignore_eos": True}
    assert _tokens_out(planned_with(tmp_path, 1, [line] * 3)) == "100, as the lines ask for"


def test_lines_that_write_nothing_have_no_tokens_out(tmp_path: Path) -> None:
    line = {"custom_id": "e", "url": "/v1/embeddings", "body": {"input": "abcd"}}
    assert _tokens_out(planned(tmp_path, [line], [WORKER])) == "none"


def test_a_rate_below_one_token_is_not_shown_as_none(tmp_path: Path) -> None:
    text = _deadline_text(planned(tmp_path, [{"prompt": "x"}], [WORKER]), 1e6)
    assert "met; 1 slot (about 1 worker), under 1 token/s are enough" in text
