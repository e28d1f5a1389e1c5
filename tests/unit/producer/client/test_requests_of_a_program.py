"""What a program gives: odd objects are refused by name, and nothing is lost or added."""

from __future__ import annotations

import copy
import importlib
import pickle
import pkgutil
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import orjson
import pandas as pd  # type: ignore[import-untyped]
import polars as pl
import pyarrow as pa
import pytest

import producer
from contract.batch import Batch as QueueBatch
from contract.errors import RequestRejected, WarmqError
from contract.openai.lines import parse_line
from contract.settings import Settings
from producer import AsyncBatch, AsyncClient
from producer.cli.context import open_input
from producer.client.batch import Batch
from producer.client.client import Client, _source, submission_of
from producer.collect.answers import finish_reason_of, text_of, tokens_of
from producer.input.iterable import IterableSource
from producer.input.options import BadOption, check_column_conflicts
from producer.input.reader import Input, InputUnreadable
from producer.input.source import Source

datasets = pytest.importorskip("datasets")
SEED = "00" * 32


def lines(source: Source) -> list[Any]:
    return [orjson.loads(line) for chunk in source.chunks(SEED, 10**6) for _, line in chunk.lines]


def errors(source: Source) -> list[str]:
    found = []
    for chunk in source.chunks(SEED, 10**6):
        for number, line in chunk.lines:
            with pytest.raises(RequestRejected) as raised:
                parse_line(line)
            assert chunk.explain is not None
            found.append(chunk.explain(number, line, raised.value).message)
    return found


def test_an_array_is_refused_with_what_to_give() -> None:
    with pytest.raises(BadOption, match=r"is not accepted.*give a data frame"):
        _source(pa.chunked_array([["a"]]), {"prompt": "x"})


def test_a_stream_that_breaks_names_the_row() -> None:
    schema = pa.schema([("prompt", pa.string())])

    def batches() -> Iterator[pa.RecordBatch]:
        yield pa.record_batch([["a", "b"]], schema=schema)
        raise ValueError("the disk is gone")

    source = _source(pa.RecordBatchReader.from_batches(schema, batches()), {})
    with pytest.raises(InputUnreadable, match=r"after row 2: .*disk is gone"):
        lines(source)


def test_an_object_of_pandas_that_arrow_cannot_hold_is_refused() -> None:
    frame = pd.DataFrame({"prompt": ["a", 5, object()]})
    with pytest.raises(WarmqError, match="is not accepted"):
        _source(frame, {})


@pytest.mark.parametrize("bias", [{5: -100}, {"5": -100}])
def test_keys_that_are_numbers_are_texts(bias: Any) -> None:
    (line,) = lines(_source([{"prompt": "x", "logit_bias": bias}], {}))
    assert line["logit_bias"] == {"5": -100}


@pytest.mark.parametrize("value", [object(), {1, 2}, b"x", 2**70, "\ud83d", 1j, [object()]])
def test_what_json_does_not_have_names_its_field(value: Any) -> None:
    requests = [{"custom_id": "a", "prompt": "x", "stop": value}]
    (told,) = errors(_source(requests, {}))
    assert told.startswith("request 1: field stop: cannot be written as JSON")


TOOLS = [
    {"tools": [{"function": {"name": "w", "parameters": {"properties": {"city": {"n": 1}}}}}]},
    {"tools": [{"function": {"name": "c", "parameters": {"properties": {"amount": {"n": 2}}}}}]},
]


@pytest.mark.parametrize("columns", [{}, {"prompt": "prompt", "tools": "tools"}])
@pytest.mark.parametrize("streamed", [False, True])
def test_rows_of_a_data_set_have_their_own_keys(streamed: bool, columns: Any) -> None:
    rows = [{"prompt": "x", **row, "stop": ["a", None]} for row in TOOLS]
    found = datasets.Dataset.from_list(rows)
    assert found[0]["tools"] != TOOLS[0]["tools"]  # padded
    found = found.to_iterable_dataset() if streamed else found
    source = _source(found, columns)
    assert [line["tools"] for line in lines(source)] == [row["tools"] for row in TOOLS]
    assert source.size == (None if streamed else 2)
    if not columns:
        assert lines(source.reopen())[0]["stop"] == ["a", None]


@pytest.mark.skipif(not hasattr(datasets, "Json"), reason="an older release of datasets")
def test_json_in_a_data_set_keeps_its_nulls() -> None:
    features = datasets.Features(
        {"prompt": datasets.Value("string"), "chat_template_kwargs": datasets.Json()}
    )
    rows = [{"prompt": "x", "chat_template_kwargs": {"default": None, "a": [None]}}]
    found = lines(_source(datasets.Dataset.from_list(rows, features=features), {}))
    assert found[0]["chat_template_kwargs"] == {"default": None, "a": [None]}


