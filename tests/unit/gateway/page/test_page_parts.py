"""The page: complete translations, charts over time, limits of live streams."""

from __future__ import annotations

import json
import re
from importlib.resources import files
from typing import Any, get_args

from contract.redis.history import DAY, Minute
from gateway.batches.api.record import Status
from gateway.http.caller import Caller
from gateway.http.errors import ApiError
from gateway.page.batches import FIGURES
from gateway.page.fleet import fill_chart, rate_chart
from gateway.page.live import MAX_OF_SESSION, MAX_OF_TENANT, MAX_VIEWERS, LiveFeed, Viewer
from gateway.page.rendering import LANGUAGES, language_of, translate
from gateway.page.requests import OTHER_REMEDY, REMEDIES
from worker.drain.lifecycle import State

DASHBOARD = files("gateway.page")
TRANSLATED = re.compile(r"""\b_\(\s*(?:"((?:[^"\\])*)"|'([^']*)')""")
FIELD = re.compile(r"\{\w+\}")


def texts() -> set[str]:
    """Return the texts that pages translate."""
    found = set()
    for entry in DASHBOARD.joinpath("templates").iterdir():
        found |= {one or other for one, other in TRANSLATED.findall(entry.read_text())}
    states = {*get_args(Status), *(state.value for state in State), "silent", "running", "waiting"}
    figures = {title for title, _ in FIGURES}
    return found | states | figures | set(REMEDIES.values()) | {OTHER_REMEDY}


def test_every_text_of_the_page_is_there_in_every_language():
    assert len(texts()) > 150
    for language in set(LANGUAGES) - {"en"}:
        assert {text for text in texts() if translate(language, text) == text} == set()


def test_a_translation_has_the_fields_of_its_text_and_none_is_left_over():
    for language in set(LANGUAGES) - {"en"}:
        found = json.loads(DASHBOARD.joinpath("translations", f"{language}.json").read_text())
        assert {t for t in found if set(FIELD.findall(t)) != set(FIELD.findall(found[t]))} == set()
        nav = {"Overview", "Batches", "Submit", "Workers", "Tenants", "Dead letters"}
        assert set(found) - texts() - nav - {"System default", "Light", "Dark"} == set()


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
    feed = LiveFeed(services)
    feed._viewers.update(Viewer(tenant, (), session) for tenant, session in viewers)
    return feed


def refused(feed: LiveFeed, tenant: str, session: str, key_id: str = "key_1") -> str | None:
    try:
        feed.check(Caller(tenant, key_id), session)
    except ApiError as error:
        assert (error.status, error.headers["retry-after"]) == (503, "10")
        return error.message
    return None


def test_a_session_with_many_pages_takes_nobody_elses() -> None:
    feed = watched(*[("a", "s1")] * MAX_OF_SESSION)
    assert "this session" in str(refused(feed, "a", "s1"))
    assert refused(feed, "a", "s2") is None
    assert refused(feed, "b", "s3") is None


def test_a_tenant_with_many_sessions_takes_no_other_tenants() -> None:
    feed = watched(*(("a", f"s{n}") for n in range(MAX_OF_TENANT)))
    assert "this tenant" in str(refused(feed, "a", "new"))
    assert refused(feed, "b", "new") is None


def test_all_together_have_a_bound_and_without_keys_only_that() -> None:
    some = watched(*[("default", "")] * (MAX_VIEWERS - 1))
    assert refused(some, "default", "", key_id="") is None
    feed = watched(*((f"t{n % 9}", f"s{n}") for n in range(MAX_VIEWERS)))
    assert "this gateway" in str(refused(feed, "other", "new"))
