"""Fields of OpenAI's requests that vLLM has not: left out, or refused in words.

openai_parameters.json has the names of the parameters that OpenAI's Python client takes, and its
version; they are `__annotations__` of CompletionCreateParamsBase in openai.types.chat and
openai.types, and of EmbeddingCreateParams.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest

from contract.errors import RequestRejected
from contract.message import Delivery, MessageWriter, read_delivery
from contract.openai.body import BODY_TYPES, CHAT_URL, COMPLETION_URL, field_names, min_body
from contract.openai.fields import IGNORED, REFUSED, known_names
from contract.openai.lines import check_body, parse_line
from worker.drain.serve import read_request

THEIRS: dict[str, Any] = orjson.loads(
    Path(__file__).with_name("openai_parameters.json").read_bytes()
)
URLS = [url for url in BODY_TYPES if url in THEIRS]
STREAM = {"stream_options"}
#: What OpenAI's documentation shows of the fields that are left out.
HARMLESS: dict[str, Any] = {
    "metadata": {"project": "eval-7", "run": "3"},
    "prediction": {"type": "content", "content": "class User {}"},
    "prompt_cache_key": "doc-1234",
    "prompt_cache_options": {"mode": "explicit"},
    "prompt_cache_retention": "24h",
    "safety_identifier": "user-hash",
    "service_tier": "flex",
    "store": True,
}
#: What would change the answer.
REFUSED_VALUES: dict[str, Any] = {
    "audio": {"voice": "alloy", "format": "wav"},
    "best_of": 3,
    "function_call": "auto",
    "functions": [{"name": "f"}],
    "modalities": ["text", "audio"],
    "moderation": {"model": "omni"},
    "verbosity": "low",
    "web_search_options": {},
}


def line(url: str, **fields: Any) -> bytes:
    body = min_body(url) | fields
    return orjson.dumps({"custom_id": "a", "method": "POST", "url": url, "body": body})


@pytest.mark.parametrize("url", URLS)
def test_every_field_of_openais_client_is_taken_left_out_or_refused_in_words(url: str) -> None:
    assert set(THEIRS[url]) - known_names(url) <= STREAM
    ours = known_names(url) - field_names(url)
    assert ours <= set(THEIRS[url]), "OpenAI does not know these (any more)"


def test_what_vllm_has_itself_is_never_left_out() -> None:
    for url in BODY_TYPES:
        assert field_names(url).isdisjoint(IGNORED.get(url, set()) | REFUSED.get(url, {}).keys())


@pytest.mark.parametrize("name", sorted(IGNORED[CHAT_URL]))
def test_a_field_without_meaning_here_is_left_out_and_named(name: str) -> None:
    request = parse_line(line(CHAT_URL, max_tokens=5, **{name: HARMLESS[name]}))
    assert orjson.loads(request.body) == min_body(CHAT_URL) | {"max_tokens": 5}
    assert request.ignored == (name,)


@pytest.mark.parametrize("url", [CHAT_URL, COMPLETION_URL])
def test_a_field_that_asks_for_another_answer_is_refused_in_words(url: str) -> None:
    for name, (harmless, _) in REFUSED[url].items():
        with pytest.raises(RequestRejected, match=r"remove it|use `") as caught:
            parse_line(line(url, **{name: REFUSED_VALUES[name]}))
        assert (caught.value.code, caught.value.field) == ("invalid_request", f"body.{name}")
        for value in (None, harmless):
            body = orjson.loads(parse_line(line(url, **{name: value})).body)
            assert body == min_body(url)


def test_nulls_are_not_named_as_left_out() -> None:
    request = parse_line(line(CHAT_URL, store=None, stream=None, stream_options=None, audio=None))
    assert orjson.loads(request.body) == min_body(CHAT_URL)
    assert request.ignored == ()


@pytest.mark.parametrize("url", URLS)
def test_a_field_of_another_endpoint_is_unknown(url: str) -> None:
    others = set().union(*(THEIRS[u] for u in URLS)) - known_names(url) - STREAM
    for name in others:
        with pytest.raises(RequestRejected, match="unknown to"):
            check_body(url, min_body(url) | {name: 1})


def test_a_worker_gives_its_engine_no_field_that_only_openai_has() -> None:
    def delivered(**fields: Any) -> Delivery:
        writer = MessageWriter("b1", 1, "life", "warmq", 6)
        body = orjson.dumps(min_body(CHAT_URL) | fields)
        return read_delivery("w/1", writer.write("rid", "a", 1, CHAT_URL, body))

    assert read_request(delivered(**HARMLESS, seed=1), ()).body == min_body(CHAT_URL) | {"seed": 1}
    with pytest.raises(RequestRejected, match=r"body\.web_search_options: nothing is searched"):
        read_request(delivered(web_search_options={}), ())
