"""Which queue a model is asked for in, by what workers announce and the operator names."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from contract.errors import RequestRejected
from contract.openai.lines import Request
from contract.redis.announced_models import Unloadable
from contract.version import PROTOCOL
from gateway.batches.runner.queueing import PartLines, parts_for
from gateway.served_models import ServedModels, configured_models
from gateway.settings import GatewaySettings


def worker(queue: str = "warmq", **told: Any) -> dict[str, Any]:
    return {"id": "w", "silent_s": 0.0, "queue": queue, "protocol": PROTOCOL} | told


def served(*workers: dict[str, Any], configured: str = "") -> ServedModels:
    return ServedModels.of(workers, "warmq", configured)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", {}), (" , ", {}), ("a", {"a": "a"}), ("a, b/c 3 ,", {"a": "a", "b/c 3": "b/c 3"}),
        ("a,b=a", {"a": "a", "b": "a"}), ("/models/c=, c =", {"/models/c": "", "c": ""}),
    ],
)  # fmt: skip
def test_configured_models_are_names_and_other_names(text: str, found: dict[str, str]) -> None:
    assert configured_models(text) == found


@pytest.mark.parametrize("text", ["*", "*=a", "a=b,* = a"])
def test_any_name_can_be_of_the_default_queue_only(text: str) -> None:
    with pytest.raises(ValidationError, match=r"write \*=, any name of the default queue's model"):
        GatewaySettings(gateway_models=text)


@pytest.mark.parametrize("text", ["=a", "a, = ,b"])
def test_a_configured_model_without_a_name_is_refused_in_words(text: str) -> None:
    with pytest.raises(ValidationError, match="has no name; write NAME, NAME=MODEL or NAME="):
        GatewaySettings(gateway_models=text)


@pytest.mark.parametrize(
    ("workers", "name", "queue"),
    [
        ([worker("warmq.a", model="/m")], "a", "warmq.a"),
        ([worker("warmq.a", model="/m")], "m", None),
        ([worker("warmq.a", adapters=["l"])], "l", "warmq.a"),
        ([worker(model="/models/m")], "m", "warmq"),
        ([worker(model="/models/m")], "/models/m", "warmq"),
        ([worker(model="org/m"), worker("warmq.a")], "m", None),
        ([worker()], "anything", "warmq"),
        ([worker(), worker("warmq.default")], "default", "warmq.default"),
        ([worker("other")], "anything", None),
        ([worker("warmq.a"), worker("warmq.b")], "", None),
        ([worker("warmq.a"), worker()], "", "warmq"),
    ],
)
def test_a_name_leads_to_the_queue_of_the_workers_that_answer_to_it(
    workers: list[dict[str, Any]], name: str, queue: str | None
) -> None:
    assert served(*workers).queue_of(name, None) == queue


TINY = {"model": "models/tiny", "name": "tiny"}


def test_a_folders_model_has_one_name_and_its_path_works_unseen() -> None:
    known = served(worker(**TINY), worker("warmq.a"))
    asked = {name: known.queue_of(name, None) for name in ("tiny", "models/tiny", "models")}
    assert asked == {"tiny": "warmq", "models/tiny": "warmq", "models": None}
    assert known.visible(known.names) == ["tiny", "a"]
    assert known.listing(None) == "served models: a, tiny"


@pytest.mark.parametrize(
    ("workers", "configured", "queue"),
    [
        ([worker(**TINY)], "", "warmq"),
        ([worker(**TINY), worker(**TINY)], "", "warmq"),
        ([worker(**TINY)], "*=", "warmq"),
        ([worker(**TINY), worker("warmq.a")], "a, *=", "warmq"),
        ([], "tiny=, *=", "warmq"),
        # Another model is served, or was until a minute ago, or may be: a name may mean that one.
        ([worker(**TINY), worker("warmq.a")], "", None),
        ([worker(**TINY), worker("warmq.a", silent_s=50.0)], "", None),
        ([worker(**TINY), worker(model="other")], "", None),
        ([worker(**TINY, adapters=["sql"])], "", None),
        ([worker(**TINY)], "tiny=", None),
        ([worker(**TINY)], "large", None),
        # A worker with a served name refuses other names, and so does the gateway.
        ([worker("warmq.a", **TINY)], "", None),
        ([worker("warmq.a", **TINY)], "*=", None),
        ([worker(**TINY, protocol=1)], "", None),
        ([], "*=", None),
    ],
)
def test_any_name_is_the_only_models_or_if_configured_the_default_queues(
    workers: list[dict[str, Any]], configured: str, queue: str | None
) -> None:
    known = ServedModels.of(workers, "warmq", configured, silent=False)
    assert known.queue_of("gpt-4o-mini", None) == queue
    assert known.queue_of("gpt-4o-mini", ["tiny"]) is None


def test_a_model_is_not_loaded_where_workers_could_load_it_only() -> None:
    models = {"a": "warmq.a", "b": "warmq.b", "c": "warmq.c"}
    first, second = worker("warmq.a", models=models), worker("warmq.b", models=models)
    assert served(first).not_loaded == {"warmq.b", "warmq.c"}
    assert served(first, second).not_loaded == {"warmq.c"}
    assert served(first | {"state": "swapping"}, second).not_loaded == {"warmq.a", "warmq.c"}
    assert served(first | {"state": "starting"}).not_loaded == {"warmq.b", "warmq.c"}
    assert served(first, worker("warmq.c")).not_loaded == {"warmq.b"}
    assert served(worker("warmq.a"), worker()).not_loaded == set()
    assert served(first, configured="other=c").queue_of("other", None) == "warmq.c"


def test_a_model_is_unloadable_where_each_worker_that_has_it_failed() -> None:
    models = {"a": "warmq.a", "b": "warmq.b"}

    def failing(again_at: int) -> dict[str, Any]:
        failed = {"b": {"why": "no memory", "tries": 1, "again_at": again_at}}
        return worker("warmq.a", models=models, unloadable=failed)

    assert dict(served(failing(5000)).unloadable) == {
        "warmq.b": Unloadable("warmq.b", "no memory", 1, 5.0)
    }
    both = served(failing(5000), failing(2000)).unloadable
    assert both["warmq.b"].again_at_s == 2
    assert not served(failing(5000), worker("warmq.a", models=models)).unloadable
    assert not served(failing(5000), worker("warmq.b")).unloadable
    assert not served(worker("warmq.a", models=models, unloadable="x")).unloadable


def test_what_is_configured_counts_beside_what_is_served() -> None:
    known = served(worker("warmq.a"), configured="b,c=a")
    asked = {name: known.queue_of(name, None) for name in ("a", "b", "c", "d", "")}
    assert asked == {"a": "warmq.a", "b": "warmq.b", "c": "warmq.a", "d": None, "": "warmq.a"}
    assert served(configured="b").queue_of("", None) == "warmq.b"


def test_a_caller_is_led_to_models_that_it_may_use_alone() -> None:
    known = served(worker("warmq.a"), worker(), configured="b")
    assert [known.queue_of(name, ["a"]) for name in ("a", "b", "x", "")] == [
        "warmq.a", None, None, "warmq.a"
    ]  # fmt: skip


def test_a_caller_who_names_none_asks_by_the_name_of_one_that_it_may_use() -> None:
    known = served(
        worker(model="/models/m", adapters=["l", "k"]), worker("warmq.a", adapters=["x", "y"]),
        worker("warmq.b"), configured="c,d=a,e=",
    )  # fmt: skip
    assert known.default_of(["l"]) == "l"
    assert known.default_of(["nobody"]) == "nobody"  # refused where its queue is asked for
    assert known.default_of(["l", "m"]) == "m"
    assert known.default_of(["a", "m", "b"]) == "m"
    assert known.default_of(["a", "x"]) == "a"
    assert known.default_of(["l", "e"]) == "e"
    for unclear in (["l", "k"], ["x", "y"], ["a", "b"], ["d", "x"], []):
        assert (known.default_of(unclear), known.queue_of("", unclear)) == ("", None), unclear
    assert known.queue_of("", ["x"]) == "warmq.a"
    assert known.queue_of("", ["nobody"]) is None


def test_only_a_queue_without_any_newer_worker_is_outdated() -> None:
    old, quiet = {"protocol": 1}, {"silent_s": 40.0}
    known = served(
        worker("warmq.a", **old), worker("warmq.b", **old), worker("warmq.b"),
        worker("warmq.c", **old), worker("warmq.c", **quiet), worker("warmq.d", **old, **quiet),
        configured="a,e",
    )  # fmt: skip
    outdated = {name: known.is_outdated(name, None) for name in "abcdef"}
    assert outdated == dict.fromkeys("abcdef", False) | {"a": True}
    assert (known.is_outdated("a", ["b"]), known.is_outdated("", ["a"])) == (False, True)
    assert known.alive
    assert not served(worker("warmq.a", **old), worker("warmq.b", **quiet)).alive


def test_a_newer_worker_that_takes_any_name_takes_none_of_older_ones() -> None:
    known = served(worker(), worker("warmq.a", protocol=1))
    assert (known.queue_of("a", None), known.queue_of("b", None)) == (None, "warmq")
    older = served(worker(protocol=1))
    assert (older.queue_of("b", None), older.is_outdated("b", ["b"])) == (None, True)


def refusal(known: ServedModels, models: list[str], allowed: list[str] | None, body: bytes) -> str:
    """Return what a line with this body is told, in a batch that asks for these models."""
    sharing = PartLines(parts_for("b", models, known, allowed), 0)
    request = Request(custom_id="a", url="/v1/completions", body=body, limited=True)
    with pytest.raises(RequestRejected) as raised:
        sharing.check(request)
    return raised.value.message


@pytest.mark.parametrize(
    ("body", "begin"),
    [
        (b"{}", "field body.model: is missing; name a model; "),
        (b'{"model":""}', "field body.model: is missing; name a model; "),
        (b'{"model":"z"}', "field body.model: there is no model 'z' here; "),
    ],
)
def test_a_line_whose_model_is_unclear_is_told_which_there_are_for_its_key(
    body: bytes, begin: str
) -> None:
    known = served(worker("warmq.a"), worker("warmq.b"), worker("warmq.c", model="/models/c"))
    for models in (["", "z"], ["", "a", "z"], ["", "a", "b", "z"]):
        assert refusal(known, models, None, body) == f"{begin}served models: a, b, c"
        assert refusal(known, models, ["b", "a"], body) == f"{begin}served models: a, b"
        none = refusal(known, models, ["q", "r"], body)
        assert none == f"{begin}no model is served to you now"


def test_of_many_models_a_line_is_told_some_and_of_a_folder_its_name() -> None:
    known = served(*(worker(f"warmq.m{n:03}") for n in range(500)))
    told = refusal(known, [""], None, b"{}")
    assert "m000, m001" in told
    assert told.endswith("m019, ...")
    long = served(*(worker(f"warmq.{n}{'x' * 10_000}") for n in range(50)))
    assert len(refusal(long, [""], None, b"{}")) < 5000
    folder = served(worker(model="/models/c"), worker("warmq.a"))
    assert refusal(folder, ["z"], ["a", "c"], b'{"model":"z"}').endswith("served models: a, c")


def test_only_the_part_that_refuses_lines_notes_what_it_tells() -> None:
    known = served(worker("warmq.a"), worker("warmq.b"))
    first, second = parts_for("b", ["a", "b", "z"], known, None)
    assert (first.served, second.served) == ("served models: a, b", "")
    assert [part.served for part in parts_for("b", ["a", "b"], known, None)] == ["", ""]


def test_an_adapter_of_a_model_that_is_not_loaded_is_offered_in_its_queue() -> None:
    found = served(worker(
        "warmq.chat", state="ready", models={"chat": "warmq.chat", "judge": "warmq.judge"},
        adapters=["french"], model_adapters={"chat": ["french"], "judge": ["strict"]},
    ))  # fmt: skip
    assert found.queue_of("strict", None) == "warmq.judge"
    assert found.queue_of("french", None) == "warmq.chat"
    assert found.queue_of("strict", ["french"]) is None
    assert found.not_loaded == {"warmq.judge"}
    assert set(found.visible(found.names)) == {"chat", "judge", "french", "strict"}
