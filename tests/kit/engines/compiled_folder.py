"""Folders as optimum-rbln leaves them, made from its own rbln_config.json files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from demo.stack import ROOT
from worker.engine.rbln.model import CONFIG_NAME, Artefact, read_artefact

WRITTEN_BY_0_12 = ROOT / "tests" / "rbln" / "data"


def compiled(folder: Path, config: dict[str, Any] | str, *, files: bool = True) -> Path:
    """Make a folder with this config and, unless told otherwise, empty compiled files."""
    if isinstance(config, str):
        config = json.loads((WRITTEN_BY_0_12 / f"{config}.json").read_text())
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG_NAME).write_text(json.dumps(config))
    for part in config.get("_compile_cfgs", []) if files else []:
        (folder / f"{part['compiled_model_name']}.rbln").touch()
    return folder


def read(folder: Path) -> Artefact:
    """Read an artefact that must be one."""
    found = read_artefact(folder)
    assert found is not None
    return found
