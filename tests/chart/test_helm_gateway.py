"""The chart's gateway: which models it knows, how it ends, whose Redis user it is."""

from __future__ import annotations

import asyncio
from typing import Any

import jsonschema
import pytest
import yaml
from kit.chart.helm_chart import EXAMPLES, Resource, env_of, notes, of_kind, pods, render, values

from gateway.batches.runner import process as carrying
from gateway.online.models import Models
from gateway.settings import GatewaySettings

GATEWAY = "prod-warmq-gateway"


def installed(**given: Any) -> list[Resource]:
    """Render these values; without a store of its own the gateway has a volume."""
    gateway = {"existingClaim": "files"} | given.pop("gateway", {})
    if gateway.get("store"):
        gateway["existingClaim"] = ""
    return render(values(gateway=gateway, **given))


def gateway(**given: Any) -> Resource:
    return pods(installed(**given))[GATEWAY]


def served(name: str) -> dict[str, Any]:
    return {"device": "cpu", "model": "/models/m", "servedModelName": name}


def url_from(found: Resource) -> dict[str, str]:
    """Return the Secret and its key that a pod's Redis URL is in."""
    (box,) = found["containers"]
    (url,) = (each for each in box["env"] if each["name"] == "WARMQ_REDIS_URL")
    secret: dict[str, str] = url["valueFrom"]["secretKeyRef"]
    return secret


# -- models ---------------------------------------------------------------------------


def test_a_gateway_knows_the_models_of_the_charts_workers_before_one_runs() -> None:
    workers = {"a": served("llama"), "b": served("org/qwen 3"), "c": served("llama")}
    found = gateway(workers=workers, gateway={"models": ["elsewhere", "llama"]})
    assert env_of(found)["WARMQ_GATEWAY_MODELS"] == "elsewhere,llama,org/qwen 3"


def test_the_name_that_workers_have_by_default_counts_too() -> None:
    defaults = {"device": "cpu", "model": "/m", "servedModelName": "llama"}
    assert env_of(gateway(workerDefaults=defaults, workers={"a": {}}))["WARMQ_GATEWAY_MODELS"] == (
        "llama"
    )


def test_a_worker_of_the_default_queue_is_not_named() -> None:
    """Its model's name would be asked for in a queue of that name, which nobody drains."""
    workers = {"a": served("")}
    assert "WARMQ_GATEWAY_MODELS" not in env_of(gateway(workers=workers))


def test_what_is_taken_away_with_a_null_is_as_if_it_were_empty() -> None:
    given = values(gateway={"existingClaim": "files"}, workers={"a": served("llama")})
    for part in ("gateway", "workerDefaults"):
        for field in ("models", "env", "extraEnv", "podAnnotations", "podLabels"):
            given[part].pop(field, None)
    assert env_of(pods(render(given))[GATEWAY])["WARMQ_GATEWAY_MODELS"] == "llama"


async def test_the_gateway_reads_the_names_as_the_chart_writes_them() -> None:
    env = env_of(gateway(workers={"a": served("org/qwen 3"), "b": served("llama")}))
    configured = GatewaySettings(gateway_models=env["WARMQ_GATEWAY_MODELS"]).gateway_models

    class NoWorkers:
        async def workers(self) -> tuple[list[dict[str, Any]], float]:
            await asyncio.sleep(0)
            return [], 0.0

    models = Models(NoWorkers(), "warmq", configured)  # type: ignore[arg-type]
    assert await models.queue_and_name("org/qwen 3", None) == ("warmq.org/qwen 3", "org/qwen 3")
    assert await models.queue_and_name("llama", None) == ("warmq.llama", "llama")


