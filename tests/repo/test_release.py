"""scripts/release says in words what a release lacks."""

from __future__ import annotations

from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader

import pytest

from demo.stack import ROOT

_spec = spec_from_loader("release", SourceFileLoader("release", str(ROOT / "scripts" / "release")))
assert _spec is not None and _spec.loader is not None
release = module_from_spec(_spec)
_spec.loader.exec_module(release)

LOG = "# Changelog\n\n## [Unreleased]\n\n## [0.2.0] - 2026-11-24\n\n### Added\n\n- A thing.\n"
READY = {
    "version": "0.2.0", "changelog": LOG, "tags": ["v0.1.0"], "changed": "",
    "built": {"warmq-0.2.0-py3-none-any.whl", "warmq-0.2.0.tar.gz"},
}  # fmt: skip


def test_nothing_is_missing_of_a_commit_that_is_ready() -> None:
    assert list(release.missing(**READY)) == []


@pytest.mark.parametrize(("change", "said"), [
    ({"changed": " M README.md\n"}, "the tree has changes: commit them first"),
    ({"tags": ["v0.1.0", "v0.2.0"]}, "v0.2.0 is released: set another version"),
    ({"changelog": LOG.replace("[0.2.0] - 2026-11-24", "[0.2.0]")}, "no heading `## [0.2.0] - "),
    ({"changelog": LOG.replace("## [Unreleased]", "")}, "no heading `## [Unreleased]`"),
    ({"changelog": LOG.replace("ed]\n", "ed]\n\n- New.\n")}, "something under [Unreleased]"),
    ({"built": {"warmq-0.2.0.tar.gz"}}, "dist/warmq-0.2.0-py3-none-any.whl is not there"),
])  # fmt: skip
def test_what_is_missing_is_said_with_its_remedy(change: dict[str, object], said: str) -> None:
    (told,) = release.missing(**(READY | change))
    assert said in told
