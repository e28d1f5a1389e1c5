"""The status of a batch is the same in the API, on the page and in the commands."""

from __future__ import annotations

import pytest

from contract.batch import Batch

ENDED = {"created_at": "1", "sealed": "1", "finished_at": "9", "total": "2"}


@pytest.mark.parametrize(("fields", "status"), [
    ({"valid": "2", "completed": "2"}, "completed"),
    ({"valid": "2", "failed": "2"}, "completed"),
    ({"failed": "2"}, "failed"),
    ({"failed": "2", "over_http": "1"}, "completed"),
    ({"valid": "2", "completed": "1", "expired": "1"}, "expired"),
])  # fmt: skip
def test_the_status_of_an_ended_batch_is_openais(fields: dict[str, str], status: str) -> None:
    assert Batch("b", ENDED | fields).status == status
