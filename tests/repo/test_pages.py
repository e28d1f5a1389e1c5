"""Pages keep to what they promise: their size, their words, their links, and the messages that
they quote."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from kit.commands.pages import DOCS

from contract.errors import WarmqError
from demo.stack import ROOT

#: Files that may name a page.
TEXTS = {".js", ".lua", ".md", ".py", ".toml", ".txt", ".yaml", ".yml"}
#: The pages that count for size and words.
READ = [page for page in DOCS if "evidence" not in page.parts]

# -- sizes -----------------------------------------------------------------------------------------


def words(page: Path) -> int:
    """Return how many words a page has; rules of tables and the like are none."""
    return sum(any(map(str.isalnum, word)) for word in page.read_text().split())


def test_all_pages_together_are_short() -> None:
    assert sum(map(words, READ)) <= 45_000


@pytest.mark.parametrize("name", ["architecture.md", "performance.md"])
def test_an_explanation_is_short(name: str) -> None:
    assert words(ROOT / "docs/explanation" / name) <= 2_500


def test_the_readme_is_short_and_its_only_table_is_the_indexs() -> None:
    readme, index = ROOT / "README.md", ROOT / "docs/index.md"
    text = readme.read_text()
    assert text.count("\n") <= 120
    rows = re.findall(r"^\|.*$", text, re.MULTILINE)
    shown = re.sub(r"\]\((?!https?:)", "](docs/", index.read_text())
    assert rows == re.findall(r"^\|.*$", shown, re.MULTILINE)


def test_the_index_names_every_page() -> None:
    links = set(re.findall(r"\]\(([^)]+\.md)\)", (ROOT / "docs/index.md").read_text()))
    pages = {str(path.relative_to(ROOT / "docs")) for kind in
             ("tutorials", "how-to", "reference", "explanation")
             for path in (ROOT / "docs" / kind).glob("*.md")}  # fmt: skip
    assert pages - links == {"how-to/rbln.ko.md"}


# -- links -----------------------------------------------------------------------------------------


def anchors(page: Path) -> set[str]:
    """Return the names that GitHub gives a page's headings."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


#: Everything with links, the changelog and the pages of folders of code too.
LINKED = sorted({
    *DOCS, ROOT / "CHANGELOG.md", *(ROOT / "models").rglob("*.md"), *(ROOT / "tests").rglob("*.md"),
    *(ROOT / "compose").rglob("*.md"),
})  # fmt: skip


@pytest.mark.parametrize("page", LINKED, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_pages_links_lead_to_files_and_headings_that_are_there(page: Path) -> None:
    missing = []
    for shown, link in re.findall(r"\[([^\]]*)\]\(([^)\s]+)\)", page.read_text()):
        name, _, anchor = link.partition("#")
        if re.fullmatch(r"[\w./-]+\.md", shown) and name:
            assert Path(shown).name == Path(name).name
        target = page.parent / name if name else page
        if "://" in link or not target.exists():
            missing += [link] * ("://" not in link)
        elif anchor and target.suffix == ".md" and anchor not in anchors(target):
            missing.append(link)
    assert missing == []


def test_a_page_that_any_file_names_is_there() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    named = re.compile(r"(?<![\w/.-])docs/[\w/.-]*\w\.(?:md|svg|png|json)\b")
    missing = []
    for name in filter(None, listed.split("\0")):
        if Path(name).suffix in TEXTS or Path(name).name in ("Makefile", "setup"):
            text = (ROOT / name).read_text() if (ROOT / name).is_file() else ""
            missing += [(name, page) for page in named.findall(text) if not (ROOT / page).exists()]
    assert missing == []


# -- messages --------------------------------------------------------------------------------------


def said() -> Iterator[str]:
    """Yield all texts of the code; what is filled in stands there as `…`."""
    for side in ("contract", "gateway", "producer", "worker"):
        for path in (ROOT / side).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.JoinedStr):
                    yield "".join(
                        str(part.value) if isinstance(part, ast.Constant) else "…"
                        for part in node.values
                    )
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    yield re.sub(r"%(\.\d)?[sdgf]|\{[^{}]*\}", "…", node.value)


def quoted() -> list[str]:
    """Return the messages in the first columns of troubleshooting.md, other programs' not."""
    page = (ROOT / "docs/how-to/troubleshooting.md").read_text().split("\n## Messages of other")[0]
    return re.findall(r"^\| `([^`]+)` \|", page, re.MULTILINE)


def test_a_file_of_the_product_that_a_page_or_a_comment_names_is_there() -> None:
    rooms = ("contract", "gateway", "producer", "worker")
    named = re.compile(rf"(?<![\w/])(?:{'|'.join(rooms)})/[\w/-]+\.(?:py|lua)\b")
    sources = [path for room in rooms for path in (ROOT / room).rglob("*")
               if path.suffix in (".py", ".lua")]  # fmt: skip
    found = {(str(path.relative_to(ROOT)), name)
             for path in [*DOCS, *sources] for name in named.findall(path.read_text())}  # fmt: skip
    assert len(found) > 100
    assert {(where, name) for where, name in found if not (ROOT / name).exists()} == set()


@pytest.fixture(scope="module")
def texts() -> list[str]:
    return [*dict.fromkeys(said())]


def is_said(message: str, texts: list[str]) -> bool:
    """Whether one text has all parts of a message in their order; a filled-in part may be any."""
    parts = [part.strip() for part in message.split("…") if part.strip()]
    wanted = re.compile(".*".join(map(re.escape, parts)), re.DOTALL)
    return any(wanted.search(text) for text in texts)


@pytest.mark.parametrize("message", quoted())
def test_what_troubleshooting_quotes_is_said_by_the_code(message: str, texts: list[str]) -> None:
    # A state, or a remedy in brackets, is filled in where the message is made.
    first, *rest = re.split(r": (?=starting|degraded)|(?<=…) (?=\()", message)
    assert is_said(first, texts)
    assert all(is_said(part.strip("()"), texts) for part in rest)


def test_what_nobody_says_is_noticed(texts: list[str]) -> None:
    assert len(quoted()) > 15
    assert not is_said("WARMQ_MODEL: there is no such thing", texts)
    assert WarmqError.code in texts
