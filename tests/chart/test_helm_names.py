"""Names, labels and annotations of the chart's resources: none too long, none given twice."""

from __future__ import annotations

import itertools
from typing import Any

import jsonschema
import pytest
from kit.chart.helm_chart import Resource, of_kind, render, values

LONGEST = "w" * 16
SCALED = {"device": "cpu", "model": "/m", "autoscaling": {"enabled": True}}
#: All that has a switch.
ALL: dict[str, Any] = {
    "workers": {LONGEST: SCALED},
    "gateway": {"store": "s3://files"},
    "metrics": {"enabled": True, "podMonitor": {"enabled": True}, "rules": {"enabled": True},
                "dashboards": {"enabled": True}},
}  # fmt: skip


def installed(release: str = "prod", **more: Any) -> list[Resource]:
    return render(values(**(ALL | more)), release)


@pytest.mark.parametrize(
    ("release", "overrides"),
    [("r" * 53, {}), ("r" * 38 + "-" + "r" * 14, {}), ("prod", {"nameOverride": "n" * 63}),
     ("prod", {"fullnameOverride": "f" * 63})],
)  # fmt: skip
def test_the_longest_names_fit_into_a_label(release: str, overrides: dict[str, str]) -> None:
    """KEDA and its autoscaler put a ScaledObject's name into a label, which holds 63."""
    found = installed(release, **overrides)
    assert len(of_kind("ScaledObject", found)) == 1
    for resource in found:
        name = resource["metadata"]["name"]
        assert len(name) <= 63
        assert "--" not in name
        assert name.strip("-") == name
        for label in resource["metadata"]["labels"].values():
            assert len(label) <= 63


@pytest.mark.parametrize("wrong", ["Prod", "a_b", "-a", "a-", "a" * 64])
def test_a_name_that_kubernetes_has_not_is_refused(wrong: str) -> None:
    for field in ("nameOverride", "fullnameOverride"):
        with pytest.raises(jsonschema.ValidationError, match=wrong):
            installed(**{field: wrong})


def annotations(**worker: Any) -> dict[str, str]:
    found = installed(workers={"w": SCALED | worker})
    pod = of_kind("Deployment", found)["prod-warmq-worker-w"]["spec"]["template"]
    given: dict[str, str] = pod["metadata"]["annotations"]
    return given


def test_what_the_chart_says_of_evictions_may_be_said_otherwise() -> None:
    evict, disrupt = "cluster-autoscaler.kubernetes.io/safe-to-evict", "karpenter.sh/do-not-disrupt"
    assert annotations() == {evict: "false", disrupt: "true"}
    assert annotations(podAnnotations={evict: "true", "x.org/a": "b"}) == {
        evict: "true", disrupt: "true", "x.org/a": "b"
    }  # fmt: skip


OWN = [
    "app.kubernetes.io/name", "app.kubernetes.io/instance", "app.kubernetes.io/component",
    "app.kubernetes.io/version", "app.kubernetes.io/managed-by", "helm.sh/chart", "warmq/worker",
]  # fmt: skip


@pytest.mark.parametrize(
    ("label", "where"),
    [*itertools.product(OWN, ["workers", "gateway"]),
     *itertools.product(OWN[:2], ["podMonitor", "rules", "dashboards"])],
)  # fmt: skip
def test_a_label_of_the_chart_is_refused_as_one_of_yours(label: str, where: str) -> None:
    wrong: dict[str, Any] = {
        "workers": {"workers": {"w": SCALED | {"podLabels": {label: "x"}}}},
        "gateway": {"gateway": {"store": "s3://files", "podLabels": {label: "x"}}},
    }.get(where) or {"metrics": ALL["metrics"] | {where: {"enabled": True, "labels": {label: "x"}}}}
    with pytest.raises(Exception, match=f"has the label {label}, which the chart"):
        installed(**wrong)


def test_a_label_of_yours_is_on_the_pods() -> None:
    found = installed(workers={"w": SCALED | {"podLabels": {"team": "ml"}}})
    pod = of_kind("Deployment", found)["prod-warmq-worker-w"]["spec"]["template"]
    assert pod["metadata"]["labels"]["team"] == "ml"
    assert pod["metadata"]["labels"]["warmq/worker"] == "w"


@pytest.mark.parametrize("digest", ["sha256:" + "a" * 32, "sha256:" + "a" * 65, "a" * 64])
def test_a_digest_that_is_none_is_refused(digest: str) -> None:
    with pytest.raises(jsonschema.ValidationError, match=digest):
        installed(gateway={"store": "s3://files", "image": {"digest": digest}})


def test_an_image_may_be_named_by_its_digest() -> None:
    digest = "sha256:" + "a" * 64
    found = installed(gateway={"store": "s3://files", "image": {"digest": digest, "tag": "1"}})
    pod = of_kind("Deployment", found)["prod-warmq-gateway"]["spec"]["template"]["spec"]
    assert pod["containers"][0]["image"] == f"warmq-gateway@{digest}"
