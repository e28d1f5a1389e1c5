"""What the commands and the library say of a result that another program wrote."""

from __future__ import annotations

import orjson
import pytest
import redis
from kit.protocol.lessee import now, submit_batch

from contract.redis import keys
from contract.redis.batches import BatchStore
from contract.results import result_line
from producer.cli import show
from producer.cli.commands.watch import stream_text
from producer.client.batch import Result
from producer.collect.columns import OutputColumns

RESULTS = {
    b'{"status":"REVOKED","warmq":7}': "failed",
    b'{"status":"SUCCESS"}': "completed",
    b'{"status":"SUCCESS","result":7,"warmq":{"timing":{"attempts":"x"}}}': "completed",
    b'{"status":"SUCCESS","result":{"choices":7,"usage":7},"warmq":[]}': "completed",
    b'{"status":"SUCCESS","result":{"choices":["x"],"usage":{"prompt_tokens":"x"}}}': "completed",
    b'{"status":"SUCCESS","result":{"choices":[{"message":7,"finish_reason":[]}]}}': "completed",
    b'{"status":"SUCCESS","result":{"type":"message","content":[7],"stop_reason":7}}': "completed",
    b'{"status":"SUCCESS","result":{"object":"response","output":7,"status":{}}}': "completed",
    b'{"status":"SUCCESS","result":{"object":"response","output":[{"type":"message",'
    b'"content":[{"type":"output_text","text":7}]}]}}': "completed",
    b'{"status":"FAILURE","date_done":"0001-01-01","warmq":{"error":{"code":7}}}': "failed",
    b'{"status":"SUCCESS","result":' + 300 * b"[" + 300 * b"]" + b"}": "failed",
    b'{"status":"SUCCESS","result":{},"warmq":{"timing":' + 5000 * b"[": "failed",
    b"[" * 5000: "failed",
    b"pickled": "failed",
}


@pytest.mark.parametrize("raw", RESULTS, ids=lambda raw: raw[:90].decode())
def test_a_result_of_another_program_breaks_no_reader(
    redis_client: redis.Redis, store: BatchStore, raw: bytes
) -> None:
    (request_id,) = submit_batch(store, 1).ids
    redis_client.set(keys.result_key(request_id), raw)
    assert stream_text(store, now(store), "c1") == RESULTS[raw]
    entries: list[dict[str, str]] = []
    assert stream_text(store, now(store), "c1", entries.append) == RESULTS[raw]
    state = show.request_state(store, now(store), "c1")
    assert state["status"] == RESULTS[raw]
    show.print_request(state)


@pytest.mark.parametrize("raw", RESULTS, ids=lambda raw: raw[:90].decode())
def test_a_result_of_another_program_has_a_row(raw: bytes) -> None:
    line = result_line("t0", "c7", 7, raw)
    assert isinstance(Result(line).text, str | None)
    assert Result(line).ok or Result(line).error is not None
    row = OutputColumns().row(line)
    orjson.dumps(row)
    assert row["line"] == 7
    texts = ("text", "finish_reason", "error_code", "error_message", "response")
    assert all(isinstance(row[name], str | None) for name in texts)
    numbers = ("prompt_tokens", "completion_tokens")
    assert all(isinstance(row[name], int | None) for name in numbers)
