"""A worker of several processes: its parts, and the one worker that readers see."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from contract.redis.announcements import read_announcements
from contract.settings import SettingsError
from worker.drain.supervisor import EngineShare
from worker.engine import Capacity
from worker.engine.catalogue import front_ends_of, load_settings
from worker.engine.vllm.options import default_front_ends
from worker.settings import WorkerSettings

NOW_MS = 1_000_000


def announced(worker_id: str, **more: Any) -> tuple[bytes, bytes]:
    record = {"state": "ready", "queue": "warmq", "in_flight": 5, "limit": 20, "slots": 16} | more
    return worker_id.encode(), b"%d\0" % NOW_MS + orjson.dumps(record)


@pytest.mark.parametrize("count", [1, 2, 3, 7])
@pytest.mark.parametrize("slots", [7, 16, 257])
def test_the_parts_of_a_capacity_are_all_of_it(count: int, slots: int) -> None:
    whole = Capacity(slots, 1024, "tiny")
    parts = [EngineShare(number, count).share(whole).max_num_seqs for number in range(count)]
    assert sum(parts) == slots
    assert max(parts) - min(parts) <= 1


def test_each_part_gets_its_share_of_what_limits_a_worker() -> None:
    settings = WorkerSettings(look_ahead=9)
    parts = [EngineShare(number, 2).settings(settings) for number in range(2)]
    assert [part.look_ahead for part in parts] == [5, 4]


def test_limits_that_nobody_set_and_a_look_ahead_of_none_stay() -> None:
    part = EngineShare(1, 4).settings(WorkerSettings(look_ahead=0))
    assert part.look_ahead == 0


def test_readers_see_the_parts_of_a_worker_as_one() -> None:
    raw = dict([
        announced("h.1.a"), announced("h.2.b", part_of="h.1.a", in_flight=7),
        announced("h.9.c"),
    ])  # fmt: skip
    one, other = sorted(read_announcements(raw, NOW_MS / 1000), key=lambda worker: worker["id"])
    assert (one["id"], one["in_flight"], one["limit"], one["slots"]) == ("h.1.a", 12, 40, 32)
    assert (other["id"], other["in_flight"]) == ("h.9.c", 5)


def test_what_the_parts_have_done_is_added_and_a_death_of_their_engine_counts_once() -> None:
    one = {"completed": 5, "other": 1, "cached_tokens": 7}
    raw = dict([
        announced("h.1.a", done=one, deaths=2),
        announced("h.2.b", part_of="h.1.a", done={"completed": 4, "other": 0}, deaths=0),
        announced("h.3.c", part_of="h.1.a"),  # of a worker that told nothing of it yet
        announced("h.4.d", part_of="h.1.a", done={"completed": "many"}, deaths="few"),
    ])  # fmt: skip
    (worker,) = read_announcements(raw, NOW_MS / 1000)
    assert worker["done"] == {"completed": 9, "other": 1, "cached_tokens": 7}
    assert worker["deaths"] == 2
    older = dict([announced("h.1.a"), announced("h.2.b", part_of="h.1.a")])
    (worker,) = read_announcements(older, NOW_MS / 1000)
    assert not {"done", "deaths"} & set(worker)


def test_a_part_that_was_killed_is_not_counted() -> None:
    raw = dict([announced("h.1.a"), announced("h.2.b", part_of="h.1.a")])
    (one,) = read_announcements(
        raw | {b"h.2.b": raw[b"h.2.b"].replace(b"1000000", b"900000")}, 1000
    )
    assert one["in_flight"] == 5


def test_an_engine_that_takes_requests_from_one_process_refuses_more() -> None:
    settings = load_settings(
        engine="openai", front_ends=2, openai_base_urls="http://localhost:1/v1"
    )
    with pytest.raises(SettingsError, match="WARMQ_FRONT_ENDS: the engine openai takes"):
        front_ends_of(settings)


@pytest.mark.parametrize(
    ("options", "cores", "wanted"),
    [
        ("", 64, 1),
        ("--data-parallel-size 4", 64, 4),
        ("--data-parallel-size 4", 8, 2),
        ("--data-parallel-size 4", 2, 1),
        ("--data-parallel-size 4 --data-parallel-backend ray", 64, 1),
        ("--tensor-parallel-size 4", 64, 1),
    ],
)
def test_there_is_a_front_end_for_each_replica_as_far_as_cores_go(
    monkeypatch: pytest.MonkeyPatch, options: str, cores: int, wanted: int
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(cores)))
    settings = load_settings(engine="vllm", model="models/tiny", engine_args=options)
    assert default_front_ends(settings) == wanted  # type: ignore[arg-type]
    assert front_ends_of(settings) == wanted


@pytest.mark.parametrize(
    "strange",
    [{"part_of": ["h.1.a"]}, {"part_of": 5}, {"part_of": "h.1.a", "limit": "many", "slots": None}],
)
def test_what_a_stranger_announces_as_a_part_breaks_no_reader(strange: dict[str, Any]) -> None:
    raw = dict([announced("h.1.a"), announced("x.2.b", **strange)])
    (one,) = (w for w in read_announcements(raw, NOW_MS / 1000) if w["id"] == "h.1.a")
    assert (one["limit"], one["slots"]) == (20, 16)
