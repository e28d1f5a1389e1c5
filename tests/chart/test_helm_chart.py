"""The Helm chart: every example is valid in every version, and means what the pages say."""

from __future__ import annotations

import copy
from typing import Any

import jsonschema
import pytest
from kit.chart import helm_chart
from kit.chart.helm_chart import EXAMPLES, Resource, env_of, of_kind, pods, render, values
from kit.chart.kubernetes_schemas import VERSIONS, problem

from contract.setting_names import GATEWAY_SETTINGS, WORKER_SETTINGS
from worker.drain.lifecycle import STOP_S
from worker.engine.rbln.rules import RBLN_KILL_GRACE_S
from worker.settings import WorkerSettings

NAMES = [example.name.removesuffix("-values.yaml") for example in EXAMPLES]
SETTINGS = WORKER_SETTINGS | GATEWAY_SETTINGS | WorkerSettings.model_fields.keys()


def example(name: str, **more: Any) -> list[Resource]:
    return render(values(EXAMPLES[NAMES.index(name)], **more))


def worker(**spec: Any) -> list[Resource]:
    """Render one worker `w`, and no gateway."""
    spec = {"device": "cpu", "model": "/models/m"} | spec
    return render(values(workers={"w": spec}, gateway={"enabled": False}))


def pod(**spec: Any) -> Resource:
    return pods(worker(**spec))["prod-warmq-worker-w"]


def container(**spec: Any) -> Resource:
    found: Resource = pod(**spec)["containers"][0]
    return found


def all_pods() -> list[tuple[str, Resource]]:
    """Return (Deployment's name, pod) of every example."""
    return [found for name in NAMES for found in pods(example(name)).items()]


# -- schemas --------------------------------------------------------------------------


def test_there_are_six_examples() -> None:
    assert len(EXAMPLES) == 6


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", NAMES)
def test_every_example_is_valid_in_every_version_of_kubernetes(name: str, version: str) -> None:
    resources = example(name)
    assert [problem(each, version) for each in resources] == [""] * len(resources)


def paths(value: Any) -> list[tuple[Any, ...]]:
    """Return where mappings are within a value, but those that take any name."""
    free = ("labels", "annotations", "matchLabels", "limits", "requests", "metadata", "emptyDir")
    if isinstance(value, dict):
        below = [(k, *path) for k, v in value.items() if k not in free for path in paths(v)]
        return [(), *below]
    if isinstance(value, list):
        return [(n, *path) for n, v in enumerate(value) for path in paths(v)]
    return []


@pytest.mark.parametrize("name", NAMES)
def test_the_schemas_would_find_a_field_that_is_in_a_wrong_place(name: str) -> None:
    for resource in example(name):
        places = paths(resource)
        for place in (places[0], places[len(places) // 2], places[-1]):
            wrong = copy.deepcopy(resource)
            at: Any = wrong
            for step in place:
                at = at[step]
            if "nodeSelector" in place:
                continue
            at["misspelt"] = 1
            assert problem(wrong, VERSIONS[-1]), (resource["kind"], place)


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"workers": {"w": {"modle": "/m"}}}, "modle"),
        ({"workers": {"w": {"device": "tpu"}}}, "tpu"),
        ({"workers": {"W_1": {}}}, "W_1"),
        ({"workers": {"w": {"env": {"a b": "1"}}}}, "a b"),
        ({"workers": {"w": {"drainTimeoutS": "25"}}}, "25"),
        ({"gateway": {"store": "files"}}, "files"),
        ({"redis": {"existingSecret": ""}}, "non-empty"),
        ({"repliacs": 1}, "repliacs"),
    ],
)  # fmt: skip
def test_a_wrong_value_is_refused_by_the_schema(wrong: dict[str, Any], told: str) -> None:
    with pytest.raises(jsonschema.ValidationError, match=told):
        helm_chart.judge(values(**wrong))


def test_every_field_of_the_defaults_has_a_schema_and_is_valid() -> None:
    helm_chart.judge(values())


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"workers": {"w": {}}, "gateway": {"enabled": False}}, "workers.w.model is not set"),
        ({}, "gateway.store and gateway.existingClaim are not set"),
        ({"gateway": {"store": "s3://a", "existingClaim": "b"}}, "choose one"),
        (
            {"gateway": {"enabled": False},
             "workers": {"w": {"model": "/m", "autoscaling": {"enabled": True}}}},
            "needs the gateway",
        ),
        (
            {"gateway": {"enabled": False},
             "workers": {"w": {"model": "/m", "autoscaling": {
                 "enabled": True, "source": "prometheus"}}}},
            "needs serverAddress",
        ),
        (
            {"gateway": {"store": "s3://a"},
             "workers": {"w": {"model": "/m", "autoscaling": {
                 "enabled": True, "minReplicas": 9, "maxReplicas": 3}}}},
            "minReplicas is above maxReplicas",
        ),
        (
            {"gateway": {"store": "s3://a"}, "metrics": {"podMonitor": {"enabled": True}}},
            "set metrics.enabled",
        ),
    ],
)  # fmt: skip
def test_values_that_cannot_work_together_are_refused_in_words(
    wrong: dict[str, Any], told: str
) -> None:
    with pytest.raises(Exception, match=told):
        render(values(**wrong))


