"""The chart by a second renderer: Go's own templates with Sprig, which are Helm's (root; apt)."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from kit.chart.helm_chart import (
    CHART,
    EXAMPLES,
    Resource,
    context_of,
    documents,
    merged,
    notes,
    render,
    templates,
    values,
)  # fmt: skip

GO = Path("/usr/lib/go-1.19/bin/go")
SOURCE = Path(__file__).parent / "second_renderer" / "main.go"
NAMES = [example.name.removesuffix("-values.yaml") for example in EXAMPLES]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The renderer, built with the distribution's packages of Go."""
    built = tmp_path_factory.mktemp("renderer") / "render"
    env = {
        "PATH": os.environ["PATH"], "HOME": str(built.parent), "GO111MODULE": "off",
        "GOPATH": "/usr/share/gocode", "GOCACHE": str(built.parent / "cache"), "CGO_ENABLED": "0",
    }  # fmt: skip
    subprocess.run([GO, "build", "-o", built, SOURCE], check=True, env=env, timeout=280)
    return built


def texts(program: Path, given: dict[str, object]) -> dict[str, str]:
    """Return each template's text.

    Raises:
        ValueError: a template refuses the values.
    """
    asked = {
        "templates": templates(),
        "files": {
            str(file.relative_to(CHART)): file.read_text()
            for folder in ("dashboards", "rules")
            for file in (CHART / folder).iterdir()
        },
        "context": context_of(given),
    }
    done = subprocess.run(
        [program], input=json.dumps(asked), capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise ValueError(done.stderr)
    found: dict[str, str] = json.loads(done.stdout)
    return found


def resources(found: dict[str, str]) -> list[Resource]:
    return [
        resource
        for name in sorted(found)
        if name.endswith(".yaml")
        for resource in documents(found[name])
    ]


@pytest.mark.parametrize("example", EXAMPLES, ids=NAMES)
def test_both_renderers_say_the_same(example: Path, program: Path) -> None:
    given = values(example)
    found = texts(program, given)
    assert resources(found) == render(given)
    assert len(resources(found)) > 1
    assert found["warmq/templates/NOTES.txt"] == notes(given)


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"gateway": {"env": {"WARMQ_GATEWAY_MODELS": "a"}}}, "set gateway.models instead"),
        ({"gateway": {"extraEnv": [{"name": "WARMQ_QUEUE"}]}}, "set queue instead"),
        ({"gateway": {"podLabels": {"helm.sh/chart": "x"}}}, "has the label helm.sh/chart"),
        ({"workers": {"w": {}}}, "workers.w.model is not set"),
    ],
)
def test_both_renderers_refuse_in_the_same_words(
    wrong: dict[str, Any], told: str, program: Path
) -> None:
    given = values(**merged({"gateway": {"store": "s3://files"}}, wrong))
    with pytest.raises(ValueError, match=told):
        texts(program, given)
    with pytest.raises(Exception, match=told):
        render(given)
