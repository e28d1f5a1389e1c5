"""The NPU's compose file and example of the chart: what a schema cannot check."""

from __future__ import annotations

import yaml
from kit.chart.helm_chart import CHART, of_kind, render, values

from demo.stack import ROOT, procfile_command
from worker.drain.lifecycle import STOP_S
from worker.engine.rbln.rules import RBLN_KILL_GRACE_S

COMPOSE = yaml.safe_load((ROOT / "compose" / "compose.npu.yaml").read_text())
EXAMPLE = CHART / "ci" / "rbln-values.yaml"
(DEPLOYMENT,) = of_kind("Deployment", render(values(EXAMPLE))).values()
WORKERS = [COMPOSE["services"][name] for name in ("worker-0", "worker-by-hand")]


def test_an_engine_is_never_killed_before_its_grace_is_over() -> None:
    pod = DEPLOYMENT["spec"]["template"]["spec"]
    for worker in WORKERS:
        drain_s = float(worker["environment"]["WARMQ_DRAIN_TIMEOUT_S"])
        bound_s = drain_s + RBLN_KILL_GRACE_S + STOP_S
        assert int(worker["stop_grace_period"].removesuffix("s")) > bound_s
        assert pod["terminationGracePeriodSeconds"] > bound_s


def test_workers_are_started_as_the_procfile_says_and_without_privileges() -> None:
    for worker in WORKERS:
        assert worker["command"].split()[1:] == procfile_command()[1:]
        assert "privileged" not in worker
    assert WORKERS[0]["devices"] == ["rebellions.ai/npu=0"]
    assert {d.split(":")[0] for d in WORKERS[1]["devices"]} == {"/dev/rbln0", "/dev/rsd0"}


def test_a_pod_asks_for_its_cards_and_frees_them_before_the_next_one_starts() -> None:
    container = DEPLOYMENT["spec"]["template"]["spec"]["containers"][0]
    assert container["resources"]["limits"] == {"rebellions.ai/npu": "4"}
    assert DEPLOYMENT["spec"]["strategy"]["rollingUpdate"] == {"maxSurge": 0, "maxUnavailable": 1}


def test_a_device_plugin_before_0_4_0_gives_cards_by_its_own_name() -> None:
    older = values(EXAMPLE, workerDefaults={"resourceName": "rebellions.ai/ATOM"})
    (found,) = of_kind("Deployment", render(older)).values()
    (container,) = found["spec"]["template"]["spec"]["containers"]
    assert container["resources"]["limits"] == {"rebellions.ai/ATOM": "4"}
