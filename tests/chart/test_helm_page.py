"""docs/how-to/kubernetes.md: the chart takes its examples, its commands make what it names."""

from __future__ import annotations

import re
import shlex
from typing import Any

import pytest
import yaml
from kit.chart.helm_chart import env_of, merged, of_kind, pods, render, values
from kit.commands.pages import blocks

from demo.stack import ROOT

PAGE = (ROOT / "docs/how-to/kubernetes.md").read_text()
EXAMPLES: list[dict[str, Any]] = [
    yaml.safe_load(text) for text in re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
]
FIRST = EXAMPLES[0]


def commands(*begin: str) -> list[list[str]]:
    """Return the words of the page's commands that begin with these."""
    found = [shlex.split(line) for block in blocks(PAGE) if block.language == "sh"
             for line in block.commands]  # fmt: skip
    return [words for words in found if words[: len(begin)] == [*begin]]


def test_the_first_example_is_taken_as_it_stands() -> None:
    found = render(values(**FIRST))
    assert sorted(pods(found)) == ["prod-warmq-gateway", "prod-warmq-worker-llama"]


@pytest.mark.parametrize("more", EXAMPLES[1:])
def test_each_further_example_is_taken_over_the_first(more: dict[str, Any]) -> None:
    assert render(values(**merged(FIRST, more)))


def test_the_first_examples_bucket_has_its_credentials_and_is_reached() -> None:
    found = render(values(**FIRST))
    env = env_of(pods(found)["prod-warmq-gateway"])
    assert env["WARMQ_GATEWAY_STORE"].startswith("s3://")
    assert {"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION"} <= env.keys()
    egress = of_kind("NetworkPolicy", found)["prod-warmq-gateway"]["spec"]["egress"]
    assert {"ports": [{"protocol": "TCP", "port": 443}]} in egress


def test_the_images_that_it_builds_and_pushes_are_those_that_the_chart_runs() -> None:
    built = {words[words.index("-t") + 1]: words for words in commands("docker", "build")}
    assert [words[2] for words in commands("docker", "push")] == [*built]
    for device in ("cuda", "rbln", "cpu"):
        given = merged(FIRST, {"workers": {"llama": {"device": device}}})
        for found in pods(render(values(**given))).values():
            assert found["containers"][0]["image"] in built
    for image, words in built.items():
        file = ROOT / words[words.index("-f") + 1]
        assert file.exists(), image
        assert words[-1] == "."
        user = "gateway" if "gateway" in image else "worker"
        assert user in file.name
    assert len(built) == 4


def test_a_secret_of_the_page_has_the_keys_that_the_first_example_reads() -> None:
    made = {words[4]: words for words in commands("kubectl", "create", "secret", "generic")}
    for words in made.values():
        # A value on a command line stands in the shell's history and in the list of processes.
        assert not [word for word in words if word.startswith("--from-literal")]
    wanted = {
        (each["valueFrom"]["secretKeyRef"]["name"], each["valueFrom"]["secretKeyRef"]["key"])
        for found in pods(render(values(**FIRST))).values()
        for each in found["containers"][0]["env"]
        if "valueFrom" in each
    }
    assert {name for name, _ in wanted} == made.keys()
    for name, key in wanted:
        file = next(w for w in made[name] if w.startswith("--from-env-file=")).partition("=")[2]
        said = PAGE.split(f"`{file}`")[1].split("\n\n")[1]
        assert re.search(rf"^ *{key}=", said, re.MULTILINE), (file, key)
