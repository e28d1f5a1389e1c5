"""The chart by a second renderer: Go's own templates with Sprig, which are Helm's (root; apt)."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from helm_chart import CHART, EXAMPLES, Resource, context_of, documents, render, templates, values

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


def rendered(program: Path, given: dict[str, object]) -> list[Resource]:
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
    assert done.returncode == 0, done.stderr
    texts = json.loads(done.stdout)
    return [
        resource
        for name in sorted(texts)
        if name.endswith(".yaml")
        for resource in documents(texts[name])
    ]


@pytest.mark.parametrize("example", EXAMPLES, ids=NAMES)
def test_both_renderers_say_the_same(example: Path, program: Path) -> None:
    given = values(example)
    found = rendered(program, given)
    assert found == render(given)
    assert len(found) > 1
