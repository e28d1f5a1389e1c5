"""Resources held strictly against the API's schemas, and those of custom resources."""

from __future__ import annotations

import functools
import re
from typing import Any

import jsonschema
from cloudcoil.models.keda import v1alpha1 as keda
from cloudcoil.models.prometheus_operator import v1 as prometheus
from kubernetes_validate.utils import schema_contents
from referencing import Registry, Resource

#: The oldest that the chart allows, the newest in the wheel, and some between.
VERSIONS = ("1.25", "1.29", "1.33", "1.37")
CUSTOM: dict[tuple[str, str], Any] = {
    ("keda.sh/v1alpha1", "ScaledObject"): keda.ScaledObject,
    ("keda.sh/v1alpha1", "TriggerAuthentication"): keda.TriggerAuthentication,
    ("monitoring.coreos.com/v1", "PodMonitor"): prometheus.PodMonitor,
    ("monitoring.coreos.com/v1", "PrometheusRule"): prometheus.PrometheusRule,
}


def problem(resource: dict[str, Any], version: str) -> str:
    """Return what is wrong with a resource in a version of Kubernetes, '' if nothing is.

    A field that the schema does not have is wrong.
    """
    kind = (resource["apiVersion"], resource["kind"])
    try:
        _validator(kind, "" if kind in CUSTOM else version).validate(resource)
    except jsonschema.ValidationError as error:
        return f"{kind[1]}: {error.json_path}: {error.message[:300]}"
    except FileNotFoundError:
        return f"{kind[1]}: Kubernetes {version} has no {kind[0]}"
    return ""


@functools.cache
def _validator(kind: tuple[str, str], version: str) -> jsonschema.Draft202012Validator:
    """Return what kubernetes_validate makes anew for every resource, which takes a second."""
    if kind in CUSTOM:
        return jsonschema.Draft202012Validator(_schema(kind))
    folder = f"kubernetes-json-schema/v{version}.0-local-strict"
    # networking.k8s.io/v1 is networking-v1
    api = re.sub(r"^([^./]*)(?:\.[^/]*)?/", r"\1-", kind[0])
    schema = schema_contents(f"{folder}/{kind[1].lower()}-{api}.json", version)
    return jsonschema.Draft202012Validator(schema, registry=_definitions(folder, version))


@functools.cache
def _definitions(folder: str, version: str) -> Registry[Any]:
    found = Resource.from_contents(schema_contents(f"{folder}/_definitions.json", version))
    registry: Registry[Any] = found @ Registry()
    return registry


@functools.cache
def _schema(kind: tuple[str, str]) -> dict[str, Any]:
    """Return the schema of a model whose objects take no other fields than theirs."""
    found: dict[str, Any] = CUSTOM[kind].model_json_schema(by_alias=True)
    for each in (found, *found["$defs"].values()):
        if "properties" in each:
            each["additionalProperties"] = False
    # The model has the metadata of the API, whose own schema is looked at elsewhere.
    found["properties"]["metadata"] = {"type": "object", "required": ["name"]}
    found["required"] = ["apiVersion", "kind", "metadata", "spec"]
    return found
