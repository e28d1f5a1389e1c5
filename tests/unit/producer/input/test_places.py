"""What messages say of places: never what signs a URL, or a password in it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest

from contract.errors import ExtraMissing, WarmqError
from producer.cli.collect import check_outputs
from producer.collect.outputs import check_output
from producer.input.bucket import redacted
from producer.input.files import part_bytes
from producer.input.source import open_source

SIGNED = "https://user:secret@host/a.jsonl?X-Amz-Signature=secret"


@pytest.mark.parametrize(
    ("use", "told"),
    [
        (lambda: open_source("https:///a.jsonl?sign=secret"), "https:///a.jsonl: no host is"),
        (
            lambda: open_source("htps://user:secret@host/a?sign=secret"),
            "htps://host/a: give an object (s3:",
        ),
        (lambda: open_source(SIGNED, {"prompt": "x"}), "https://host/a.jsonl is not a table"),
        (lambda: check_output(SIGNED), "cannot write https://host/a.jsonl: "),
        (lambda: check_output("https://host/a.csv?sign=secret"), "cannot write https://host/a.csv"),
        (lambda: check_outputs(SIGNED, None, SIGNED), "are the same file, https://host/a.jsonl;"),
    ],
)
def test_a_refusal_names_a_url_without_what_signs_it(use: Callable[[], Any], told: str):
    with pytest.raises(WarmqError) as error:
        use()
    assert told in error.value.message
    assert "secret" not in error.value.message


def test_the_extra_that_is_missing_is_told_without_it_too(monkeypatch: pytest.MonkeyPatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "obstore"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(ExtraMissing, match=r"https://host/a\.jsonl: needs obstore") as error:
        open_source(SIGNED)
    assert "secret" not in error.value.message


@pytest.mark.parametrize("name", ["s3://bucket/what?.jsonl", "gs://b/a@b", "what?.jsonl", "a:b@c"])
def test_names_of_objects_and_files_are_shown_as_they_are(name: str):
    assert redacted(name) == name


@pytest.mark.parametrize("size", [0, 10**9, 10**11, 10**12, 4 * 10**12])
def test_an_object_of_any_size_that_s3_takes_has_fewer_parts_than_it_takes(size: int):
    part = part_bytes(size)
    assert part * 10_000 > 2 * size  # a table may be larger than the lines that it is made of
    assert 5 * 2**20 <= part <= 5 * 2**30  # of a part, S3 takes this much
    assert part % 2**20 == 0
    assert part == 8 * 2**20 or size > 40 * 10**9
