"""The order of a file's requests: keys of their beginnings, the plan, what it says it saves."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.openai.body import CHAT_URL, COMPLETION_URL
from contract.openai.lines import parse_line
from contract.openai.pooling import EMBEDDINGS_URL
from producer.submit.order.keys import depth_bytes, keys_of, model_of, text_of
from producer.submit.order.prefix import PrefixOrder, choose_order, prefix_order
from producer.submit.order.prefix_keys import PrefixKeys, Spool


def chat(*turns: str, system: str = "", **fields: Any) -> bytes:
    roles = ("user", "assistant")
    messages = [{"role": roles[n % 2], "content": turn} for n, turn in enumerate(turns)]
    head = [{"role": "system", "content": system}] if system else []
    return orjson.dumps({**fields, "messages": head + messages})


def text(seed: int, size: int) -> str:
    return "".join(random.Random(seed).choices("abcdefghij ", k=size))


def records(bodies: list[bytes], url: str = CHAT_URL, **options: int) -> PrefixKeys:
    found = PrefixKeys(**options)
    for start in range(0, len(bodies), 7):
        some = bodies[start : start + 7]
        found.add(*keys_of([text_of(url, body) for body in some]), map(model_of, some))
    return found


def planned(bodies: list[bytes], url: str = CHAT_URL, cache: int = 0) -> PrefixOrder:
    return prefix_order(records(bodies, url), cache)


def shared_bytes(one: bytes, other: bytes, url: str = CHAT_URL) -> int:
    """Return how much of two requests' texts their keys say is equal."""
    keys, _ = keys_of([text_of(url, one), text_of(url, other)])
    if not keys.shape[1]:
        return 0
    same = np.logical_and.accumulate((keys[0] == keys[1]) & (keys[0] != 0))
    return int(depth_bytes(keys[0][same]).max(initial=0))


def test_documents_written_question_by_question_are_put_together() -> None:
    bodies = [chat(f"{text(d, 2_000)}\n{text(90 + q, 80)}") for q in range(4) for d in range(9)]
    found = planned(bodies)
    assert found.order.tolist() == [q * 9 + d for d in range(9) for q in range(4)]
    assert found.groups == 9
    assert 440 <= found.group_tokens <= 510
    assert found.saved_as_is == 0
    assert found.saved == pytest.approx(3 * found.distinct, rel=0.01)
    assert found.distinct == pytest.approx(9 * found.group_tokens, rel=0.01)
    assert 0.60 < found.saved / found.prompt < 0.75


def test_the_depth_that_is_seen_is_near_the_true_one_wherever_it_lies() -> None:
    for size in (200, 500, 1_000, 3_000, 10_000, 40_000):
        one, other = (chat(text(1, size) + text(own, 300)) for own in (2, 3))
        assert 0.85 * size - 80 <= shared_bytes(one, other) <= size + 30


def test_short_documents_after_a_long_system_message_are_told_apart() -> None:
    bodies = [
        chat(f"{text(d, 300)} {text(70 + q, 60)}", system=text(1, 12_000))
        for q in range(3) for d in range(5)
    ]  # fmt: skip
    found = planned(bodies)
    assert found.order.tolist() == [q * 5 + d for d in range(5) for q in range(3)]
    # The system message counts once, each document once more
    assert 3_000 < found.distinct < 3_500


def test_tools_come_before_the_system_message_wherever_they_stand_in_the_body() -> None:
    tools = [{"type": "function", "function": {"name": text(1, 500)}}]
    first = orjson.dumps({"messages": [{"role": "user", "content": "a"}], "tools": tools})
    last = orjson.dumps({"tools": tools, "messages": [{"role": "user", "content": "b"}]})
    assert shared_bytes(first, last) >= 450


def test_sampling_fields_and_their_place_make_no_difference() -> None:
    one = orjson.dumps(
        {"temperature": 0, "seed": 1, "messages": [{"role": "user", "content": text(1, 500)}]}
    )
    other = orjson.dumps({"messages": [{"content": text(1, 500), "role": "user"}], "max_tokens": 7})
    assert shared_bytes(one, other) >= 450


@pytest.mark.parametrize("field", ["model", "cache_salt", "chat_template", "reasoning_effort"])
def test_what_changes_a_prompt_from_its_start_shares_nothing(field: str) -> None:
    assert shared_bytes(chat(text(1, 500), **{field: "a"}), chat(text(1, 500), **{field: "b"})) == 0


