"""The page's words: each has its Korean, and no state that a page may show lacks one."""

from __future__ import annotations

import json
import re
from importlib.resources import files
from typing import get_args

from gateway.batches.api.record import Status
from gateway.page.rendering import LANGUAGES, language_of, translated
from gateway.page.requests import ANOTHER, REMEDIES
from worker.drain.lifecycle import State

DASHBOARD = files("gateway.page")
SAID = re.compile(r"""\b_\(\s*(?:"((?:[^"\\])*)"|'([^']*)')""")
FIELD = re.compile(r"\{\w+\}")


def said() -> set[str]:
    """Return the texts that templates say."""
    found = set()
    for entry in DASHBOARD.joinpath("templates").iterdir():
        found |= {one or other for one, other in SAID.findall(entry.read_text())}
    states = {*get_args(Status), *(state.value for state in State), "silent", "running", "waiting"}
    figures = {"Waited in the queue", "Time in the engine", "Tokens of the answers"}
    return found | states | figures | set(REMEDIES.values()) | {ANOTHER}


def test_every_text_of_the_page_is_there_in_every_language():
    assert len(said()) > 150
    for language in set(LANGUAGES) - {"en"}:
        assert {text for text in said() if translated(language, text) == text} == set()


def test_a_translation_has_the_fields_of_its_text_and_none_is_left_over():
    for language in set(LANGUAGES) - {"en"}:
        found = json.loads(DASHBOARD.joinpath("words", f"{language}.json").read_text())
        assert {t for t in found if set(FIELD.findall(t)) != set(FIELD.findall(found[t]))} == set()
        nav = {"Overview", "Batches", "Submit", "Workers", "Tenants", "Dead letters"}
        assert set(found) - said() - nav - {"As the system", "Light", "Dark"} == set()


def test_the_language_is_the_first_of_the_browsers_that_there_is():
    assert language_of("fr-FR, ko-KR;q=0.8, en;q=0.5") == "ko"
    assert language_of("") == language_of("fr") == "en"
