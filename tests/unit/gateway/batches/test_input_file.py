"""What refuses a batch's whole file at the gateway, and by which name."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest

from contract.errors import RequestRejected
from contract.openai.lines import parse_line
from gateway.batches.runner.input_file import validate_input

URL = "/v1/completions"


def line(custom_id: str, prompt: str = "x") -> bytes:
    body = {"model": "m", "prompt": prompt}
    return orjson.dumps({"custom_id": custom_id, "method": "POST", "url": URL, "body": body})


@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_line_that_is_too_long_refuses_the_file_by_its_number(
    tmp_path: Path, number: int
) -> None:
    lines = [line("a"), line("b")]
    lines.insert(number - 1, line("long", "y" * 2000))
    path = tmp_path / "f.jsonl"
    path.write_bytes(b"\n".join(lines))
    (problem,) = validate_input(path, URL, 1000, 0).problems
    assert (problem.code, problem.line) == ("line_too_long", number)
    assert "WARMQ_MAX_LINE_BYTES" in problem.message
    assert not validate_input(path, URL, 10_000, 0).problems


def test_a_custom_id_that_is_too_long_is_shown(tmp_path: Path) -> None:
    long = line("/data/" + "x" * 507)
    path = tmp_path / "f.jsonl"
    path.write_bytes(line("/data/" + "x" * 506) + b"\n" + long)
    (problem,) = validate_input(path, URL, 10_000, 0).problems
    assert (problem.param, problem.line) == ("custom_id", 2)
    assert "513 characters; give at most 512" in problem.message
    with pytest.raises(RequestRejected, match=r"'/data/xxx.* has 513 characters"):
        parse_line(long)
