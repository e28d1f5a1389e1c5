"""The Helm chart, rendered in pure Python: values merged and judged as helm does it."""

from __future__ import annotations

import copy
import json
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jsonschema
import yaml
from gotpl.exts.helm import HelmTemplateEngine

from demo.stack import ROOT

CHART = ROOT / "compose" / "helm" / "warmq"
EXAMPLES = sorted((CHART / "ci").glob("*-values.yaml"))
Resource = dict[str, Any]


class Capabilities:
    """What templates may ask of the cluster: nothing is asked of it in this chart."""


class Files:
    """`.Files` of templates."""

    def Get(self, name: str) -> str:  # noqa: N802 - Helm's own name
        file = CHART / name
        return file.read_text() if file.exists() else ""


def values(example: Path | None = None, **more: Any) -> dict[str, Any]:
    """Return the chart's values under an example's, and `more` of these at the top."""
    found: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())
    if example is not None:
        found = merged(found, yaml.safe_load(example.read_text()))
    return merged(found, more)


def merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Return mappings merged as Helm does it: lists are taken whole."""
    found = copy.deepcopy(dict(below))
    for name, value in above.items():
        if isinstance(value, Mapping) and isinstance(found.get(name), Mapping):
            found[name] = merged(found[name], value)
        else:
            found[name] = copy.deepcopy(value)
    return found


def of_kind(kind: str, resources: list[Resource]) -> dict[str, Resource]:
    """Return the resources of one kind by name."""
    return {r["metadata"]["name"]: r for r in resources if r["kind"] == kind}


def pods(resources: list[Resource]) -> dict[str, Resource]:
    """Return the templates' pods by their Deployment's name."""
    deployments = of_kind("Deployment", resources)
    return {name: found["spec"]["template"]["spec"] for name, found in deployments.items()}


def env_of(found: Resource) -> dict[str, str]:
    """Return the environment of a pod's only container; what is from a Secret is ''."""
    return {each["name"]: each.get("value", "") for each in found["containers"][0]["env"]}


def judge(given: Mapping[str, Any]) -> None:
    """Raise jsonschema.ValidationError for values that `helm install` refuses."""
    schema = json.loads((CHART / "values.schema.json").read_text())
    jsonschema.Draft7Validator(schema).validate(given)


def render(given: Mapping[str, Any], release: str = "prod") -> list[Resource]:
    """Return the resources that helm would send, of values from `values()`.

    Raises:
        jsonschema.ValidationError: values are not as values.schema.json has them.
        Exception: the renderer's, for a template's own `fail`.
    """
    return [resource for text in texts(given, release) for resource in documents(text)]


def texts(given: Mapping[str, Any], release: str = "prod") -> list[str]:
    """Return the text of each template of resources, rendered."""
    return [text for name, text in sorted(_rendered(given, release).items()) if ".yaml" in name]


def notes(given: Mapping[str, Any], release: str = "prod") -> str:
    """Return what helm prints after an installation."""
    return _rendered(given, release)["warmq/templates/NOTES.txt"]


def _rendered(given: Mapping[str, Any], release: str) -> dict[str, str]:
    judge(given)
    sources = templates()
    context = context_of(given, release) | {"Capabilities": Capabilities(), "Files": Files()}
    engine = HelmTemplateEngine(sources)
    found: dict[str, str] = engine.render({n: context for n in sources if not n.endswith(".tpl")})
    return found


def templates() -> dict[str, str]:
    """Return the chart's templates by the names that Helm gives them."""
    return {f"warmq/templates/{f.name}": f.read_text() for f in (CHART / "templates").iterdir()}


def context_of(given: Mapping[str, Any], release: str = "prod") -> dict[str, Any]:
    """Return what Helm hands to each template, without `.Files` and `.Capabilities`."""
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    return {
        "Values": dict(given),
        "Chart": {name[0].upper() + name[1:]: value for name, value in chart.items()},
        "Release": {"Name": release, "Namespace": "ml", "Service": "Helm", "IsInstall": True},
        "Template": {"Name": "", "BasePath": "warmq/templates"},
    }


def probe(name: str, box: Resource, heartbeat: Path) -> bool:
    """Run a probe's command of a container as the kubelet does, on another heartbeat file."""
    command = [
        word.replace("/run/warmq/heartbeat", str(heartbeat))
        for word in box[f"{name}Probe"]["exec"]["command"]
    ]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def documents(text: str) -> Iterator[Resource]:
    """Return a text's documents, those that are empty left out; a key given twice is an error."""
    yield from filter(None, yaml.load_all(text, Loader=_Strict))


class _Strict(yaml.SafeLoader):
    """Refuses a key that a mapping has twice, which Kubernetes would take the last of."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        names = [self.construct_object(key, deep=True) for key, _ in node.value]
        twice = {name for name in names if names.count(name) > 1}
        if twice:
            raise ValueError(f"given twice: {twice} at {node.start_mark}")
        return super().construct_mapping(node, deep)