def test_a_dict_keeps_its_nulls() -> None:
    request = {"prompt": "x", "structured_outputs": {"json": {"const": None}}}
    assert lines(_source([request], {})) == [request]


def test_clients_and_batches_can_be_pickled() -> None:
    settings = Settings(redis_url="redis://:secret@127.0.0.1:1/0")
    client = pickle.loads(pickle.dumps(Client("redis://127.0.0.1:1/0", queue="q")))
    assert client._settings.queue == "q"
    store: Any = object()
    batch = pickle.loads(pickle.dumps(Batch(store, QueueBatch("b1", {}), settings)))
    assert batch.id == "b1"
    with pytest.raises(WarmqError, match=r"127\.0\.0\.1:1"):
        batch.status()


@pytest.mark.parametrize("field", ["prompt", "max_tokens"])
def test_a_column_of_its_own_name_is_a_source(tmp_path: Any, field: str) -> None:
    file = tmp_path / "t.csv"
    file.write_text("prompt,max_tokens\nx,5\n")
    with pytest.raises(BadOption, match=f"--set {field}: a column gives {field} .* leave one out"):
        open_input(str(file), (), {field: "y"})
    assert open_input(str(file), (), {field: None, "top_k": 5})
    frame = pd.DataFrame({"prompt": ["x"], "max_tokens": [5]})
    with pytest.raises(BadOption, match=f"fields {field}: a column gives"):
        check_column_conflicts({field: "y"}, _source(frame, {}), "fields")


@pytest.mark.parametrize("batch_line", [False, True])
@pytest.mark.parametrize("field", ["prompt", "messages", "input", "query", "documents"])
def test_what_a_line_asks_is_not_overwritten(field: str, batch_line: bool) -> None:
    asked = {"prompt": "x", "messages": [{"role": "user", "content": "x"}], "input": "x"}
    urls = {"prompt": "/v1/completions", "messages": "/v1/chat/completions",
            "input": "/v1/embeddings"}  # fmt: skip
    body = {field: asked[field]} if field in asked else {"query": "x", "documents": ["y"]}
    line: Any = {"url": urls.get(field, "/v1/rerank"), "body": body}
    if field in ("prompt", "messages") and not batch_line:
        line = body
    with pytest.raises(RequestRejected, match=f"{field}: is in the line, and given for all"):
        parse_line(orjson.dumps(line), {field: body[field]})
    assert parse_line(orjson.dumps(line), {"model": "m"})
    assert parse_line(b'{"url": "/v1/completions", "body": {}}', {"prompt": "x"})


