"""Code on the pages: each fence is run by a test, or the page states why not."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
import yaml
from kit.commands.pages import DEVICES, DOCS, OPTIONS, TUTORIALS, Block, blocks, pattern

from demo.stack import ROOT
from producer.cli.main import cli

PAGES = sorted(TUTORIALS.glob("*.md"))
#: The words that mark a line for a device.
WORDS = {"gpu": "needs a GPU", "npu": "needs an NPU", "network": "needs the network"}
#: The languages of fences; the tests below check the code of each.
LANGUAGES = {"acl", "js", "json", "python", "sh", "text", "toml", "yaml"}
#: The test that types the unmarked `sh` fences of how-to pages.
TYPED = ROOT / "tests/integration/producer/cli/test_how_to_pages.py"


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
    return page.parent.name == "tutorials" or page.stem in TYPED.read_text()


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