# -- workers --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "kill_grace_s"),
    [({}, 5), ({"device": "rbln"}, RBLN_KILL_GRACE_S), ({"killGraceS": 0}, 0),
     ({"drainTimeoutS": 600}, 5), ({"drainTimeoutS": 0}, 5)],
)  # fmt: skip
def test_a_pod_is_killed_after_the_worker_must_have_ended(
    spec: dict[str, Any], kill_grace_s: float
) -> None:
    found = pod(**spec)
    env = env_of(found)
    assert float(env["WARMQ_KILL_GRACE_S"]) == kill_grace_s
    assert float(env["WARMQ_DRAIN_TIMEOUT_S"]) == spec.get("drainTimeoutS", 25)
    bound_s = float(env["WARMQ_DRAIN_TIMEOUT_S"]) + kill_grace_s + STOP_S
    assert bound_s < found["terminationGracePeriodSeconds"] <= bound_s + 10


def test_accelerators_are_asked_for_by_device() -> None:
    def limits(**spec: Any) -> Any:
        return container(**spec).get("resources", {}).get("limits")

    assert limits(device="cpu") is None
    assert limits(device="cuda", accelerators=2) == {"nvidia.com/gpu": "2"}
    assert limits(device="rbln") == {"rebellions.ai/npu": "1"}
    memory = {"limits": {"memory": "64Gi"}}
    assert limits(device="cuda", resourceName="x.org/card", resources=memory) == {
        "memory": "64Gi", "x.org/card": "1"
    }  # fmt: skip


def test_what_a_worker_says_goes_before_the_defaults_also_if_it_is_nothing() -> None:
    given = values(
        workerDefaults={"replicas": 3, "drainTimeoutS": 60, "autoscaling": {"minReplicas": 2}},
        workers={"a": {"device": "cpu", "model": "/m", "replicas": 0, "drainTimeoutS": 0},
                 "b": {"device": "cpu", "model": "/m", "autoscaling": {
                     "enabled": True, "minReplicas": 0}}},
        gateway={"store": "s3://a"},
    )  # fmt: skip
    resources = render(given)
    deployments = of_kind("Deployment", resources)
    assert deployments["prod-warmq-worker-a"]["spec"]["replicas"] == 0
    assert deployments["prod-warmq-worker-b"]["spec"].get("replicas") is None  # KEDA's
    scaled = of_kind("ScaledObject", resources)["prod-warmq-worker-b"]["spec"]
    assert scaled["minReplicaCount"] == 0


# -- all pods --------------------------------------------------------------------------


def test_no_pod_is_root_or_may_write_its_own_files() -> None:
    for name, found in all_pods():
        assert found["securityContext"]["runAsNonRoot"] is True, name
        assert found["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert found["automountServiceAccountToken"] is False
        for box in found["containers"]:
            assert box["securityContext"] == {
                "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }  # fmt: skip


def test_pods_are_given_settings_that_there_are() -> None:
    for name, found in all_pods():
        # Kubernetes would add WARMQ_GATEWAY_PORT and others for a Service `warmq-gateway`.
        assert found["enableServiceLinks"] is False
        for variable in env_of(found):
            if variable.startswith("WARMQ_"):
                assert variable.removeprefix("WARMQ_").lower() in SETTINGS, (name, variable)


def test_every_mount_has_its_volume() -> None:
    for name, found in all_pods():
        volumes = [each["name"] for each in found["volumes"]]
        mounts = [each["name"] for each in found["containers"][0]["volumeMounts"]]
        assert sorted(volumes) == sorted(mounts), name
        assert len(set(volumes)) == len(volumes)


@pytest.mark.parametrize("name", NAMES)
def test_what_selects_pods_selects_those_of_one_deployment(name: str) -> None:
    resources = example(name)
    labelled = {
        n: d["spec"]["template"]["metadata"]["labels"]
        for n, d in of_kind("Deployment", resources).items()
    }

    def selected(labels: dict[str, str]) -> list[str]:
        return [n for n, has in labelled.items() if labels.items() <= has.items()]

    for kind in ("Deployment", "PodDisruptionBudget"):
        for n, resource in of_kind(kind, resources).items():
            assert selected(resource["spec"]["selector"]["matchLabels"]) == [n]
    for n, resource in of_kind("Service", resources).items():
        assert selected(resource["spec"]["selector"]) == [n]
    covered = [
        n
        for policy in of_kind("NetworkPolicy", resources).values()
        for n in selected(policy["spec"]["podSelector"]["matchLabels"])
    ]
    assert sorted(covered) == sorted(labelled)
    for monitor in of_kind("PodMonitor", resources).values():
        assert selected(monitor["spec"]["selector"]["matchLabels"]) == [*labelled]
