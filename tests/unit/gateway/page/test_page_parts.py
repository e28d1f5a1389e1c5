"""The page: complete translations, charts over time, limits of live streams."""

from __future__ import annotations

import json
import re
from functools import partial
from importlib.resources import files
from typing import Any, get_args

from contract.redis.history import DAY, Minute
from gateway.batches.api.record import Status
from gateway.http.caller import Caller
from gateway.http.errors import ApiError
from gateway.page import rendering
from gateway.page.batches import FIGURES
from gateway.page.fleet import Fleet, _worker, fill_chart, rate_chart, rates_of
from gateway.page.live import MAX_OF_SESSION, MAX_OF_TENANT, MAX_VIEWERS, LiveFeed, Viewer
from gateway.page.rendering import LANGUAGES, language_of, translate
from gateway.page.requests import OTHER_REMEDY, REMEDIES
from gateway.page.summary import CLAUSES
from producer.stall_texts import TEXTS
from producer.stalls import Stall
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
    of_modules = {text for pair in (*CLAUSES.values(), *TEXTS.values()) for text in pair}
    return found | states | figures | of_modules | set(REMEDIES.values()) | {OTHER_REMEDY}


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


def test_the_bounds_of_a_bin_differ():
    assert rendering.between(0.1301, 0.1342) == "0.1301–0.1342"
    assert rendering.between(1000.0, 1200.0) == "1,000–1,200"
    assert rendering.between(3.0, 6.5) == "3.0–6.5"
    assert rendering.between(2.0, 2.0) == "2"


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


def test_rates_are_those_of_the_last_whole_minute_if_it_had_slots():
    whole = Minute(7, 50, 10, 600, 1200, 900, 30, 60)
    rates = rates_of([Minute(6), whole, Minute(8, 99)])
    assert rates == {"out_s": 20.0, "in_s": 10.0, "requests_s": 1.0, "cached": 1.0}
    assert rates_of([whole._replace(prompt_tokens=0), Minute(8)])["cached"] is None
    for unknown in ([], [whole], [Minute(7), Minute(8)]):
        assert set(rates_of(unknown).values()) == {None}


def test_a_sentence_begins_with_a_capital_but_a_name_stays_as_it_is():
    page = "{% import 'macros.html' as m %}{{ m.stalls(_, found) }}"
    found = [
        Stall(
            "queue_unserved",
            *TEXTS["queue_unserved"],
            {"model": "gpt-4", "queue": "q", "waiting": 5, "command": "warmq-worker"},
        )
    ]
    template = rendering._ENVIRONMENT.from_string(page)
    for language, begins in (("en", "No worker serves gpt-4"), ("ko", "gpt-4(")):
        html = template.render(_=partial(translate, language), found=found)
        assert f"<strong>{begins}" in html


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


def test_slots_in_use_are_no_more_than_there_are():
    announced = {"queue": "q", "state": "ready", "silent_s": 0.1, "slots": 64}
    workers = [_worker({"id": n, **announced, "in_flight": n}, True, "q") for n in (75, 10)]
    fleet = Fleet(workers, "q", 0)
    assert (fleet.running, fleet.slots) == (74, 128)