@pytest.mark.parametrize(
    "wrong", [{"workers": {"a": served("a,b")}}, {"gateway": {"models": ["a,b"]}}]
)
def test_a_name_with_a_comma_is_refused_since_a_gateway_would_take_it_for_two(
    wrong: dict[str, Any],
) -> None:
    with pytest.raises(jsonschema.ValidationError, match="a,b"):
        installed(**wrong)


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"gateway": {"env": {"WARMQ_GATEWAY_MODELS": "a"}}}, "set gateway.models"),
        ({"gateway": {"env": {"WARMQ_DRAIN_TIMEOUT_S": "5"}}}, "set gateway.drainTimeoutS"),
        ({"gateway": {"env": {"WARMQ_GATEWAY_PORT": "80"}}}, "set gateway.service.port"),
        ({"workers": {"a": served("") | {"env": {"WARMQ_DRAIN_TIMEOUT_S": "5"}}}},
         "set workers.a.drainTimeoutS"),
        ({"workers": {"a": served("") | {"env": {"WARMQ_QUEUE": "q"}}}}, "set queue"),
    ],
)  # fmt: skip
def test_a_setting_that_has_a_value_of_the_chart_is_refused_beside_it(
    wrong: dict[str, Any], told: str
) -> None:
    with pytest.raises(Exception, match=told):
        installed(**wrong)


# -- the end --------------------------------------------------------------------------


@pytest.mark.parametrize("drain_s", [None, 0, 50, 300])
def test_a_gateway_is_killed_after_all_that_it_waits_for(drain_s: int | None) -> None:
    found = gateway(gateway={} if drain_s is None else {"drainTimeoutS": drain_s})
    drain_s = 50 if drain_s is None else drain_s
    assert env_of(found)["WARMQ_DRAIN_TIMEOUT_S"] == str(drain_s)
    (box,) = found["containers"]
    sleep, before_s = box["lifecycle"]["preStop"]["exec"]["command"]
    assert sleep == "sleep"
    bound_s = int(before_s) + drain_s + carrying._GRACE_S + 2
    assert bound_s < found["terminationGracePeriodSeconds"] <= bound_s + 10


@pytest.mark.parametrize("wrong", [-1, 3601, 0.5, "50"])
def test_a_drain_that_the_gateway_would_refuse_is_refused(wrong: Any) -> None:
    with pytest.raises(jsonschema.ValidationError, match="drainTimeoutS"):
        gateway(gateway={"drainTimeoutS": wrong})


def test_an_online_request_has_its_whole_time_when_a_gateway_ends() -> None:
    assert values()["gateway"]["drainTimeoutS"] >= GatewaySettings().gateway_online_timeout_s


# -- Redis' users ---------------------------------------------------------------------


def test_workers_and_gateway_have_one_url_unless_each_is_given_its_own() -> None:
    for own, told in (
        ({}, ("url", "url")),
        ({"workerKey": "of-workers"}, ("of-workers", "url")),
        ({"workerKey": "w", "gatewayKey": "g"}, ("w", "g")),
    ):
        found = pods(installed(workers={"a": served("")}, redis=own))
        keys = tuple(url_from(found[name])["key"] for name in ("prod-warmq-worker-a", GATEWAY))
        assert keys == told
        assert {url_from(each)["name"] for each in found.values()} == {"warmq-redis"}


def test_one_example_has_redis_users_of_their_own() -> None:
    own = [
        {url_from(each)["key"] for each in pods(render(values(example))).values()}
        for example in EXAMPLES
    ]
    assert sum(len(keys) == 2 for keys in own) == 1


# -- what is said after an installation ------------------------------------------------


def test_the_notes_say_how_to_make_a_key_without_the_url_on_a_command_line() -> None:
    said = notes(values(gateway={"store": "s3://a"}, redis={"gatewayKey": "gateway"}, queue="q"))
    assert "--env=WARMQ_REDIS_URL" not in said
    assert "kubectl -n ml create -f -" in said
    text = said.split("<<'END'\n")[1].split("END\n")[0]
    pod = yaml.safe_load(text)
    (box,) = pod["spec"]["containers"]
    assert url_from(pod["spec"]) == {"name": "warmq-redis", "key": "gateway"}
    assert env_of(pod["spec"])["WARMQ_QUEUE"] == "q"
    assert box["command"][:3] == ["producer", "keys", "create"]
    assert box["image"] == "warmq-gateway:0.2.0"


def test_without_a_gateway_the_notes_say_nothing_of_keys() -> None:
    assert "keys create" not in notes(values(gateway={"enabled": False}))
    assert of_kind("Service", render(values(gateway={"enabled": False}))) == {}