RESPONSE = {
    "object": "response", "status": "completed", "usage": {"input_tokens": 3, "output_tokens": 2},
    "output": [
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "content": [{"type": "output_text", "text": "a"},
                                        {"type": "output_text", "text": "b"}]},
    ],
}  # fmt: skip
MESSAGE = {
    "type": "message", "stop_reason": "end_turn",
    "content": [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "ab"}],
    "usage": {"input_tokens": 1, "cache_read_input_tokens": 2, "output_tokens": 2},
}  # fmt: skip
CHAT = {
    "choices": [{"message": {"content": "ab"}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 3, "completion_tokens": 2},
}


@pytest.mark.parametrize(
    ("body", "reason"), [(RESPONSE, "completed"), (MESSAGE, "end_turn"), (CHAT, "stop")]
)
def test_what_an_answer_says(body: Any, reason: str) -> None:
    assert (text_of(body), finish_reason_of(body), tokens_of(body)) == ("ab", reason, (3, 2))
    cut = RESPONSE | {"status": "incomplete", "incomplete_details": {"reason": "content_filter"}}
    assert finish_reason_of(cut) == "content_filter"
    assert (text_of({"data": []}), tokens_of({})) == (None, (None, None))


@pytest.mark.parametrize(
    ("head", "told"),
    [
        (b"BZh91AY", "bunzip2"), (b"\xfd7zXZ\0", "unxz"),
        ("{}".encode("utf-16"), "iconv -f UTF-16"),
        (b"PK\3\4", "spreadsheet"), (b"PAR1", r"\.parquet"), (b"ARROW1", r"\.arrow"),
        (b"[" + b" " * 2000, "jq"),
    ],
)  # fmt: skip
def test_files_of_other_forms_are_told(tmp_path: Any, head: bytes, told: str) -> None:
    file = tmp_path / "f"
    file.write_bytes(head)
    source = Input(str(file))
    with closing(source), pytest.raises(InputUnreadable, match=told):
        list(source.chunks(SEED, 1000))


def test_a_table_of_utf_16_names_its_remedy(tmp_path: Any) -> None:
    file = tmp_path / "t.csv"
    file.write_bytes("prompt\nx\n".encode("utf-16"))
    with pytest.raises(InputUnreadable, match="iconv -f UTF-16"):
        open_input(str(file), (), {})


def test_the_old_name_of_dedupe_is_taken_with_a_warning() -> None:
    with pytest.warns(FutureWarning, match="once is now dedupe"):
        old = submission_of({"once": True, "batch_id": "b1"}, Settings())
    assert old == submission_of({"dedupe": True, "batch_id": "b1"}, Settings())


class LengthUnknown(list[dict[str, str]]):
    """Rows whose length is an error, as tqdm's over a generator."""

    def __len__(self) -> int:
        raise TypeError("'NoneType' object cannot be interpreted as an integer")


def test_rows_whose_length_is_an_error_are_read_all_the_same() -> None:
    source = IterableSource(LengthUnknown([{"prompt": "a"}, {"prompt": "b"}]))
    assert [line for chunk in source.chunks(None, 1000) for line in chunk.lines]


def test_every_error_of_the_client_is_a_name_of_the_library() -> None:
    for module in pkgutil.walk_packages(producer.__path__, "producer."):
        if not module.name.startswith(("producer.cli", "producer.__main__")):
            importlib.import_module(module.name)
    # These are kinds of results, or of the commands `plan` and `run` alone.
    others = {"RequestRejected", "RequestFailed", "EngineDead", "NoTokenizer", "RunStopped",
              "RunCancelled", "LocalPartEnded"}  # fmt: skip
    every = set(_below(WarmqError))
    names = {e.__name__ for e in every if e.__module__.startswith(("producer", "contract"))}
    assert {"BatchNotFound", "InputUnreadable", "BadOption", "WritesLost"} <= names
    for name in (names | {"WarmqError"}) - others:
        assert issubclass(getattr(producer, name), WarmqError)
        assert name in producer.__all__


def _below(kind: type) -> Iterator[type]:
    for one in kind.__subclasses__():
        yield one
        yield from _below(one)


@pytest.mark.parametrize("name", [None, "review", "max_tokens"])
@pytest.mark.parametrize("kind", [pd.Series, lambda values, name: pl.Series(name, values)])
def test_a_series_of_texts_has_prompts(kind: Any, name: str | None) -> None:
    source = _source(kind(["a", "b"], name=name), {})
    assert lines(source) == [{"prompt": "a"}, {"prompt": "b"}]
    assert source.size == 2
    assert lines(source.reopen()) == [{"prompt": "a"}, {"prompt": "b"}]


def test_a_series_is_a_column_for_templates() -> None:
    series = pd.Series(["a", None], name="review")
    source = _source(series, {"messages.user": "Kind? {review}"})
    good, bad = source.chunks(SEED, 10**6).__next__().lines
    assert orjson.loads(good[1])["messages"] == [{"role": "user", "content": "Kind? a"}]
    assert bad[1].startswith(b"[")
    with pytest.raises(BadOption, match=r"no column 'text'.*there are review"):
        _source(series, {"messages.user": "Kind? {text}"})


@pytest.mark.parametrize("kind", [pd.Series, pl.Series])
def test_a_series_of_requests_or_chats_is_taken(kind: Any) -> None:
    chat = [{"role": "user", "content": "a"}]
    assert lines(_source(kind([{"prompt": "a"}, {"prompt": "b"}]), {})) == [
        {"prompt": "a"},
        {"prompt": "b"},
    ]
    assert lines(_source(kind([chat]), {})) == [{"messages": chat}]


@pytest.mark.parametrize("key", [5, "5"])
def test_a_bias_for_all_requests_takes_numbers_as_keys(key: Any) -> None:
    submission = submission_of({"fields": {"logit_bias": {key: -100}}}, Settings())
    assert submission.overrides == {"logit_bias": {"5": -100}}
    assert '"logit_bias":{"5":-100}' in submission.options
    assert parse_line(b'{"prompt":"x"}', submission.overrides).body


@pytest.mark.parametrize("value", [object(), {1, 2}, b"x", 1j])
def test_a_field_for_all_requests_that_json_does_not_have_is_named(value: Any) -> None:
    with pytest.raises(BadOption, match=r"fields stop: .*cannot be written as JSON"):
        submission_of({"fields": {"stop": value}}, Settings())


def test_clients_and_batches_for_asyncio_can_be_pickled() -> None:
    client = pickle.loads(pickle.dumps(AsyncClient("redis://127.0.0.1:1/0", queue="q")))
    assert client._client._settings.queue == "q"
    store: Any = object()
    made = AsyncBatch(Batch(store, QueueBatch("b1", {}), Settings()))
    assert pickle.loads(pickle.dumps(made)).id == copy.deepcopy(made).id == "b1"


@pytest.mark.parametrize("fields", [{"guided_choice": ["a"]}, {"temprature": 1}, {"top_p": 7}])
def test_a_field_that_no_request_takes_is_refused_before_queueing(fields: Any) -> None:
    with pytest.raises(BadOption, match=f"fields {next(iter(fields))}"):
        submission_of({"fields": fields}, Settings(_env_file=None))