def test_an_image_counts_by_its_content_and_a_text_before_it_is_shared() -> None:
    def look(url: str, question: str) -> bytes:
        image = {"type": "image_url", "image_url": {"url": url}}
        return orjson.dumps(
            {"messages": [{"role": "user", "content": [image, {"type": "text", "text": question}]}]}
        )

    one = "data:image/png;base64," + text(1, 5_000)
    assert shared_bytes(look(one, "how many?"), look(one, "what colour?")) >= 1_000
    assert shared_bytes(look(one, "how many?"), look(one + "x", "how many?")) == 0


def test_earlier_turns_are_a_part_of_what_is_shared() -> None:
    turns = [text(n, 40) for n in range(9)]
    assert shared_bytes(chat(*turns, "more"), chat(*turns, "less")) >= 300


def test_prompts_of_completions_and_token_ids_have_keys_too() -> None:
    def body(prompt: object) -> bytes:
        return orjson.dumps({"prompt": prompt})

    ids = list(range(1_000, 1_400))
    assert shared_bytes(body(text(1, 900) + "a"), body(text(1, 900) + "b"), COMPLETION_URL) >= 780
    assert shared_bytes(body([*ids, 1]), body([*ids, 2]), COMPLETION_URL) >= 1_400
    assert shared_bytes(body(["one", "two"]), body(["one", "three"]), COMPLETION_URL) == 0


def test_requests_that_read_no_prefix_cache_stay_where_they_are() -> None:
    assert text_of("/v1/embeddings", b'{"input": "x"}') == []
    found = planned([b'{"input": "x"}'] * 9, "/v1/embeddings")
    assert found.order.tolist() == list(range(9))
    assert (found.prompt, found.groups) == (0, 0)


def test_no_file_is_no_problem() -> None:
    found = PrefixKeys()
    found.add(*keys_of([]), [])
    assert prefix_order(found).order.tolist() == []


@pytest.mark.parametrize(("cache", "grouped"), [(100, True), (5_000, False), (0, False)])
def test_auto_groups_what_does_not_fit_the_cache(cache: int, grouped: bool) -> None:
    bodies = [chat(f"{text(n % 8, 2_000)} {text(50 + n, 100)}") for n in range(64)]
    assert choose_order("auto", records(bodies), cache).in_groups == grouped


def test_lines_of_a_model_are_put_together_and_then_those_of_a_document() -> None:
    bodies = [
        chat(f"{text(d, 300)} {text(70 + q, 60)}", **({"model": model} if model else {}))
        for q in range(3) for d in range(2) for model in ("b", "a", "")
    ]  # fmt: skip
    found = planned(bodies)
    names = [orjson.loads(bodies[n]).get("model", "") for n in found.order]
    assert names == ["b"] * 6 + ["a"] * 6 + [""] * 6
    assert found.order.tolist()[:6] == [0, 6, 12, 3, 9, 15]
    assert (found.models, found.changes) == (3, 17)
    assert found.groups == 6


def test_lines_without_a_text_or_a_common_beginning_are_put_together_by_model() -> None:
    bodies = [orjson.dumps({"model": "ab"[n % 2], "input": str(n)}) for n in range(6)]
    assert planned(bodies, EMBEDDINGS_URL).order.tolist() == [0, 2, 4, 1, 3, 5]
    assert planned(bodies, EMBEDDINGS_URL).saved == 0


@pytest.mark.parametrize(
    ("models", "grouped"),
    [("aaaa", False), ("aabb", False), ("abab", True), ("aaba", True), ("", False), ("abc", False)],
)
def test_auto_groups_models_that_alternate(models: str, grouped: bool) -> None:
    bodies = [chat(text(n, 100), model=model) for n, model in enumerate(models)]
    choice = choose_order("auto", records(bodies), 0)
    assert choice.in_groups == grouped
    assert choose_order("auto", records(bodies), 10**6, choice.name).name == choice.name


def test_auto_leaves_a_file_without_anything_in_common() -> None:
    bodies = [chat(text(n, 800)) for n in range(50)]
    choice = choose_order("auto", records(bodies), 100)
    assert (choice.name, choice.order, choice.plan.groups) == ("input", None, 0)


