"""Which warmq this is."""

import tomllib
from importlib import metadata
from pathlib import Path

import pytest

from contract.version import version

ROOT = Path(__file__).parents[3]


def test_the_version_is_the_installed_distributions() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert version() == declared


def test_a_checkout_that_is_not_installed_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    assert version() == "unknown (not installed)"
