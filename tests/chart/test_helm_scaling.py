"""What the chart gives KEDA, Prometheus and Grafana."""

from __future__ import annotations

import copy

import pytest
from kit.chart.expressions import DASHBOARDS, rules, selectors
from kit.chart.helm_chart import CHART, Resource, of_kind, render, values
from kit.chart.metric_pages import documented


def example(name: str) -> list[Resource]:
    return render(values(CHART / "ci" / f"{name}-values.yaml"))


def test_keda_asks_the_gateway_for_what_waits_and_runs_of_the_workers_model() -> None:
    resources = example("autoscaled")
    (name, scaled), = of_kind("ScaledObject", resources).items()  # fmt: skip
    assert scaled["spec"]["scaleTargetRef"]["name"] == name
    assert name in of_kind("Deployment", resources)
    (trigger,) = scaled["spec"]["triggers"]
    service, port = "prod-warmq-gateway", 8000
    assert service in of_kind("Service", resources)
    assert trigger["metadata"] == {
        "url": f"http://{service}.ml.svc:{port}/warmq/v1/scale?model=org%2Fllama+3",
        "valueLocation": "tokens", "targetValue": "1200000", "activationTargetValue": "0",
        "authMode": "bearer",
    }  # fmt: skip
    auth = of_kind("TriggerAuthentication", resources)[trigger["authenticationRef"]["name"]]
    assert auth["spec"]["secretTargetRef"] == [
        {"parameter": "token", "name": "warmq-scaler-key", "key": "key"}
    ]


@pytest.mark.parametrize("name", ["autoscaled", "prometheus"])
def test_all_that_keda_reads_of_a_trigger_is_text(name: str) -> None:
    for scaled in of_kind("ScaledObject", example(name)).values():
        for trigger in scaled["spec"]["triggers"]:
            assert {type(value) for value in trigger["metadata"].values()} == {str}


def test_dashboards_and_rules_arrive_as_they_are_in_the_repository() -> None:
    resources = example("prometheus")
    maps = {
        name: text
        for config in of_kind("ConfigMap", resources).values()
        for name, text in config["data"].items()
    }
    assert maps == {f"warmq-{file.stem}.json": file.read_text().rstrip("\n") for file in DASHBOARDS}
    (rule,) = of_kind("PrometheusRule", resources).values()
    given = [each for group in rule["spec"]["groups"] for each in group["rules"]]

    base = values(CHART / "ci" / "prometheus-values.yaml")["metrics"]["rules"]["runbookBase"]

    def named(found: list[Resource], base: str = "") -> dict[str, Resource]:
        for notes in (each["annotations"] for each in found if "annotations" in each):
            notes["runbook_url"] = f"{base}{notes['runbook_url']}"
        return {each.get("alert") or each["record"]: each for each in found}

    assert named(given) == named(copy.deepcopy(rules()), base)
    assert len(given) == len(rules())


def test_keda_asks_prometheus_for_series_that_there_are() -> None:
    (scaled,) = of_kind("ScaledObject", example("prometheus")).values()
    query = scaled["spec"]["triggers"][0]["metadata"]["query"]
    assert {each.series for each in selectors(query)} <= documented("Series of a gateway")


def test_keda_asks_prometheus_for_the_queue_that_the_worker_drains() -> None:
    for queue, name, asked in (("", "", "warmq"), ("", "llama", "warmq.llama"), ("b", "m", "b.m")):
        scaling = {
            "enabled": True, "source": "prometheus", "tokensPerReplica": 1,
            "prometheus": {"serverAddress": "http://prometheus"},
        }  # fmt: skip
        worker = {"device": "cpu", "model": "/m", "servedModelName": name, "autoscaling": scaling}
        written = values(queue=queue, workers={"w": worker}, gateway={"enabled": False})
        (scaled,) = of_kind("ScaledObject", render(written)).values()
        query = scaled["spec"]["triggers"][0]["metadata"]["query"]
        assert query == f'max(warmq_load_tokens{{queue="{asked}"}})'


def test_no_data_of_prometheus_is_no_reason_to_stop_all_workers() -> None:
    (scaled,) = of_kind("ScaledObject", example("prometheus")).values()
    assert scaled["spec"]["triggers"][0]["metadata"]["ignoreNullValues"] == "false"
