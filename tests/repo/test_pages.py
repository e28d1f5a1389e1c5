"""Pages keep to what they promise: their size, their words, their fences, their links, and the
messages that they quote."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
import yaml
from kit.commands.pages import DEVICES, OPTIONS, TUTORIALS, Block, blocks, pattern

from contract.errors import WarmqError
from demo.stack import ROOT
from producer.cli.main import cli

PAGES = sorted(TUTORIALS.glob("*.md"))
DOCS = [ROOT / "README.md", ROOT / "README.ko.md", ROOT / "CONTRIBUTING.md",
        *sorted((ROOT / "docs").rglob("*.md"))]  # fmt: skip
#: Files that may name a page.
TEXTS = {".js", ".lua", ".md", ".py", ".toml", ".txt", ".yaml", ".yml"}
#: What somebody reads; evidence is looked up.
READ = [page for page in DOCS if "evidence" not in page.parts]
#: Where people find out that a line is not for every machine.
WORDS = {"gpu": "needs a GPU", "npu": "needs an NPU", "network": "needs the network"}
#: What a fence may hold; the code of each language is checked below.
LANGUAGES = {"acl", "js", "json", "python", "sh", "text", "toml", "yaml"}
#: Pages whose `sh` fences are typed by a test, without a mark on each.
TYPED = {"how-to": ROOT / "tests/integration/producer/cli/test_how_to_pages.py",
         "tutorials": ROOT / "tests/e2e/test_tutorials.py"}  # fmt: skip


def test_there_is_a_page_for_each_setting_and_something_follows_each() -> None:
    followed = "".join(path.read_text() for path in (
        ROOT / "tests/e2e/test_tutorials.py", ROOT / "tests/rbln/test_tutorial.py"
    ))  # fmt: skip
    assert len(PAGES) == 5
    assert [page.stem for page in PAGES if page.stem not in followed] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_tutorial_is_short_and_its_marks_are_known(page: Path) -> None:
    text = page.read_text()
    found = [*blocks(text)]
    assert text.count("\n") <= 170
    assert text.count("```") == 2 * len(found), "a fence is not closed"
    assert {block.language for block in found} <= LANGUAGES
    assert {name for block in found for name in block.options} <= OPTIONS


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_line_that_needs_a_device_is_named_in_words_too(page: Path) -> None:
    text = page.read_text()
    for device in {block.options["needs"] for block in blocks(text) if "needs" in block.options}:
        assert device in DEVICES
        assert WORDS[device] in text


def test_a_block_has_its_options_and_its_line() -> None:
    page = "words\n\n```sh terminal=worker exit=1\none\ntwo\n```\n\n```text\nsaid\n```\n"
    assert [*blocks(page)] == [
        Block("sh", "one\ntwo\n", 3, {"terminal": "worker", "exit": "1"}),
        Block("text", "said\n", 8, {}),
    ]


@pytest.mark.parametrize("printed", ["a  1 b\nand\nc", "x a 22 b\r\nc d\n"])
def test_printed_lines_are_found_in_their_order(printed: str) -> None:
    assert pattern("a … b\nc\n").search(printed)


@pytest.mark.parametrize("printed", ["c\na 1 b\n", "a 1\nb\nc\n", "a b"])
def test_other_lines_are_not_taken_for_them(printed: str) -> None:
    assert not pattern("a … b\nc\n").search(printed)


# -- sizes ---------------------------------------------------------------------------------------


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


# -- words ---------------------------------------------------------------------------------------

#: Words of the project's own old language, and what English has for them.
BANNED = {
    "told", "beside", "besides", "others", "say", "says", "said", "saying", "mend", "mends",
    "mended", "deaf", "hear", "hears", "heard", "vacate", "vacates", "lesson", "lessons", "befall",
    "befalls", "befell",
}  # fmt: skip


@pytest.mark.parametrize("page", READ, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_has_no_banned_word(page: Path) -> None:
    # The words of tables that are made from code are the code's.
    text = re.sub(r"<!-- (\w+) -->.*?<!-- /\1 -->", "", page.read_text(), flags=re.DOTALL)
    assert BANNED & set(re.findall(r"[a-z]+", text.lower())) == set()


# -- fences --------------------------------------------------------------------------------------


def fences(*languages: str) -> list[pytest.param]:
    """Return all fences of the pages in these languages."""
    return [
        pytest.param(block, id=f"{page.relative_to(ROOT)}:{block.line}")
        for page in DOCS
        for block in blocks(page.read_text())
        if block.language in languages
    ]


@pytest.mark.parametrize("page", DOCS, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_block_of_code_is_a_fence_of_a_known_language(page: Path) -> None:
    text = page.read_text()
    found = [*blocks(text)]
    assert text.count("```") == 2 * len(found), "a fence is not closed, or is indented"
    assert {block.language for block in found} <= LANGUAGES
    assert {name for block in found for name in block.options} <= OPTIONS
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    assert not re.findall(r"\n\n(?: {4}|\t)\S.*", prose), "code that is no fence"


def is_typed(page: Path, block: Block) -> bool:
    """Whether a test follows the page of this fence."""
    return page.parent.name == "tutorials" or page.stem in TYPED["how-to"].read_text()


@pytest.mark.parametrize("page", DOCS, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_is_run_by_a_test_or_says_why_not(page: Path) -> None:
    for block in blocks(page.read_text()):
        if block.language not in ("sh", "js"):
            continue
        reason, run = block.options.get("not-run"), block.options.get("run")
        if run is not None:
            assert [*(ROOT / "tests").rglob(Path(run).name)], (block.line, run)
        elif reason is not None:
            assert len(reason) > 10, block.line
        else:
            assert is_typed(page, block), (block.line, "neither run= nor not-run=")


def producer_commands(block: Block) -> Iterator[list[str]]:
    """Yield the words of each `producer` command of a fence, up to a pipe or the like."""
    for line in block.text.replace("\\\n", " ").splitlines():
        found = re.search(r"(?:^|&& |\bbin/|=\S+ )producer ([a-z].*)", line.strip())
        if found:
            yield re.split(r"\s(?:#|\||&|>|2>)", f"{found[1]} ")[0].split()


@pytest.mark.parametrize("block", fences("sh"))
def test_every_option_of_a_producer_command_is_one(block: Block) -> None:
    for words in producer_commands(block):
        command: click.Command | None = cli
        context = click.Context(cli)
        for word in words:
            if not isinstance(command, click.Group):
                break
            command = command.get_command(context, word)
        assert command is not None, words
        known = {name for param in command.params for name in param.opts}
        used = {word.partition("=")[0] for word in words if re.match(r"--?[a-z]", word)}
        assert used <= known | {"--help"}, words


@pytest.mark.parametrize("block", fences("python"))
def test_every_program_compiles_and_names_the_test_that_runs_it(block: Block) -> None:
    tree = ast.parse(block.text)
    modules = {name.name for node in ast.walk(tree) if isinstance(node, ast.Import)
               for name in node.names}  # fmt: skip
    modules |= {node.module for node in ast.walk(tree)
                if isinstance(node, ast.ImportFrom) and node.module}  # fmt: skip
    for module in modules:
        assert importlib.util.find_spec(module.partition(".")[0]), module
    assert block.options.keys() & {"run", "program", "not-run"}


@pytest.mark.parametrize("block", fences("json"))
def test_every_json_document_is_one(block: Block) -> None:
    for line in block.commands:
        json.loads(line)


@pytest.mark.parametrize("block", fences("yaml", "toml"))
def test_every_configuration_is_read(block: Block) -> None:
    assert (yaml.safe_load if block.language == "yaml" else tomllib.loads)(block.text)


# -- links ---------------------------------------------------------------------------------------


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
        if re.fullmatch(r"[\w.-]+\.md", shown) and name:
            assert shown == Path(name).name
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


# -- messages ------------------------------------------------------------------------------------


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
    assert len(quoted()) > 25
    assert not is_said("WARMQ_MODEL: there is no such thing", texts)
    assert WarmqError.code in texts
