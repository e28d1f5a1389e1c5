"""Whatever a server answers for a while, no request is charged for it (a simulated clock)."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
from kit.drain import simulated_drain
from kit.drain.simulated_drain import AT_ONCE, Outcome, SimulatedDrain, line
from kit.drain.simulated_time import run_simulated
from kit.servers.bad_server import BAD
from kit.servers.simulated_server import Json, Reply, SimulatedServer, answer, page

from contract.settings import SettingsError
from worker.engine.openai.blame import CONTROL_ID
from worker.engine.openai.upstream import Upstream

LINES, SERVED_FIRST = 3000, 100


@pytest.fixture(autouse=True)
def _unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget the servers of other tests."""
    monkeypatch.setattr(Upstream, "were_well", set(), raising=False)


class Outage:
    """A server that answers some lines, then badly for some seconds, then well for ever."""

    def __init__(self, bad: str, seconds: float, first: int = SERVED_FIRST) -> None:
        self.server = SimulatedServer()
        self.server.post = self._post
        self.began = self.ended = -1.0
        self._bad, self._seconds, self._first = BAD[bad], seconds, first

    def _post(self, path: str, body: Json) -> Reply:
        now = time.monotonic()
        if self.began < 0 and len(self.server.posts) > self._first:
            self.began, self.ended = now, now + self._seconds
        return self._bad(path, body) if self.began <= now < self.ended else answer(body)

    def run(self, patch: pytest.MonkeyPatch, lines: int = LINES) -> Outcome:
        """Run that many lines."""

        async def main() -> Outcome:
            return await SimulatedDrain(self.server, patch).run(map(line, range(lines)))

        return run_simulated(main(), patch)

    def probes(self) -> Iterator[float]:
        """Yield the seconds between one try and the next while the server rests."""
        during = [at for at, *_ in self.server.posts if self.began <= at < self.ended]
        gaps = [later - before for before, later in pairwise(during)]
        first = next((n for n, gap in enumerate(gaps) if gap >= 0.99), len(gaps))
        yield from gaps[first:]


#: What fails late: until then more is sent. And who names a time is asked then.
LATE, NAMED = ("silence", "comments only"), ("429 that says when", "429 that says now")


