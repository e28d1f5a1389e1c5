"""The gateway is a package of its own, whose commands `producer` finds by an entry point."""

from __future__ import annotations

import subprocess
import sys

import pytest

from demo.stack import ROOT

#: Runs the command line where the gateway's own packages are not installed.
WITHOUT = (
    "import sys\n"
    "for name in ('starlette', 'uvicorn', 'httpcore', 'jinja2', 'obstore'):\n"
    "    sys.modules[name] = None\n"
    "from producer.cli.main import main\n"
    "main()\n"
)


def without(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", WITHOUT, *words],
        cwd=ROOT, text=True, capture_output=True, check=False,
    )  # fmt: skip


def test_serve_says_what_to_install() -> None:
    done = without("serve")
    assert done.returncode == 2
    assert done.stderr.endswith(" is not installed; pip install 'warmq[gateway]'\n")


@pytest.mark.parametrize("words", [("serve",), ("keys",), ("webhooks",), ()])
def test_help_needs_nothing_of_the_gateway(words: tuple[str, ...]) -> None:
    done = without(*words, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert words or "\n  serve " in done.stdout


def test_a_command_of_producers_own_does_not_look_for_others() -> None:
    program = (
        "import sys, producer.cli.main as m; m.cli.get_command(None, 'list');"
        "sys.exit('gateway' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=False)
    assert done.returncode == 0


@pytest.mark.parametrize("image", ["gateway", "producer"])
def test_images_with_the_command_line_have_its_packages(image: str) -> None:
    text = (ROOT / "compose" / f"{image}.Dockerfile").read_text()
    wanted = {"contract", "producer", "gateway"}
    assert {line.split()[1] for line in text.splitlines() if line.startswith("COPY ")} >= wanted
    sent = (ROOT / ".dockerignore").read_text().split()
    assert {f"!{package}" for package in wanted} <= set(sent)