def test_an_interrupted_submit_keeps_its_order_whatever_the_cache_is_now() -> None:
    bodies = [chat(f"{text(n % 8, 2_000)} {text(50 + n, 100)}") for n in range(64)]
    small = choose_order("auto", records(bodies), 100)
    assert choose_order("auto", records(bodies), 10**6, small.name).name == small.name
    assert choose_order("auto", records(bodies), 100, "input").name == "input"


_stems = st.sampled_from([text(n, 64 * n) for n in range(1, 12)])
_texts = st.lists(st.lists(_stems, min_size=1, max_size=3).map("".join), max_size=40)


@given(_texts)
def test_each_request_has_one_place_and_equal_ones_keep_their_order(texts: list[str]) -> None:
    bodies = [chat(text) for text in texts]
    order = planned(bodies).order.tolist()
    assert sorted(order) == list(range(len(bodies)))
    for body in set(bodies):
        places = [order.index(n) for n in range(len(bodies)) if bodies[n] == body]
        assert places == sorted(places)


@given(_texts)
def test_groups_of_every_level_are_adjacent_and_begin_in_the_order_of_the_file(
    texts: list[str],
) -> None:
    found = records([chat(text) for text in texts])
    order = prefix_order(found).order
    path = [()] * len(texts)
    for level in range(found.levels):
        path = [(*p, k) for p, k in zip(path, found.column(level).tolist(), strict=True)]
        walk = [path[n] for n in order]
        begins = [at for at, p in enumerate(walk) if at == 0 or walk[at - 1] != p]
        assert len(begins) == len(set(walk))  # each group in one piece
        assert all(
            order[at] == min(n for n, p in enumerate(path) if p == walk[at]) for at in begins
        )


@given(_texts)
def test_records_on_disk_give_the_same_plan_as_those_in_memory(texts: list[str]) -> None:
    bodies = [chat(text) for text in texts] * 2
    kept, spooled = records(bodies), records(bodies, in_memory=0)
    assert prefix_order(kept).fingerprint == prefix_order(spooled).fingerprint
    spooled.close()


def test_many_records_are_written_to_disk_in_groups() -> None:
    draw = np.random.default_rng(1)
    kept, spooled = PrefixKeys(10**6), PrefixKeys(1_000)
    for _ in range(50):
        keys = draw.integers(1, 9, (500, draw.integers(1, 6)), dtype=np.uint64)
        sizes = np.full(500, 64, dtype=np.uint32)
        kept.add(keys, sizes, [""] * len(sizes))
        spooled.add(keys, sizes, [""] * len(sizes))
    for level in range(kept.levels):
        assert (kept.column(level) == spooled.column(level)).all()
    assert len(spooled) == 25_000
    assert (prefix_order(kept).order == prefix_order(spooled).order).all()
    spooled.close()


def test_the_same_file_gives_the_same_plan_in_every_version() -> None:
    bodies = [chat(f"{text(n % 7, 900)} {text(n, 90)}") for n in range(60)]
    assert planned(bodies).fingerprint == "2b758e300ef043c5"


def test_a_spool_reads_what_was_written_and_leaves_no_file(tmp_path: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    spool = Spool()
    spool.add([b"one", b"", b"three"])
    assert [spool.read(n) for n in (2, 0, 1)] == [b"three", b"one", b""]
    spool.add([b"four"])
    assert spool.read(3) == b"four"
    assert len(spool) == 4
    assert list(tmp_path.iterdir()) == []
    spool.close()


@pytest.mark.parametrize("line", [
    b'{"messages":[{"role":"user","content":null}],"tools":null}',
    b'{"messages":[{"role":"user","content":[]}]}',
    b'{"messages":[{"role":"user","content":"x","z":' + b"[" * 240 + b"]" * 240 + b"}]}",
    b'{"messages":[{"role":"user","content":[{"type":"x","z":' + b"[" * 235 + b"]" * 235 + b"}]}]}",
    b'{"messages":[{"role":"user","content":"x"}],"chat_template_kwargs":{"a":12345678901234567}}',
    b'{"prompt":[2147483647]}', b'{"prompt":[[1,2],[3]]}', b'{"prompt":[1,"a"]}',
    b'{"prompt":"' + b"x" * 600_000 + b'"}',
])  # fmt: skip
def test_whatever_the_check_of_lines_lets_through_has_a_text(line: bytes) -> None:
    request = parse_line(line)
    keys, sizes = keys_of([text_of(request.url, request.body)] * 3)
    assert keys.shape[0] == len(sizes) == 3
    assert (keys == keys[0]).all()
