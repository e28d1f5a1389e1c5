"""Product and pages use the field's terms: no name and no sentence has one of these words."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("contract", "gateway", "producer", "worker")
SUFFIXES = (".py", ".lua", ".html", ".js")
#: Words that stood for things with names of their own: an error's text, headers, peers, a receiver.
BANNED = frozenset((
    "befall", "befalls", "befell", "beside", "besides", "deaf", "hear", "heard", "hears", "lesson",
    "lessons", "mend", "mended", "mends", "others", "said", "say", "saying", "says", "told",
    "vacate", "vacates",
))  # fmt: skip
#: A file, and what its line has of a form that stays: a field in Redis, one of `doctor --json`.
KEPT_FORMS = (
    ("gateway/batches/api/record.py", 'name="told"'),
    ("producer/cli/doctor/work.py", '"others": served'),
    ("producer/stalls.py", '"others": list(served)'),
)
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md"] + [
    page for page in sorted((ROOT / "docs").rglob("*.md")) if "evidence" not in page.parts
]


def words_of(text: str) -> set[str]:
    """Return the words of a text; those inside identifiers, too."""
    return set(re.findall(r"[a-z]+", re.sub(r"([A-Z]+)", r"_\1", text).lower()))


def uses_in(path: Path) -> list[str]:
    """Return the lines of a file that use a banned word."""
    name = str(path.relative_to(ROOT))
    kept = [form for file, form in KEPT_FORMS if file == name]
    return [
        f"{name}:{number}: {line.strip()}"
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if words_of(line) & BANNED and not any(form in line for form in kept)
    ]


@pytest.mark.parametrize("package", PACKAGES)
def test_no_name_and_no_sentence_of_the_product_has_a_banned_word(package: str) -> None:
    files = [p for p in sorted((ROOT / package).rglob("*")) if p.suffix in SUFFIXES]
    assert files
    assert [use for path in files for use in uses_in(path)] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_page_has_a_banned_word(page: Path) -> None:
    assert uses_in(page) == []


def test_words_inside_identifiers_are_found() -> None:
    assert words_of("self._toldBefore = held_by_others") & BANNED == {"told", "others"}
