"""Who reaches whom by the chart's network policies: all that it installs, and nobody else."""

from __future__ import annotations

from typing import Any

import jsonschema
import pytest
from kit.chart.helm_chart import EXAMPLES, Resource, of_kind, render, values

MONITORING = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}
KEDA = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "keda"}}}
WORKERS = {"w": {"device": "cpu", "model": "/m"}}
#: Names, by UDP and TCP, and Redis.
ALWAYS = [53, 53, 6379]


def policy(component: str, **more: Any) -> Resource:
    """Return what the policy of workers or gateways says."""
    given = values(**({"workers": WORKERS, "gateway": {"existingClaim": "files"}} | more))
    found = of_kind("NetworkPolicy", render(given))[f"prod-warmq-{component}"]
    spec: Resource = found["spec"]
    return spec


def open_to_all(rules: list[Resource], side: str) -> list[int]:
    """Return the ports that are open, wherever the other side is."""
    return [port["port"] for rule in rules if side not in rule for port in rule["ports"]]


@pytest.mark.parametrize("store", ["s3://files", "gs://files/prod", "az://files"])
def test_a_gateway_reaches_the_bucket_that_it_is_told_to_use(store: str) -> None:
    egress = policy("gateway", gateway={"store": store})["egress"]
    assert open_to_all(egress, "to") == [*ALWAYS, 443]
    assert {"protocol": "TCP", "port": 443} in egress[-1]["ports"]


def test_a_gateway_with_a_volume_and_a_worker_reach_names_and_redis_alone() -> None:
    assert open_to_all(policy("gateway")["egress"], "to") == ALWAYS
    bucket = {"store": "s3://files"}
    assert open_to_all(policy("worker", gateway=bucket)["egress"], "to") == ALWAYS


def test_no_example_has_a_bucket_that_its_gateway_cannot_reach() -> None:
    for example in EXAMPLES:
        given = values(example)
        if given["gateway"]["enabled"] and given["gateway"]["store"]:
            policies = of_kind("NetworkPolicy", render(given)).items()
            (found,) = (each for name, each in policies if name.endswith("-gateway"))
            assert 443 in open_to_all(found["spec"]["egress"], "to"), example


def test_what_more_may_be_reached_is_added_to_what_the_chart_opens() -> None:
    more = [{"ports": [{"protocol": "TCP", "port": 9000}]}]
    found = policy("gateway", gateway={"store": "s3://f"}, networkPolicy={"gatewayEgress": more})
    assert open_to_all(found["egress"], "to") == [*ALWAYS, 443, 9000]


def test_redis_behind_sentinels_is_reached_at_both_ports() -> None:
    for component in ("worker", "gateway"):
        given = {"redisPorts": [26379, 6379], "redisTo": [{"podSelector": {}}]}
        rule = policy(component, networkPolicy=given)["egress"][1]
        assert [port["port"] for port in rule["ports"]] == [26379, 6379]
        assert rule["to"] == [{"podSelector": {}}]


@pytest.mark.parametrize("wrong", [[], [0], ["6379"], [70000]])
def test_redis_without_a_port_or_with_an_impossible_one_is_refused(wrong: list[Any]) -> None:
    with pytest.raises(jsonschema.ValidationError):
        render(values(networkPolicy={"redisPorts": wrong}, gateway={"store": "s3://f"}))


def test_redis_ports_that_are_taken_away_are_refused_since_no_port_means_all_of_them() -> None:
    given = values(gateway={"store": "s3://f"})
    del given["networkPolicy"]["redisPorts"]  # as helm does with a null
    with pytest.raises(jsonschema.ValidationError, match="redisPorts"):
        render(given)


def test_prometheus_reaches_gateways_that_others_do_not() -> None:
    given = {"gatewayFrom": [KEDA], "metricsFrom": [MONITORING]}
    ingress = policy("gateway", networkPolicy=given)["ingress"]
    assert [rule["from"] for rule in ingress] == [[KEDA], [MONITORING]]
    assert {port["port"] for rule in ingress for port in rule["ports"]} == {8000}


def test_a_gateway_that_everybody_reaches_is_not_closed_by_who_may_read_metrics() -> None:
    ingress = policy("gateway", networkPolicy={"metricsFrom": [MONITORING]})["ingress"]
    assert open_to_all(ingress, "from") == [8000]


def test_the_workers_metrics_are_for_those_who_are_named() -> None:
    metrics = {"enabled": True, "port": 9100}
    assert policy("worker", metrics=metrics)["ingress"] == []
    (rule,) = policy("worker", metrics=metrics, networkPolicy={"metricsFrom": [MONITORING]})[
        "ingress"
    ]
    assert rule["from"] == [MONITORING]
    assert [port["port"] for port in rule["ports"]] == [9100]
