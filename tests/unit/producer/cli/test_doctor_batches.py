"""What `doctor` prints about unfinished batches."""

from __future__ import annotations

from contract.batch import Batch
from producer.cli.doctor.work import _open_batches


def test_a_run_that_has_queued_nothing_more_waits_for_its_command() -> None:
    fields = {"created_at": "1", "sealed": "1", "windows": "1", "total": "5", "unread": "70"}
    finding = _open_batches([Batch("run_1", fields | {"completed": "5"})], 9.0)
    assert "5/5+ done" in finding.text
    assert finding.text.endswith("the same command goes on.")
    finding = _open_batches([Batch("run_1", fields | {"completed": "4"})], 9.0)
    assert "4/5+ done" in finding.text
    assert finding.text.endswith(" ago")