@pytest.mark.parametrize("seconds", [25, 7200])
@pytest.mark.parametrize("bad", BAD)
def test_no_line_is_lost_whatever_a_server_answers_for_a_while(
    bad: str, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    outage = Outage(bad, seconds)
    outcome = outage.run(monkeypatch)
    assert outcome.failed == {}
    assert len(outcome.completed) == LINES
    assert (outcome.deaths, outcome.engines) == (0, 1)
    assert len(outage.server.posts) <= LINES + AT_ONCE + seconds / 60 + 40
    if bad not in LATE:
        gaps = list(outage.probes())
        assert len(gaps) >= (3 if seconds == 25 else 100)
        least = [0.1 if bad in NAMED else min(2.0**n, 60.0) for n in range(len(gaps))]
        assert [gap for gap, wait in zip(gaps, least, strict=True) if gap < wait] == []


@pytest.mark.parametrize("bad", BAD)
def test_a_server_that_is_bad_from_the_start_is_waited_for(
    bad: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    outage = Outage(bad, 400, first=0)
    outcome = outage.run(monkeypatch, 400)
    assert (len(outcome.completed), outcome.failed, outcome.deaths) == (400, {}, 0)


def run_lines(
    server: SimulatedServer, lines: int, patch: pytest.MonkeyPatch, **settings: Any
) -> tuple[SimulatedDrain, Outcome]:
    """Run lines at a server; return the drain, too."""
    drain = SimulatedDrain(server, patch, **settings)
    return drain, run_simulated(drain.run(map(line, range(lines))), patch)


@pytest.mark.parametrize("bad", ["502", "500 in words", "cut", "413 as a page", "403", "a page"])
def test_a_last_line_that_always_fails_ends_when_controls_are_answered(
    bad: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = SimulatedServer()
    server.post = lambda path, body: (
        BAD[bad](path, body) if '"0"' in str(body).replace("'", '"') else answer(body)
    )
    _, outcome = run_lines(server, 1, monkeypatch)
    assert list(outcome.failed) == ["r0"]
    ids = [request_id for *_, request_id in server.posts]
    assert (ids.count("r0"), ids.count(CONTROL_ID)) == (3, 3)
    assert server.posts[-1][0] - server.posts[0][0] < 20


def test_lines_that_always_fail_among_others_fail_after_three_tries_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = SimulatedServer()
    bad = {f"r{n}" for n in range(7, 900, 200)}
    server.post = lambda _, body: (
        page(500, {"error": "no"}) if server.posts[-1][2] in bad else answer(body)
    )
    _, outcome = run_lines(server, 1500, monkeypatch)
    assert outcome.failed.keys() == bad
    assert len(server.posts) == 1500 + 2 * len(bad)


def test_a_whole_batch_that_always_fails_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    server = SimulatedServer()
    server.post = lambda path, body: (
        answer(body) if server.posts[-1][2] == CONTROL_ID else BAD["500 in words"](path, body)
    )
    _, outcome = run_lines(server, 300, monkeypatch)
    assert len(outcome.failed) == 300
    assert server.posts[-1][0] - server.posts[0][0] < 600


@pytest.mark.parametrize("every", [2, 3, 5])
def test_a_server_of_which_a_replica_is_bad_loses_no_line(
    every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = SimulatedServer()
    server.post = lambda path, body: (
        BAD["502"](path, body) if server.random.random() < 1 / every else answer(body)
    )
    _, outcome = run_lines(server, 2000, monkeypatch)
    assert (len(outcome.completed), outcome.failed) == (2000, {})


@pytest.mark.parametrize("every", [2, 4, 10])
@pytest.mark.parametrize("at_once", [1, 2])
def test_few_requests_at_a_time_lose_none_to_a_bad_replica_either(
    every: int, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(simulated_drain, "AT_ONCE", at_once)
    server = SimulatedServer()
    server.post = lambda path, body: (
        BAD["502"](path, body) if server.random.random() < 1 / every else answer(body)
    )
    _, outcome = run_lines(server, 500, monkeypatch)
    assert (len(outcome.completed), outcome.failed) == (500, {})


def test_the_limit_falls_while_a_server_rests_and_status_says_what_it_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    outage = Outage("502", 600)
    drain = SimulatedDrain(outage.server, monkeypatch)
    seen: list[tuple[int, str, object]] = []

    async def look() -> None:
        engine = await drain.begun()
        server = engine._servers.servers[0]
        while outage.began < 0 or time.monotonic() < outage.began + 300:
            await asyncio.sleep(1)
            if not outage.began < 0:
                seen.append((server.limit, engine.waits_for(), engine._servers.shown[server.name]))

    async def main() -> Outcome:
        watch = asyncio.create_task(look())
        outcome = await drain.run(map(line, range(500)))
        await watch
        assert drain.engine.waits_for() == ""
        return outcome

    assert run_simulated(main(), monkeypatch).failed == {}
    limits = [limit for limit, *_ in seen[2:]]
    assert limits == sorted(limits, reverse=True)
    assert limits[-1] < limits[0] / 2
    assert seen[10][1] == "waits for server:8000: 502 Bad Gateway"
    assert "502 Bad Gateway" in str(seen[10][2])


def test_any_byte_is_a_sign_of_life(monkeypatch: pytest.MonkeyPatch) -> None:
    server = SimulatedServer()
    server.post = lambda _, body: answer(body, 3600.0)  # comments meanwhile
    for fields in ({}, {"tools": [{"type": "function", "function": {"name": "f"}}]}):
        server.posts.clear()
        drain = SimulatedDrain(server, monkeypatch)
        if fields:  # not streamed: white space comes before the answer
            server.post = lambda _, body: Reply(200, (*((200.0, b" "),) * 9, *answer(body).pieces))
        outcome = run_simulated(drain.run([line(0, **fields)]), monkeypatch)
        assert (outcome.completed, len(server.posts)) == ({"r0"}, 1)


def test_a_stall_at_a_server_that_is_well_is_no_death(monkeypatch: pytest.MonkeyPatch) -> None:
    server = SimulatedServer()
    server.post = lambda path, body: (
        answer(body) if server.posts[-1][2] == CONTROL_ID else BAD["silence"](path, body)
    )
    _, outcome = run_lines(server, 1, monkeypatch)
    assert "no step for 300 s" in outcome.failed["r0"]
    assert (outcome.deaths, outcome.engines) == (0, 1)


# -- health and the start -----------------------------------------------------------------------


def test_a_server_that_is_not_vllms_is_asked_for_its_models_and_rarely(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = SimulatedServer()
    server.paths["/health"] = lambda: Reply(200, ((8.0, b""),))  # asks every model
    server.post = lambda _, body: answer(body, 60.0)
    _, outcome = run_lines(server, 1500, monkeypatch)
    assert len(outcome.completed) == 1500
    asked = Counter(path for _, path in server.gets)
    spent = server.posts[-1][0] - server.posts[0][0]
    assert asked["/health"] == 0
    assert asked["/metrics"] == 1
    assert 2 < asked["/v1/models"] <= spent / 30 + 3


def test_the_path_of_a_servers_health_can_be_set(monkeypatch: pytest.MonkeyPatch) -> None:
    server = SimulatedServer()
    server.paths["/health/liveliness"] = lambda: page(200, b"I'm alive!")
    server.post = lambda _, body: answer(body, 60.0)
    run_lines(server, 400, monkeypatch, openai_health_path="/health/liveliness")
    asked = Counter(path for _, path in server.gets)
    assert asked["/health/liveliness"] > 1
    assert asked["/v1/models"] == 1


def test_vllms_own_health_is_asked_every_second(monkeypatch: pytest.MonkeyPatch) -> None:
    server = SimulatedServer("vllm")
    server.post = lambda _, body: answer(body, 60.0)
    run_lines(server, 40, monkeypatch)
    assert Counter(path for _, path in server.gets)["/health"] > 50


@pytest.mark.parametrize("model", [None, "stub"])
@pytest.mark.parametrize("lists", ["nowhere else", "everywhere", "in LM Studio's way", "nowhere"])
def test_a_base_url_without_v1_is_refused_by_name(
    model: str | None, lists: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = SimulatedServer()
    if lists == "everywhere":
        server.paths["/models"] = server.paths["/v1/models"]
    if lists == "nowhere":
        server.paths.clear()
    if lists == "in LM Studio's way":
        server.paths["/models"] = lambda: page(200, {"error": "Unexpected endpoint or method."})
    server.post = lambda path, body: (
        page(404, b"404 page not found") if not path.startswith("/v1/") else
        page(422, {"detail": "messages: field required"}) if not body else answer(body)
    )  # fmt: skip
    named = {"openai_base_urls": "http://server:8000", "model": model}
    with pytest.raises(SettingsError, match="name http://server:8000/v1 in WARMQ_OPENAI_BASE_URLS"):
        run_lines(server, 1, monkeypatch, **named)


def test_a_base_url_without_v1_that_serves_there_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    server = SimulatedServer()
    server.paths["/models"] = server.paths["/v1/models"]
    server.post = lambda _, body: answer(body) if body else page(400, {"error": "no messages"})
    _, outcome = run_lines(server, 3, monkeypatch, openai_base_urls="http://server:8000")
    assert len(outcome.completed) == 3
    assert {path for _, path, request_id in server.posts if request_id} == {"/chat/completions"}
