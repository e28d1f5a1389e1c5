"""The page about vLLM's options tells what was seen, and every row did what it must."""

from __future__ import annotations

import json

from options.rows import ROWS
from options.table import PAGE, RESULTS, filled


def test_the_page_has_the_table_of_the_results() -> None:
    page = PAGE.read_text()
    assert filled(page) == page, "python tests/options/run.py --write-docs"


def test_every_row_has_been_run_as_it_is_written_and_none_failed() -> None:
    seen = {row["option"]: row for row in json.loads(RESULTS.read_text())["rows"]}
    assert list(seen) == [row.name for row in ROWS]
    for row in ROWS:
        assert seen[row.name]["args"] == row.args
        assert seen[row.name]["outcome"] == ("refused" if row.refused else "works"), row.name
