"""The queue of each line's model, found from what workers announce."""

from __future__ import annotations

from typing import Any

import pytest

from contract.errors import RequestRejected
from contract.openai.lines import parse_line
from contract.version import PROTOCOL
from producer.submit.routes import Routes, find_routes


def worker(queue: str = "warmq", **more: Any) -> dict[str, Any]:
    said = {"id": "w", "queue": queue, "state": "ready", "silent_s": 1.0, "protocol": PROTOCOL}
    return said | more


SEVERAL = worker("warmq.chat", models={"chat": "warmq.chat", "judge": "warmq.judge"})
OWN = {"chat": "warmq.chat", "judge": "warmq.judge"}


@pytest.mark.parametrize(
    ("announced", "routes"),
    [
        ([], {}),
        ([worker(name="tiny")], {}),  # one model
        ([worker(name="tiny", adapters=["a"])], {}),
        ([SEVERAL], OWN),
        ([SEVERAL, worker(name="tiny")], OWN | {"": "warmq"}),
        ([SEVERAL, worker(name="judge")], {"chat": "warmq.chat", "": "warmq"}),
        ([worker("warmq.chat", adapters=["a"]), worker("warmq.b")],
         {"chat": "warmq.chat", "a": "warmq.chat", "b": "warmq.b"}),
        ([worker("warmq.b"), worker("warmq.chat", adapters=["b"])],
         {"chat": "warmq.chat", "b": "warmq.b"}),  # a model comes before an adapter of this name
        ([worker("warmq.chat", adapters=["b"]), worker("warmq.b")],
         {"chat": "warmq.chat", "b": "warmq.b"}),
        ([worker("other.chat"), worker("warmqx")], {}),  # another WARMQ_QUEUE
        ([worker("warmq.old", protocol=1)], {}),
        ([worker("warmq.chat", silent_s=90.0)],  # the last one that was seen
         {"chat": "warmq.chat", "": "warmq"}),
    ],
)  # fmt: skip
def test_routes_are_those_of_the_announced_models(
    announced: list[dict[str, Any]], routes: dict[str, str]
) -> None:
    assert find_routes(announced, "warmq") == routes


def test_a_model_of_no_worker_is_refused_with_those_that_are_served() -> None:
    routes = Routes(OWN, "warmq")
    for line, queue in (
        (b'{"prompt": "x", "model": "chat"}', "warmq.chat"),
        (b'{"url": "/v1/embeddings", "body": {"input": "x", "model": "judge"}}', "warmq.judge"),
        (b'{"prompt": "x"}', "warmq"),
    ):
        request = parse_line(line)
        routes.check(request)
        assert routes.queue_of(request) == queue
    with pytest.raises(
        RequestRejected, match="workers serve: chat, judge; did you mean judge"
    ) as no:
        routes.check(parse_line(b'{"prompt": "x", "model": "jugde"}'))
    assert (no.value.code, no.value.field) == ("model_not_found", "model")
    # The default queue's workers may know more names than they announce.
    Routes(OWN | {"": "warmq"}, "warmq").check(parse_line(b'{"prompt": "x", "model": "jugde"}'))
