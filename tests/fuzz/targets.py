"""What the fuzzer calls with its bytes; anything but a clear refusal is a finding."""

from __future__ import annotations

import gzip
import io
import tempfile
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import orjson
import zstandard
from kit.commands.error_codes import error_codes

from contract.errors import RequestRejected
from contract.message import MessageWriter, read_body, read_delivery
from contract.naming import request_id
from contract.openai.lines import parse_line
from contract.results import failure_meta, result_line, success_meta
from gateway.batches.api.record import BatchPart
from gateway.batches.runner.input_file import validate_input
from gateway.batches.runner.queueing import PartLines
from producer.input.reader import Input, chunks
from producer.submit.order.keys import text_of
from worker.drain.endings import failed
from worker.drain.serve import read_request
from worker.settings import WorkerSettings

_SEED = "00" * 32
_WRITER = MessageWriter("b", 1, "life", "warmq", 6, 2.5)
_SETTINGS = WorkerSettings(engine="simulated", served_model_name="m")


def refused(error: RequestRejected) -> None:
    """Check that a refusal is one that a person can use and a terminal can show."""
    assert error.code in error_codes(), error.code
    assert len(error.message) < 1000
    assert error.message.isprintable()


def lines(data: bytes) -> None:
    """An input file: cut into lines, each a request that survives its message, or refused."""
    for chunk in chunks(io.BufferedReader(io.BytesIO(data)), _SEED, 5000):
        for number, raw in chunk.lines:
            try:
                request = parse_line(raw)
            except RequestRejected as error:
                refused(error)
                meta = failure_meta("id", error, custom_id=error.custom_id, line=number)
                assert result_line("id", "c", number, meta).failed
                continue
            rid = request_id("b", request.custom_id or "")
            message = _WRITER.write(rid, request.custom_id, number, request.url, request.body)
            delivery = read_delivery("w/1", message)
            assert (delivery.request_id, delivery.custom_id) == (rid, request.custom_id)
            assert (delivery.line, delivery.deadline) == (number, 2.5)
            assert read_body(delivery) == orjson.loads(request.body)


def messages(data: bytes) -> None:
    """A message in the queue: read and checked as the worker does, to a readable ending."""
    try:
        delivery = read_delivery("w/1", data)
    except RequestRejected as error:
        assert error.message
        return
    if not isinstance(delivery.request_id, str):
        return  # POP lets only usable ids through
    try:
        read_request(delivery, ["m"])
    except RequestRejected as error:
        refused(error)
        meta = failed(delivery, error).meta
    else:
        meta = success_meta(delivery, b"{}", {})
    stored = orjson.loads(meta)
    assert stored["task_id"] == delivery.request_id
    result_line(delivery.request_id, "c", 1, meta)


def bodies(data: bytes) -> None:
    """The content of a message whose envelope is right."""
    envelope = _ENVELOPE | {"body": data.decode(errors="replace")}
    messages(orjson.dumps(envelope))


def files(data: bytes) -> None:
    """A batch's whole way in: a file, packed as its first byte says, looked through, queued, read
    by a worker; its other bytes may stand for many more."""
    if not data:
        return
    how, content = data[0], data[1:]
    content *= (1, 1, 10, 1000)[how % 4] if len(content) < 1000 else 1
    packed = (content, gzip.compress(content, 1), zstandard.compress(content))[how // 4 % 3]
    with tempfile.NamedTemporaryFile() as file:
        file.write(packed)
        file.flush()
        looked = validate_input(Path(file.name), "/v1/chat/completions", 5000, 50_000)
        for problem in looked.problems:
            assert 0 < len(problem.message) < 1000, problem.code
        if looked.problems:
            return
        models = sorted(looked.bytes_of)
        parts = [
            BatchPart("a", "", "warmq", models[::2]),
            BatchPart("b", "", "other", models[1::2]),
        ]
        count = 0
        for at in range(2):
            sharing = PartLines(parts, at)
            with closing(Input(file.name)) as source:
                for chunk in sharing.chunks(source.chunks(_SEED, 5000)):
                    count += len(chunk.lines)
                    for number, raw in chunk.lines:
                        _queued(sharing, number, raw)
        assert count == looked.requests


def _queued(sharing: PartLines, number: int, raw: bytes) -> None:
    try:
        request = parse_line(raw)
        sharing.check(request)
    except RequestRejected as error:
        refused(error)
        return
    text_of(request.url, request.body)
    rid = request_id("b", request.custom_id or "")
    messages(_WRITER.write(rid, request.custom_id, number, request.url, request.body))


_ENVELOPE = orjson.loads(_WRITER.write("id", "c", 1, "/v1/completions", b"{}"))
TARGETS: dict[str, Callable[[bytes], None]] = {
    "lines": lines,
    "messages": messages,
    "bodies": bodies,
    "files": files,
}
