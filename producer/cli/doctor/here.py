"""Judges this machine's side: the settings, and the folder that results would go to."""

import os
import platform
import shutil
from collections.abc import Iterator
from pathlib import Path

from contract.redis.connect import masked
from contract.settings import Settings, SettingsError, load, origins
from contract.version import version
from producer.cli.doctor.finding import Finding, ok, problem, remark

#: Free space below which results of a few thousand requests may not fit, and some hundred.
LOW_BYTES = 2**30
FULL_BYTES = 64 * 2**20


def judge_program() -> Finding:
    """Say which program this is."""
    return ok("settings", "version", version=version(), python=platform.python_version())


def judge_settings() -> tuple[Finding, Settings | None]:
    """Say where the settings come from; return them too, None if they are wrong."""
    try:
        settings, given = load(Settings), origins(Settings)
    except SettingsError as error:
        return problem("settings", "settings_wrong", error=error.message), None
    url = masked(settings.redis_url.get_secret_value())
    values = {name: url if name == "redis_url" else getattr(settings, name) for name in given}
    told = [f"WARMQ_{n.upper()}={values[n]} ({place})" for n, place in sorted(given.items())]
    return ok("settings", "settings", given=told, origins=given), settings


def judge_disk(folder: Path | None) -> Iterator[Finding]:
    """Say whether results can be written to a folder, and how much; None is a deleted one."""
    if folder is None:
        gone = "this folder, which was deleted"
        yield remark("disk", "folder_unwritable", folder=gone, free_bytes=0)
        return
    try:
        free = shutil.disk_usage(folder).free
        writable = os.access(folder, os.W_OK | os.X_OK)
    except OSError:
        free, writable = 0, False
    facts = {"folder": str(folder), "free_bytes": free}
    if not writable:
        yield remark("disk", "folder_unwritable", **facts)
    elif free < FULL_BYTES:
        yield problem("disk", "disk_full", **facts)
    elif free < LOW_BYTES:
        yield remark("disk", "disk_low", **facts)
    else:
        yield ok("disk", "disk", **facts)
