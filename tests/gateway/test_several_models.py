"""Online requests for models of one worker, of which one is loaded at a time."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from kit.gateways.live_stack import HELLO, Stack
from kit.protocol.lessee import submit_batch
from kit.stacks.celery_side import simulated
from prometheus_client.parser import text_string_to_metric_families

from demo.stack import eventually

MODELS = ("alpha", "beta")


@contextmanager
def several(folder: Path, beta: str = "", **settings: object) -> Iterator[Stack]:
    """Run a gateway, and a worker with two models, of which it loads `alpha` first.

    `beta` is the path of the other one.
    """
    entry = {"min_stay": "1s", "max_online_wait": "1s"}
    models = dict.fromkeys(MODELS, entry) | ({"beta": entry | {"path": beta}} if beta else {})
    with (
        Stack(folder, worker=False, **settings) as stack,
        simulated(stack.redis.url, folder / "several.log",
                  models=json.dumps(models)),
    ):  # fmt: skip
        eventually(lambda: loaded(stack) == "alpha", 40, "alpha is loaded")
        yield stack


def loaded(stack: Stack) -> Any:
    """Return the model that the worker has loaded."""
    found = [one for one in stack.store.announcements() if one["state"] == "ready"]
    return found[0]["served"] if found else None


def sample(url: str, name: str, model: str, **labels: str) -> float | None:
    """Return a sample of the queue of a model, None without one."""
    wanted = labels | {"queue": f"warmq.{model}"}
    with urllib.request.urlopen(url, timeout=10) as answer:
        families = text_string_to_metric_families(answer.read().decode())
    found = (one for family in families for one in family.samples if one.name == name)
    return next((one.value for one in found if wanted.items() <= one.labels.items()), None)


def ask(stack: Stack, model: str) -> str:
    return stack.said(stack.client.chat.completions.create(model=model, messages=HELLO))


def test_a_request_for_a_model_that_is_not_loaded_waits_for_it(tmp_path: Path) -> None:
    with several(tmp_path) as stack:
        assert ask(stack, "beta") == stack.text_of("Hello")
        assert loaded(stack) == "beta"
        assert {one.id for one in stack.client.models.list()} == set(MODELS)


def test_by_setting_it_is_refused_and_nothing_is_queued(tmp_path: Path) -> None:
    with several(tmp_path, gateway_not_loaded="refuse") as stack:
        with pytest.raises(openai.InternalServerError) as caught:
            ask(stack, "beta")
        error = caught.value
        assert (error.status_code, error.code, error.param) == (503, "model_not_loaded", "model")
        headers = error.response.headers
        assert (headers["x-should-retry"], headers["retry-after"]) == ("false", "30")
        assert "loaded models: alpha" in error.message
        assert sum(stack.store.queue_lengths("warmq.beta").values()) == 0
        assert ask(stack, "alpha") == stack.text_of("Hello")
        assert {one.id for one in stack.client.models.list()} == set(MODELS)
        metrics = f"{stack.gateway.url}/metrics"
        eventually(lambda: sample(metrics, "warmq_workers_not_loaded", "beta") == 1, 30, "series")
        assert sample(metrics, "warmq_workers_not_loaded", "alpha") == 0
        assert sample(metrics, "warmq_waiting", "beta", priority="6", tenant="celery") == 0
        # What waits in a batch makes the worker load the model; then its requests are answered.
        submit_batch(stack.store, 3, queue="warmq.beta")
        eventually(lambda: loaded(stack) == "beta", 40, "beta is loaded")
        assert ask(stack, "beta") == stack.text_of("Hello")


def test_a_request_for_a_model_that_no_worker_can_load_is_refused_at_once(tmp_path: Path) -> None:
    with several(tmp_path, "simulate:fail") as stack:
        submit_batch(stack.store, 3, queue="warmq.beta")
        eventually(lambda: any(one.get("unloadable") for one in stack.store.announcements()),
                   40, "the failure is announced")  # fmt: skip

        def refused() -> openai.InternalServerError | None:
            try:
                stack.client.with_options(timeout=2, max_retries=0).chat.completions.create(
                    model="beta", messages=HELLO
                )
            except openai.InternalServerError as error:
                return error
            except openai.APITimeoutError:  # it was queued before the gateway knew
                return None
            return None

        error = eventually(refused, 20, "the refusal")
        assert (error.status_code, error.code, error.param) == (503, "model_unloadable", "model")
        assert "simulated failure to load" in error.message
        assert error.response.headers["x-should-retry"] == "false"
        assert 1 <= int(error.response.headers["retry-after"]) <= 60
        assert ask(stack, "alpha") == stack.text_of("Hello")
