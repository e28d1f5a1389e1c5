"""The rule that decides which failed requests can run again."""

import re
from pathlib import Path

from contract.failures import CodeFailures, is_wrong, wrong_count, wrong_text

ERRORS = Path(__file__).parents[3] / "docs/reference/errors.md"


def test_the_documented_codes_of_wrong_requests_come_first() -> None:
    table = ERRORS.read_text().partition("## Error codes")[2].partition("## Exit")[0]
    codes = re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)
    wrong = [code for code in codes if is_wrong(code)]
    assert len(wrong) == 9
    assert codes[:9] == wrong


def test_the_text_counts_and_names_only_wrong_requests() -> None:
    codes = [CodeFailures("broken", 4), CodeFailures("context_length_exceeded", 1)]
    assert wrong_text(codes[:1]) == ""
    assert (
        wrong_text(codes) == "1 failed line is wrong itself (1 context_length_exceeded): correct it"
    )
    codes.append(CodeFailures("unknown_field", 1200))
    assert wrong_count(codes) == 1201
    assert wrong_text(codes).startswith("1,201 failed lines are wrong themselves (1 context")
    assert not is_wrong("") and not is_wrong(None)
