"""The chart on a real kube-apiserver: all it renders is applied and read back (root; apt).

The server is the one of the distribution's sources, 1.20: older than the chart allows, so budgets
are sent as policy/v1beta1. There is no kubelet, so no pod starts.
"""

from __future__ import annotations

import json
import os
import ssl
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kit.chart.helm_chart import EXAMPLES, Resource, render, values
from kit.chart.kubernetes_schemas import CUSTOM

from demo.stack import eventually, free_port

SERVER = Path(os.environ.get("KUBE_APISERVER", "/tmp/kube-apiserver/kube-apiserver"))
TOKEN = "tests"


class Api:
    """A client of one server, as its only user."""

    def __init__(self, port: int) -> None:
        self._url = f"https://127.0.0.1:{port}"
        self._tls = ssl._create_unverified_context()

    def ask(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        """Return status and answer; a status of 0 while nobody answers."""
        request = urllib.request.Request(
            self._url + path, None if body is None else json.dumps(body).encode(),
            {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"},
            method=method,
        )  # fmt: skip
        try:
            with urllib.request.urlopen(request, timeout=20, context=self._tls) as answer:
                return answer.status, _read(answer.read())
        except urllib.error.HTTPError as error:
            return error.code, _read(error.read())
        except OSError:
            return 0, None

    def folder(self, resource: Resource) -> str:
        """Return the path that resources of this kind are created at."""
        api = resource["apiVersion"]
        base = f"/apis/{api}" if "/" in api else f"/api/{api}"
        if resource["kind"] in ("Namespace", "CustomResourceDefinition"):
            return f"{base}/{plural(resource['kind'])}"
        return f"{base}/namespaces/ml/{plural(resource['kind'])}"

    def create(self, resource: Resource) -> tuple[int, Any]:
        """Create a resource in the namespace `ml`."""
        return self.ask("POST", self.folder(resource), resource)


def _read(text: bytes) -> Any:
    return json.loads(text) if text.startswith(b"{") else text.decode()


def plural(kind: str) -> str:
    name = kind.lower()
    return name[:-1] + "ies" if name.endswith("y") else name + "s"


def definition(api: str, kind: str) -> Resource:
    """Return a custom resource's definition that takes any field: schemas are judged elsewhere."""
    group, version = api.split("/")
    names = {"plural": plural(kind), "singular": kind.lower(), "kind": kind}
    anything = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    return {
        "apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{names['plural']}.{group}", "annotations": {
            "api-approved.kubernetes.io": "unapproved, a test"}},
        "spec": {"group": group, "scope": "Namespaced", "names": names, "versions": [{
            "name": version, "served": True, "storage": True,
            "schema": {"openAPIV3Schema": anything}}]},
    }  # fmt: skip


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    """A server that is ready, with the definitions of the custom resources."""
    folder = tmp_path_factory.mktemp("cluster")
    etcd, peers, port = free_port(), free_port(), free_port()
    key = folder / "service-accounts.key"
    subprocess.run(["openssl", "genrsa", "-out", key, "2048"], check=True, capture_output=True)
    (folder / "tokens.csv").write_text(f"{TOKEN},admin,1,system:masters\n")
    commands = [
        ["etcd", f"--data-dir={folder}/etcd", f"--listen-client-urls=http://127.0.0.1:{etcd}",
         f"--advertise-client-urls=http://127.0.0.1:{etcd}",
         f"--listen-peer-urls=http://127.0.0.1:{peers}"],
        [str(SERVER), f"--etcd-servers=http://127.0.0.1:{etcd}", f"--cert-dir={folder}/certs",
         "--bind-address=127.0.0.1", "--advertise-address=127.0.0.1", f"--secure-port={port}",
         "--service-cluster-ip-range=10.0.0.0/24", f"--token-auth-file={folder}/tokens.csv",
         "--authorization-mode=AlwaysAllow", "--disable-admission-plugins=ServiceAccount",
         "--service-account-issuer=https://tests", f"--service-account-key-file={key}",
         f"--service-account-signing-key-file={key}"],
    ]  # fmt: skip
    running = []
    try:
        for command in commands:
            with (folder / f"{Path(command[0]).name}.log").open("wb") as log:
                running.append(subprocess.Popen(command, stdout=log, stderr=log))
        found = Api(port)
        eventually(lambda: found.ask("GET", "/readyz")[0] == 200, 120, "the server is ready", 0.5)
        namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "ml"}}
        assert found.create(namespace)[0] == 201
        for custom in CUSTOM:
            status, answer = found.create(definition(*custom))
            assert status == 201, answer
            at = found.folder({"apiVersion": custom[0], "kind": custom[1]})
            eventually(lambda at=at: found.ask("GET", at)[0] == 200, 60, f"{at} is served", 0.5)
        yield found
    finally:
        for process in reversed(running):
            process.kill()
            process.wait()


def as_1_20_has_it(resource: Resource) -> Resource:
    if resource["kind"] == "PodDisruptionBudget":
        return resource | {"apiVersion": "policy/v1beta1"}
    return resource


def missing(wanted: Any, found: Any, at: str = "") -> list[str]:
    """Return where what was read back differs from what was sent; what was added is not told."""
    if isinstance(wanted, dict) and isinstance(found, dict):
        return [
            told
            for name, value in wanted.items()
            for told in missing(value, found.get(name), f"{at}.{name}")
        ]
    if isinstance(wanted, list) and isinstance(found, list) and len(wanted) == len(found):
        pairs = enumerate(zip(wanted, found, strict=True))
        return [told for n, (w, f) in pairs for told in missing(w, f, f"{at}[{n}]")]
    same = wanted == found or (not wanted and not found)
    return [] if same else [f"{at}: {wanted!r} is {found!r}"]


@pytest.mark.parametrize("file", EXAMPLES, ids=[file.stem for file in EXAMPLES])
def test_all_that_an_example_renders_is_applied_and_read_back(file: Path, api: Api) -> None:
    release = file.stem.removesuffix("-values")
    for resource in map(as_1_20_has_it, render(values(file), release)):
        status, answer = api.create(resource)
        assert status == 201, answer
        name = resource["metadata"]["name"]
        status, read = api.ask("GET", f"{api.folder(resource)}/{name}")
        assert status == 200
        assert missing(resource, read) == []


def test_the_server_refuses_what_is_wrong(api: Api) -> None:
    resources = render(values(EXAMPLES[1]), "wrong")
    (deployment,) = (
        each
        for each in resources
        if each["kind"] == "Deployment" and each["metadata"]["name"].endswith("tiny")
    )
    deployment["spec"]["selector"]["matchLabels"] = {"app": "another"}
    status, answer = api.create(deployment)
    assert status == 422
    assert "selector" in answer["message"]
