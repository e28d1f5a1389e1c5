"""The page's words: each has its Korean, and no state that a page may show lacks one. Its lines
over time. Its live streams: bounded by session and tenant, so that none takes all."""

from __future__ import annotations

import json
import re
from importlib.resources import files
from typing import Any, get_args

from contract.redis.history import DAY, Minute
from gateway.batches.api.record import Status
from gateway.http.caller import Caller
from gateway.page import live
from gateway.page.fleet import fill_chart, rate_chart
from gateway.page.live import MOST_OF_SESSION, MOST_OF_TENANT, MOST_VIEWERS, LiveFeed, Viewer
from gateway.page.rendering import LANGUAGES, language_of, translate
from gateway.page.requests import OTHER_REMEDY, REMEDIES
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
    return found | states | figures | set(REMEDIES.values()) | {OTHER_REMEDY}


def test_every_text_of_the_page_is_there_in_every_language():
    assert len(said()) > 150
    for language in set(LANGUAGES) - {"en"}:
        assert {text for text in said() if translate(language, text) == text} == set()


def test_a_translation_has_the_fields_of_its_text_and_none_is_left_over():
    for language in set(LANGUAGES) - {"en"}:
        found = json.loads(DASHBOARD.joinpath("words", f"{language}.json").read_text())
        assert {t for t in found if set(FIELD.findall(t)) != set(FIELD.findall(found[t]))} == set()
        nav = {"Overview", "Batches", "Submit", "Workers", "Tenants", "Dead letters"}
        assert set(found) - said() - nav - {"As the system", "Light", "Dark"} == set()


def test_the_language_is_the_first_of_the_browsers_that_there_is():
    assert language_of("fr-FR, ko-KR;q=0.8, en;q=0.5") == "ko"
    assert language_of("") == language_of("fr") == "en"


def day(began: int) -> list[Minute]:
    """Return a day whose first slots were there in so manyeth a minute."""
    return [Minute(n, completion_tokens=60 * (n >= began), slots_s=n >= began) for n in range(DAY)]


def test_a_line_begins_when_there_were_slots_but_an_hour_ago_at_the_latest():
    assert (rate_chart(day(0)).from_s, rate_chart(day(0)).to_s) == (0, 60 * (DAY - 2))
    assert rate_chart(day(1000)).from_s == 60 * 1000
    assert rate_chart(day(1000)).mean == 1.0
    assert rate_chart(day(DAY - 5)).from_s == 60 * (DAY - 61)
    assert rate_chart(day(DAY)).most == 0


def test_a_young_ring_is_shown_as_it_is():
    young = [Minute(7, 1, 0, 10, 120, 0, 30, 60)]
    assert rate_chart(young).most == 2.0
    assert fill_chart(young).most == 0.5


def watched(*viewers: tuple[str, str]) -> LiveFeed:
    services: Any = None
    watch = LiveFeed(services)
    watch._viewers.update(Viewer(tenant, (), session=session) for tenant, session in viewers)
    return watch


def refused(watch: LiveFeed, tenant: str, session: str, key_id: str = "key_1") -> str | None:
    found = live._too_many(watch, Caller(tenant, key_id), session)
    if found is None:
        return None
    assert (found.status, found.headers["retry-after"]) == (503, "10")
    return found.message


def test_a_session_with_many_pages_takes_nobody_elses() -> None:
    watch = watched(*[("a", "s1")] * MOST_OF_SESSION)
    assert "this session" in str(refused(watch, "a", "s1"))
    assert refused(watch, "a", "s2") is None
    assert refused(watch, "b", "s3") is None


def test_a_tenant_with_many_sessions_takes_no_other_tenants() -> None:
    watch = watched(*(("a", f"s{n}") for n in range(MOST_OF_TENANT)))
    assert "this tenant" in str(refused(watch, "a", "new"))
    assert refused(watch, "b", "new") is None


def test_all_together_have_a_bound_and_without_keys_only_that() -> None:
    some = watched(*[("default", "")] * (MOST_VIEWERS - 1))
    assert refused(some, "default", "", key_id="") is None
    watch = watched(*((f"t{n % 9}", f"s{n}") for n in range(MOST_VIEWERS)))
    assert "too many" in str(refused(watch, "other", "new"))
